"""The engines' deployment: each replica runs one engine, which connects to the ingress.

Promise: a replica is ready when its engine serves. It ends when its engine's requests have ended or have
gone on in other engines. When the ingress is replaced, the engine connects to the new one and keeps its
model loaded.
"""

import asyncio
import logging
import time

import msgspec
from ray import serve

from minisgl.engine.remote.supervisor import Pulse
from minisgl.ipc.child_process import module_command
from minisgl.ray.autoscaling import figures_of
from minisgl.ray.child import Child
from minisgl.ray.ingress import NAME as INGRESS
from minisgl.ray.whereabouts import IngressChooser, Whereabouts

log = logging.getLogger(__name__)

NAME = "engines"
FOLLOW_S = 1.0
"""How often to ask where the ingress is."""
ANSWER_S = 10.0
"""How long the ingress may take to answer that."""
EXIT_S = 15.0
"""How long an engine may take to end, beyond the time that its requests have."""


@serve.deployment(name=NAME, health_check_period_s=2)
class Engine:
    """Its options (GPUs, number, time to drain) are set by `minisgl.ray_serve.app`.

    Args:
        flags: of `minisgl engine`, without `--server`.
        drain_s: how long its requests may go on when this replica ends.
        heartbeat_s: an engine that says nothing for so long counts as hanging.

    Raises:
        RuntimeError: the engine can't start; the message says why.
    """

    async def __init__(self, flags: list[str], drain_s: float, heartbeat_s: float) -> None:
        self._drain_s = drain_s
        self._heartbeat_s = heartbeat_s
        self._pulse = Pulse(in_service=False)
        self._heard_s = 0.0  # time.monotonic
        self._ingress = serve.get_deployment_handle(INGRESS)
        self._engine = Child(module_command("minisgl.engine", "--server=-", *flags), self._read)
        self._following = asyncio.create_task(self._follow_ingress())
        try:
            while not self._pulse.in_service:
                if not self._engine.is_alive:
                    raise RuntimeError(f"minisgl engine can't start: {self._engine.why_ended()}")
                await asyncio.sleep(0.05)
        except BaseException:
            self._following.cancel()
            self._engine.kill()
            raise

    async def check_health(self) -> None:
        """For Ray Serve, which replaces an engine that raises."""
        if not self._engine.is_alive:
            raise RuntimeError(f"the engine is gone: {self._engine.why_ended()}")
        silent_s = time.monotonic() - self._heard_s
        if self._pulse.in_service and silent_s > self._heartbeat_s:
            self._engine.kill()
            raise RuntimeError(f"the engine has neither stepped nor answered for {silent_s:.0f} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For Ray Serve: what `EnginePolicy` decides by."""
        return figures_of(self._pulse)

    async def __del__(self) -> None:
        """For Ray Serve: end the engine in good order."""
        if hasattr(self, "_following"):
            self._following.cancel()
        if hasattr(self, "_engine"):
            await self._engine.stop(self._drain_s + EXIT_S)

    def _read(self, line: str) -> None:
        try:
            self._pulse = msgspec.json.decode(line, type=Pulse)
        except msgspec.DecodeError:
            log.info("%s", line)
            return
        self._heard_s = time.monotonic()

    async def _follow_ingress(self) -> None:
        """Tell the engine where the ingress is, now and whenever a younger one replaces it."""
        chooser = IngressChooser()
        while True:
            try:
                found = Whereabouts(*await asyncio.wait_for(self._ask_ingress(), ANSWER_S))
                ingress = chooser.next(found, in_service=self._pulse.in_service, now_s=time.monotonic())
                if ingress is not None:
                    self._engine.tell({"server": ingress.server, "secret": ingress.secret})
            except Exception as error:  # whatever Ray raises while no ingress runs
                log.info("the ingress does not say where it is: %r", error)
            await asyncio.sleep(FOLLOW_S)

    async def _ask_ingress(self) -> Whereabouts:
        return await self._ingress.whereabouts.remote()
