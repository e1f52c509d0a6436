"""Does reloads, one after the other, in the first server process.

If open answers can go on, engines are replaced one by one: the new engine starts beside the old one, or
after it if there is no room. If they can't (another model), all new engines start beside the old ones, which
finish their answers. If there is no room, new calls wait until the old engines have finished and the new ones
have started.

Promise: if a new engine does not start, an engine with the old settings goes on, and the caller is told why.
A reload refuses no call; those that wait are under the usual limits.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from minisgl.config import EngineConfig, check_engine_config, check_server_config
from minisgl.config.model_facts import folder_facts
from minisgl.errors import ConfigError, EngineDeadError, RequestError
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.supervision.keeper import EngineKeeper
from minisgl.server.engines.supervision.keepers import EngineKeepers
from minisgl.server.http_server import HttpServer, HttpServerSettings
from minisgl.server.processes.api_workers import ApiWorkers
from minisgl.server.reload.changes import new_settings
from minisgl.server.reload.places import Places, choose_places
from minisgl.server.reload.process_change import ProcessChange
from minisgl.server.reload.reloads import PendingReload, ReloadAnswer, Reloads
from minisgl.server.served_model import served_name

log = logging.getLogger(__name__)

FindModel = Callable[[EngineConfig], tuple[EngineConfig, Path]]
"""Finds the model that the settings name, and fetches it if need be. Returns the settings, with the folders
that the command line chooses filled in, and the model's folder. May take minutes, so it runs in a thread."""


class ReloaderParts(NamedTuple):
    """What the reloader works on."""

    settings: HttpServerSettings
    """Those at the server's start."""
    http_server: HttpServer
    engines: Engines
    keepers: EngineKeepers
    workers: ApiWorkers
    reloads: Reloads
    find_model: FindModel
    gpus: Sequence[str] | None
    """All that the engines may use, as CUDA_VISIBLE_DEVICES names them; None = unknown."""


