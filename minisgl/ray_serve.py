"""`serve run minisgl.ray_serve:app model=...`: minisgl on Ray Serve (docs/scaling.md).

An ingress takes the calls and streams the answers; engines, as many as the load wants, connect to it.
"""

from typing import Any

from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from minisgl.ray.engine_replica import Engine
from minisgl.ray.ingress import Ingress, IngressLimits
from minisgl.ray.settings import RaySettings, settings_from

END_S = 30.0
"""How long a replica may take to end, beyond the time that its requests have."""


def app(arguments: dict[str, Any]) -> Application:
    """The application for Ray Serve, from arguments by the names of minisgl's flags and of `RayConfig`.

    Raises:
        ConfigError: an argument is unknown, or its value can't be used.
    """
    settings = settings_from(arguments)
    server, ray = settings.server, settings.ray
    drain_s = server.drain_timeout_s
    engines = Engine.options(
        **settings.engine_resources,
        **_number_of_engines(settings),
        max_surge_percent=ray.max_surge_percent,
        graceful_shutdown_timeout_s=drain_s + END_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    ingress = Ingress.options(
        ray_actor_options={"num_cpus": ray.ingress_cpus},
        max_surge_percent=100,  # the new one starts before the old one ends
        graceful_shutdown_timeout_s=drain_s + END_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return ingress.bind(
        engines.bind(settings.engine_flags, drain_s, server.heartbeat_timeout_s),
        settings.server_flags,
        IngressLimits(drain_s, server.max_queued_requests, server.request_timeout_s),
    )


def _number_of_engines(settings: RaySettings) -> dict[str, Any]:
    ray = settings.ray
    if ray.min_replicas == ray.max_replicas:
        return {"num_replicas": ray.min_replicas}
    by = {"target_use": ray.target_use, "waiting_per_replica": ray.waiting_per_replica}
    policy = AutoscalingPolicy(policy_function="minisgl.ray.autoscaling:EnginePolicy", policy_kwargs=by)
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=ray.min_replicas,
            max_replicas=ray.max_replicas,
            look_back_period_s=ray.look_back_s,
            upscale_delay_s=ray.upscale_delay_s,
            downscale_delay_s=ray.downscale_delay_s,
            policy=policy,
        )
    }
