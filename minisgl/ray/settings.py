"""The arguments of `minisgl.ray_serve:app`, checked: what the server gets, what its engines and Ray get.

They are the fields of `ServerConfig`, `EngineConfig` and `RayConfig`, by name, as text (`serve run ... tp=2`)
or as values (a config file). This module does not import Ray.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from minisgl.commands.flags import FALSE, TRUE, Field, fields_of
from minisgl.config import EngineConfig, ServerConfig, check_engine_config, check_server_config
from minisgl.config.field_checks import check_types, require
from minisgl.config.server import SECONDS
from minisgl.errors import ConfigError

OF_BOTH = ("model", "revision", "tokenizer", "seed", "compile_cache")
"""Fields of `EngineConfig` that the server needs, too."""
HTTP = "Ray Serve listens for HTTP: see http_options in Serve's config file"
ENGINES = "Ray Serve starts engines: set min_replicas and max_replicas"
REFUSED = {
    "host": HTTP,
    "port": HTTP,
    "tls_cert": HTTP,
    "tls_key": HTTP,
    "keep_alive_timeout_s": HTTP,
    "replicas": ENGINES,
    "engine_restarts": ENGINES,
    "spare_process": ENGINES,
    "engine_listen": ENGINES,
    "engine_secret_file": "each ingress makes a secret of its own",
    "api_workers": "one ingress chooses the engine of each call",
    "kv_events_endpoint": "several engines of a host would need an address each",
    "kv_events_replay_endpoint": "several engines of a host would need an address each",
}
"""What does not go with Ray Serve, and why."""


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """What Ray Serve is told of the engines and the ingress."""

    min_replicas: int = 1
    """Engines that always run, at least 1."""
    max_replicas: int = 1
    """Most engines, each with --tp GPUs."""
    target_use: float = 0.8
    """Add engines until at most this share of their KV pages, and of their rows, is in use: above 0, to 1."""
    waiting_per_replica: int = 8
    """Add an engine for so many waiting requests."""
    look_back_s: float = 15.0
    """The figures for both are means over this time."""
    upscale_delay_s: float = 5.0
    """How long engines must be missing before more are started."""
    downscale_delay_s: float = 300.0
    """How long engines must be superfluous before some are stopped."""
    engine_cpus: float = 1.0
    """CPUs that Ray sets aside for each engine."""
    ingress_cpus: float = 1.0
    """CPUs that Ray sets aside for the ingress."""
    max_surge_percent: int = 0
    """Further engines that an upgrade may start before it stops old ones, in percent. They need free GPUs."""


class RaySettings(NamedTuple):
    """The arguments, checked, and the command lines that they become."""

    server: ServerConfig
    engine: EngineConfig
    ray: RayConfig
    server_flags: list[str]
    """Of `minisgl serve`, without what the ingress adds. May hold API keys."""
    engine_flags: list[str]
    """Of `minisgl engine`, without `--server`."""

    @property
    def num_gpus(self) -> int:
        """GPUs of each engine."""
        return 0 if self.engine.device == "cpu" else self.engine.tp

    @property
    def engine_resources(self) -> dict[str, Any]:
        """Options of the engines' deployment: one bundle on one node, so that ranks share its NVLink."""
        cpus, gpus = self.ray.engine_cpus, self.num_gpus
        return {
            "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
            "placement_group_bundles": [{"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}],
            "placement_group_strategy": "STRICT_PACK",
        }


def settings_from(arguments: Mapping[str, Any]) -> RaySettings:
    """Check the arguments. Dashes in names count as underscores.

    Raises:
        ConfigError: a name is unknown or refused, or a value can't be used.
    """
    fields: dict[str, tuple[type, Field]] = {}
    for cls in (ServerConfig, EngineConfig, RayConfig):
        fields |= {field.name: (cls, field) for field in fields_of(cls) if field.kind is not None}
    values: dict[type, dict[str, Any]] = {ServerConfig: {}, EngineConfig: {}, RayConfig: {}}
    for given, value in arguments.items():
        name = given.replace("-", "_")
        if name in REFUSED:
            raise ConfigError(f"{given} does not go with Ray Serve: {REFUSED[name]}")
        if name not in fields:
            guesses = get_close_matches(name, set(fields) - set(REFUSED), n=1)
            meant = (
                f"; did you mean {guesses[0]}?" if guesses else "; docs/scaling.md says where they are listed"
            )
            raise ConfigError(f"there is no argument {given!r}{meant}")
        cls, field = fields[name]
        values[cls][name] = _value(field, value)
    server, engine = ServerConfig(**values[ServerConfig]), EngineConfig(**values[EngineConfig])
    ray = RayConfig(**values[RayConfig])
    check_server_config(server)
    check_engine_config(engine)
    check_ray_config(ray)
    shared_values = {name: value for name, value in values[EngineConfig].items() if name in OF_BOTH}
    # --seed has no effect on an engine: the server draws the seeds.
    engine_values = {name: value for name, value in values[EngineConfig].items() if name != "seed"}
    common = [f"--drain-timeout-s={server.drain_timeout_s}", f"--log-level={server.log_level}"]
    return RaySettings(
        server,
        engine,
        ray,
        [*flags_of(ServerConfig, values[ServerConfig]), *flags_of(EngineConfig, shared_values)],
        [*flags_of(EngineConfig, engine_values), *common],
    )


def check_ray_config(config: RayConfig) -> None:
    """Refuse values with which Ray Serve can't run engines.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """
    check_types(config)
    require(1 <= config.min_replicas <= 64, "min_replicas", "between 1 and 64", config.min_replicas)
    bounds = f"between min_replicas ({config.min_replicas}) and 64"
    require(config.min_replicas <= config.max_replicas <= 64, "max_replicas", bounds, config.max_replicas)
    require(0 < config.target_use <= 1, "target_use", "above 0, and at most 1", config.target_use)
    waiting = config.waiting_per_replica
    require(waiting >= 1, "waiting_per_replica", "at least 1", waiting)
    # Ray Serve collects figures every 10 s, and refuses to look back on less.
    require(10 < config.look_back_s <= 3600, "look_back_s", "above 10, to 3600", config.look_back_s)
    for name in ("engine_cpus", "ingress_cpus"):
        value = getattr(config, name)
        require(0 < value <= 1e6, name, "above 0", value)
    for name in ("upscale_delay_s", "downscale_delay_s"):
        value = getattr(config, name)
        require(0 <= value <= 1e6, name, SECONDS, value)
    surge = config.max_surge_percent
    require(0 <= surge <= 100, "max_surge_percent", "between 0 and 100", surge)


def flags_of(cls: type, values: Mapping[str, Any]) -> list[str]:
    """The flags that give these values to the fields of a settings class."""
    flags: list[str] = []
    for field in fields_of(cls):
        if field.name not in values or values[field.name] is None:
            continue
        value = values[field.name]
        if field.kind is bool:
            flags.append(field.flag if value else "--no-" + field.flag[2:])
            continue
        # In one word, since a value may begin with a dash.
        flags += [f"{field.flag}={one}" for one in (value if field.repeats else (value,))]
    return flags


def _value(field: Field, given: Any) -> Any:
    """The value of a field from an argument.

    Raises:
        ConfigError: the text can't be read as one. `check_types` finds the rest.
    """
    if field.repeats:
        return tuple(given) if isinstance(given, list | tuple) else (given,)
    if not isinstance(given, str) or field.kind is str:
        is_whole = field.kind is float and isinstance(given, int) and not isinstance(given, bool)
        return float(given) if is_whole else given
    if given.lower() in ("none", "null") and field.default is None:
        return None
    if field.kind is bool:
        if given.lower() not in TRUE + FALSE:
            raise ConfigError(f"{field.name} must be one of {', '.join(TRUE + FALSE)}, got {given!r}")
        return given.lower() in TRUE
    assert field.kind is not None, "settings_from leaves these out"
    try:
        return field.kind(given)
    except ValueError:
        raise ConfigError(f"{field.name} must be a number, got {given!r}") from None