class Reloader:
    """Create it when the engines are kept (`EngineKeepers.keep`); create and close it in one event loop."""

    def __init__(self, parts: ReloaderParts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._change = ProcessChange(parts.http_server, parts.engines)
        tp, gpus = parts.settings.engine.tp, list(parts.gpus or [])
        self._gpus_of_engine = {
            number: gpus[number * tp : (number + 1) * tp] for number in range(len(parts.keepers.all))
        }
        self._facts: dict[str, str] | None = None  # of the model's folder, when the engines loaded it
        self._device = ""  # that the engines run on
        self._is_closing = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop. A running reload ends with an error."""
        self._is_closing = True  # the loop ends even if an error hides the cancellation
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        parts = self._parts
        self._device = (await asyncio.shield(parts.keepers.ready)).device
        with contextlib.suppress(OSError):  # then each reload counts as that of another model
            self._facts = await asyncio.to_thread(folder_facts, self._settings.model_folder)
        while not self._is_closing:
            pending = await parts.reloads.next()
            try:
                result = await self._reload(pending.fields)
            except asyncio.CancelledError:
                _fail(pending, RequestError(503, "shutting_down", "the server is shutting down"))
                raise
            except Exception as error:
                log.warning("nothing was reloaded: %s", error)
                _fail(pending, error)
            else:
                if not pending.answer.done():
                    pending.answer.set_result(result)

    async def _reload(self, fields: Any) -> ReloadAnswer:
        parts, began_s = self._parts, time.monotonic()
        if parts.http_server.streams.refusal is not None:
            raise parts.http_server.streams.refusal.with_traceback(None)
        model = self._settings.engine.model
        if fields.model is not msgspec.UNSET and _is_same_path(fields.model, model):
            fields = msgspec.structs.replace(fields, model=model)
        target = new_settings(self._settings.server, self._settings.engine, fields)
        check_server_config(target.server)
        check_engine_config(target.engine)
        is_on_gpu = (target.engine.device or self._device) == "cuda"
        engine, folder = await asyncio.to_thread(parts.find_model, target.engine)
        facts = await asyncio.to_thread(folder_facts, folder)
        ends_answers = target.changes_answers or facts != self._facts
        settings = self._settings._replace(
            server=target.server,
            engine=engine,
            model_name=served_name(target.server.served_model_name, engine.model),
            model_folder=folder,
        )
        numbers = range(len(parts.keepers.all))
        # If open answers must end, either all engines start beside the old ones or none does.
        groups = [list(numbers)] if ends_answers else [[number] for number in numbers]
        reload = _RunningReload(settings, is_on_gpu, fields.beside)
        for group in groups:  # raises if there is no room, before anything is done
            self._choose_places(reload, group)
        await self._load(settings)
        log.info("reload: %s%s", settings.model_name, " takes the place of the model" if ends_answers else "")
        if not ends_answers:
            for number in numbers:
                await self._replace_engine(reload, number)
            await asyncio.gather(self._change.switch(), parts.workers.do("switch"))
        elif self._choose_places(reload, numbers).beside:
            await self._change_model_beside(reload)
        else:
            await self._change_model_in_place(reload)
        self._settings, self._facts = settings, facts
        ready = parts.engines.first.last_ready
        self._device = ready.device if ready is not None else self._device
        result = ReloadAnswer(
            model=settings.model_name,
            beside=reload.was_beside,
            streams="finished" if ends_answers else "moved",
            num_streams=reload.num_streams,
            engines=[{"id": one.number, "pid": one.pid} for one in parts.engines.all],
            seconds=round(time.monotonic() - began_s, 3),
        )
        log.info(
            "reload: done after %.1f s, %d requests %s", result.seconds, result.num_streams, result.streams
        )
        return result

    async def _load(self, settings: HttpServerSettings) -> None:
        """Load the text side of the model in all server processes.

        Raises:
            ModelError: its folder has no usable tokenizer.
        """
        await self._change.load(settings)
        next_model = {
            "server": dataclasses.asdict(settings.server),
            "engine": dataclasses.asdict(settings.engine),
            "model_name": settings.model_name,
            "model_folder": str(settings.model_folder),
        }
        await self._parts.workers.do("load", json.dumps(next_model))

    async def _replace_engine(self, reload: "_RunningReload", number: int) -> None:
        """Replace one engine. Its requests go on in the new one, or in others until that is ready."""
        old = self._parts.keepers.all[number]
        places = self._choose_places(reload, [number])
        if not places.beside:
            reload.num_streams += await self._num_open([old])
            await self._stop_then_start([old], reload, places, is_same=True)
            return
        (new,) = await self._start_beside([old], reload, places, is_same=True)
        reload.num_streams += await self._num_open([old])
        self._change.replace(old.engine, new.engine)
        self._parts.keepers.replace(old, new)
        self._parts.keepers.accept(new)
        await self._parts.workers.do("replace", _names_for_workers(old, new))
        await self._remove([old])
        self._note_gpus([number], places)
        reload.was_beside = True

    async def _change_model_beside(self, reload: "_RunningReload") -> None:
        """Start engines of another model. The old ones finish their requests."""
        keepers, workers = self._parts.keepers, self._parts.workers
        old_keepers = list(keepers.all)
        places = self._choose_places(reload, range(len(old_keepers)))
        new_keepers = await self._start_beside(old_keepers, reload, places, is_same=False)
        reload.num_streams = await self._num_open(old_keepers)
        pairs = [(old.engine, new.engine) for old, new in zip(old_keepers, new_keepers, strict=True)]
        await asyncio.gather(
            self._change.switch(pairs),
            workers.do("switch", _names_for_workers(old_keepers[0], new_keepers[0])),
        )
        for old, new in zip(old_keepers, new_keepers, strict=True):
            keepers.replace(old, new)
            keepers.accept(new)
        log.info(
            "reload: %s is served; %d requests end in the engine before", reload.name, reload.num_streams
        )
        await asyncio.gather(
            *[old.engine.wait_until_empty() for old in old_keepers],
            workers.do("left", _names_for_workers(old_keepers[0])),
        )
        await self._remove(old_keepers)
        self._note_gpus(range(len(old_keepers)), places)
        reload.was_beside = True

    async def _change_model_in_place(self, reload: "_RunningReload") -> None:
        """Let the engines finish their requests while new calls wait; then start engines of another model."""
        keepers, workers = self._parts.keepers, self._parts.workers
        old_keepers = list(keepers.all)
        places = self._choose_places(reload, range(len(old_keepers)))
        reload.num_streams = await self._num_open(old_keepers)
        log.info("reload: %d requests end, new calls wait for %s", reload.num_streams, reload.name)
        try:
            await asyncio.gather(self._change.hold(), workers.do("hold"))
            await self._stop_then_start(old_keepers, reload, places, is_same=False)
        except BaseException:
            self._change.release()
            workers.release()
            raise
        await asyncio.gather(self._change.switch(), workers.do("switch"))

    async def _start_beside(
        self, old_keepers: Sequence[EngineKeeper], reload: "_RunningReload", places: Places, *, is_same: bool
    ) -> list[EngineKeeper]:
        """Start an engine for each of the old ones, and return their keepers when all are ready.

        Raises:
            EngineDeadError, ConfigError: one does not start. All of them have ended then.
        """
        new_keepers: list[EngineKeeper] = []
        try:
            for old, gpus in zip(old_keepers, places.gpus, strict=True):
                # On a GPU the first engine compiles, and the others find its code.
                after = new_keepers[0].ready if new_keepers and reload.is_on_gpu else None
                new_keepers.append(
                    old.successor(_worker_settings(old, reload.settings, gpus), starts_after=after)
                )
                self._prepare(new_keepers[-1])
            await self._wait_until_ready(new_keepers)
            for old, new in zip(old_keepers, new_keepers, strict=True):
                if is_same:
                    _check_room(old, new)
                # It returns when every server process is connected to the new engine.
                await self._parts.workers.num_suspects(new.engine.generation)
        except BaseException:
            await self._remove(new_keepers)
            raise
        return new_keepers

    async def _stop_then_start(
        self, old_keepers: Sequence[EngineKeeper], reload: "_RunningReload", places: Places, *, is_same: bool
    ) -> None:
        """Stop engines, then start new ones in their places, which get the requests of the old ones.

        Raises:
            EngineDeadError, ConfigError: one does not start. Engines with the old settings have taken over.
        """
        new_keepers: list[EngineKeeper] = []
        loop = asyncio.get_running_loop()
        old_ones_ended: asyncio.Future[None] = loop.create_future()
        for old, gpus in zip(old_keepers, places.gpus, strict=True):
            # On a GPU the first engine compiles, and the others find its code.
            after = new_keepers[0].ready if new_keepers and reload.is_on_gpu else old_ones_ended
            new_keepers.append(
                old.successor(_worker_settings(old, reload.settings, gpus), starts_after=after)
            )
            await self._put_in_place(new_keepers[-1], old)
        await self._remove(old_keepers)
        old_ones_ended.set_result(None)
        try:
            await self._wait_until_ready(new_keepers)
            for old, new in zip(old_keepers, new_keepers, strict=True):
                if is_same:
                    _check_room(old, new)
        except Exception as error:
            log.warning("reload: the new engine does not start; one as before takes its place: %s", error)
            await self._restore(old_keepers, new_keepers)
            raise
        for new in new_keepers:
            self._parts.keepers.accept(new)
        self._note_gpus([new.engine.number for new in new_keepers], places)

    async def _restore(
        self, old_keepers: Sequence[EngineKeeper], new_keepers: Sequence[EngineKeeper]
    ) -> None:
        """Start engines with the old settings in the places of the new ones. The old engines have ended."""
        old_ones_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        again: list[EngineKeeper] = []
        for old, new in zip(old_keepers, new_keepers, strict=True):
            again.append(new.successor(old.settings.worker, starts_after=old_ones_ended, may_fail_first=True))
            await self._put_in_place(again[-1], new)
            self._parts.keepers.accept(again[-1])
        await self._remove(new_keepers)
        old_ones_ended.set_result(None)
        for keeper in again:
            await asyncio.wait((keeper.ready, keeper.failed), return_when=asyncio.FIRST_COMPLETED)

    async def _put_in_place(self, new: EngineKeeper, old: EngineKeeper) -> None:
        """Put an engine that is not ready yet in the place of another one. The requests wait for it."""
        self._prepare(new)
        self._change.replace(old.engine, new.engine)
        self._parts.keepers.replace(old, new)
        await self._parts.workers.do("replace", _names_for_workers(old, new))

    def _prepare(self, new: EngineKeeper) -> None:
        parts = self._parts
        parts.engines.prepare(new.engine)
        parts.workers.add(new.engine.generation, new.engine.pid, new.dir_of_life())
        parts.keepers.prepare(new, parts.workers)

    async def _remove(self, keepers: Sequence[EngineKeeper]) -> None:
        """End engines that have no requests any more, or never had."""
        for keeper in keepers:
            await self._parts.keepers.remove(keeper)
            with contextlib.suppress(EngineDeadError):  # a server process has ended, so it need not be told
                await self._parts.workers.do("end", _names_for_workers(keeper))
            self._parts.engines.remove(keeper.engine)

    async def _wait_until_ready(self, new_keepers: Sequence[EngineKeeper]) -> None:
        for new in new_keepers:
            await asyncio.wait((new.ready, new.failed), return_when=asyncio.FIRST_COMPLETED)
            if new.failed.done():
                failure = new.failed.result()
                kind = ConfigError if failure.is_user_mistake else EngineDeadError
                raise kind(f"the new engine did not start, and the one before goes on: {failure.reason}")

    def _choose_places(self, reload: "_RunningReload", numbers: Sequence[int]) -> Places:
        """The places of the engines that replace those with these numbers; raises as `choose_places`."""
        return choose_places(
            reload.settings.engine,
            self._gpus_of_engine,
            self._parts.gpus,
            is_on_gpu=reload.is_on_gpu,
            numbers=numbers,
            beside=reload.wants_beside,
        )

    def _note_gpus(self, numbers: Sequence[int], places: Places) -> None:
        for number, gpus in zip(numbers, places.gpus, strict=True):
            self._gpus_of_engine[number] = [name for name in gpus.split(",") if name]

    async def _num_open(self, old_keepers: Sequence[EngineKeeper]) -> int:
        if len(self._parts.keepers.all) == 1:
            return await self._parts.http_server.num_open()
        return sum(old.engine.num_open for old in old_keepers)


class _RunningReload:
    """The reload that is being done."""

    def __init__(self, settings: HttpServerSettings, is_on_gpu: bool, wants_beside: bool | None) -> None:
        self.settings = settings
        self.is_on_gpu = is_on_gpu
        self.wants_beside = wants_beside  # None = if there is room
        self.was_beside = False
        self.num_streams = 0

    @property
    def name(self) -> str:
        return self.settings.model_name


def _check_room(old: EngineKeeper, new: EngineKeeper) -> None:
    """Refuse a new engine that has less room for a request than the old one.

    Raises:
        ConfigError: open answers may not fit.
    """
    before, after = old.engine.last_ready, new.engine.last_ready
    if before is not None and after is not None and after.max_context_tokens < before.max_context_tokens:
        raise ConfigError(
            f"the new engine has room for {after.max_context_tokens} tokens of a request, the one before for "
            f"{before.max_context_tokens}, so open answers may not fit; give --max-context-tokens "
            f"{after.max_context_tokens}, and they end first"
        )


def _worker_settings(old: EngineKeeper, settings: HttpServerSettings, gpus: str) -> dict[str, Any]:
    """The settings of a new engine, which it reads from its first line on stdin."""
    changed = {"engine": dataclasses.asdict(settings.engine), "model_folder": str(settings.model_folder)}
    return {**old.settings.worker, **changed, **({"visible_gpus": gpus} if gpus else {})}


def _is_same_path(one: str, other: str) -> bool:
    try:
        return Path(one).expanduser().samefile(Path(other).expanduser())
    except OSError:
        return False


def _names_for_workers(*keepers: EngineKeeper) -> str:
    """The names of engines in the other server processes: the generations of their first lives."""
    return " ".join(str(keeper.engine.first_generation) for keeper in keepers)


def _fail(pending: PendingReload, error: Exception) -> None:
    if not pending.answer.done():
        pending.answer.set_exception(error)
