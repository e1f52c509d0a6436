"""Does the reloads, one after the other; runs in the first server process.

Engines that can go on with open answers are replaced one by one: each new one starts beside the old one, or
after it if there is no room. For another model, all new engines start beside the old ones, which then run
their answers to the end; if there is no room, calls wait until the old ones have done that and the new ones
have started.

Promise: if a new engine does not start, an engine with the settings of before goes on, and the caller is told
why. No call is refused that would not be otherwise.
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
from minisgl.server.reload.changes import wanted
from minisgl.server.reload.places import Places, place
from minisgl.server.reload.process_change import ProcessChange
from minisgl.server.reload.reloads import Asked, ReloadAnswer, Reloads
from minisgl.server.served_model import served_name

log = logging.getLogger(__name__)

FindModel = Callable[[EngineConfig], tuple[EngineConfig, Path]]
"""Gives the folder of the model that these settings name, after fetching it if need be, and the settings with
the folders that the command line chooses. May take minutes; called in a thread."""


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
    """Create, use and close it in one event loop, once the engines are kept."""

    def __init__(self, parts: ReloaderParts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._change = ProcessChange(parts.http_server, parts.engines)
        tp, gpus = parts.settings.engine.tp, list(parts.gpus or [])
        self._held = {place: gpus[place * tp : (place + 1) * tp] for place in range(len(parts.keepers.all))}
        self._facts: dict[str, str] | None = None  # of the model's folder, when the engines loaded it
        self._device = ""  # that the engines run on
        self._is_closing = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop; a reload that runs ends with an error."""
        self._is_closing = True  # an error may come in the place of the cancellation
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        parts = self._parts
        self._device = (await asyncio.shield(parts.keepers.ready)).device
        with contextlib.suppress(OSError):  # then each reload counts as that of another model
            self._facts = await asyncio.to_thread(folder_facts, self._settings.model_folder)
        while not self._is_closing:
            asked = await parts.reloads.next()
            try:
                told = await self._reload(asked.fields)
            except asyncio.CancelledError:
                _fail(asked, RequestError(503, "shutting_down", "the server is shutting down"))
                raise
            except Exception as error:
                log.warning("nothing was reloaded: %s", error)
                _fail(asked, error)
            else:
                if not asked.answer.done():
                    asked.answer.set_result(told)

    async def _reload(self, fields: Any) -> ReloadAnswer:
        parts, began_s = self._parts, time.monotonic()
        if parts.http_server.streams.refusal is not None:
            raise parts.http_server.streams.refusal.with_traceback(None)
        model = self._settings.engine.model
        if fields.model is not msgspec.UNSET and _is_same_path(fields.model, model):
            fields = msgspec.structs.replace(fields, model=model)
        target = wanted(self._settings.server, self._settings.engine, fields)
        check_server_config(target.server)
        check_engine_config(target.engine)
        is_on_gpu = (target.engine.device or self._device) == "cuda"
        engine, folder = await asyncio.to_thread(parts.find_model, target.engine)
        facts = await asyncio.to_thread(folder_facts, folder)
        is_another = target.changes_answers or facts != self._facts
        settings = self._settings._replace(
            server=target.server,
            engine=engine,
            model_name=served_name(target.server.served_model_name, engine.model),
            model_folder=folder,
        )
        numbers = range(len(parts.keepers.all))
        # Where another model comes, either all engines start beside the old ones or none does.
        groups = [list(numbers)] if is_another else [[number] for number in numbers]
        for group in groups:  # so that a lack of room is known before anything is done
            self._place(settings.engine, group, fields.beside, is_on_gpu)
        await self._load(settings)
        log.info("reload: %s%s", settings.model_name, " takes the place of the model" if is_another else "")
        begun = _Begun(settings, is_on_gpu, fields.beside)
        if not is_another:
            for number in numbers:
                await self._move(begun, number)
            await asyncio.gather(self._change.switch(), parts.workers.do("switch"))
        elif self._place(settings.engine, numbers, fields.beside, is_on_gpu).beside:
            await self._change_beside(begun)
        else:
            await self._change_after(begun)
        self._settings, self._facts = settings, facts
        ready = parts.engines.first.last_ready
        self._device = ready.device if ready is not None else self._device
        told = ReloadAnswer(
            model=settings.model_name,
            beside=begun.was_beside,
            streams="finished" if is_another else "moved",
            num_streams=begun.num_streams,
            engines=[{"id": one.number, "pid": one.pid} for one in parts.engines.all],
            seconds=round(time.monotonic() - began_s, 3),
        )
        log.info("reload: done after %.1f s, %d requests %s", told.seconds, told.num_streams, told.streams)
        return told

    async def _load(self, settings: HttpServerSettings) -> None:
        """Load the text side of the model in all server processes.

        Raises:
            ModelError: its folder has no usable tokenizer.
        """
        await self._change.load(settings)
        told = {
            "server": dataclasses.asdict(settings.server),
            "engine": dataclasses.asdict(settings.engine),
            "model_name": settings.model_name,
            "model_folder": str(settings.model_folder),
        }
        await self._parts.workers.do("load", json.dumps(told))

    async def _move(self, begun: "_Begun", number: int) -> None:
        """Replace one engine; its requests go on in the new one, or in others meanwhile."""
        old = self._parts.keepers.all[number]
        places = self._place(begun.settings.engine, [number], begun.beside, begun.is_on_gpu)
        if not places.beside:
            begun.num_streams += await self._num_open([old])
            await self._replace_after([old], begun, places, is_same=True)
            return
        (new,) = await self._start_beside([old], begun, places, is_same=True)
        begun.num_streams += await self._num_open([old])
        self._change.replace(old.engine, new.engine)
        self._parts.keepers.replace(old, new)
        self._parts.keepers.accept(new)
        await self._parts.workers.do("replace", _names(old, new))
        await self._remove([old])
        self._hold([number], places)
        begun.was_beside = True

    async def _change_beside(self, begun: "_Begun") -> None:
        """Start engines of another model; the old ones run their requests to the end."""
        keepers, workers = self._parts.keepers, self._parts.workers
        olds = list(keepers.all)
        places = self._place(begun.settings.engine, range(len(olds)), begun.beside, begun.is_on_gpu)
        news = await self._start_beside(olds, begun, places, is_same=False)
        begun.num_streams = await self._num_open(olds)
        pairs = [(old.engine, new.engine) for old, new in zip(olds, news, strict=True)]
        await asyncio.gather(self._change.switch(pairs), workers.do("switch", _names(olds[0], news[0])))
        for old, new in zip(olds, news, strict=True):
            keepers.replace(old, new)
            keepers.accept(new)
        log.info("reload: %s is served; %d requests end in the engine before", begun.name, begun.num_streams)
        await asyncio.gather(
            *[old.engine.wait_until_empty() for old in olds], workers.do("left", _names(olds[0]))
        )
        await self._remove(olds)
        self._hold(range(len(olds)), places)
        begun.was_beside = True

    async def _change_after(self, begun: "_Begun") -> None:
        """Let the engines end their requests, while new calls wait; then start those of another model."""
        keepers, workers = self._parts.keepers, self._parts.workers
        olds = list(keepers.all)
        places = self._place(begun.settings.engine, range(len(olds)), begun.beside, begun.is_on_gpu)
        begun.num_streams = await self._num_open(olds)
        log.info("reload: %d requests end, new calls wait for %s", begun.num_streams, begun.name)
        try:
            await asyncio.gather(self._change.hold(), workers.do("hold"))
            await self._replace_after(olds, begun, places, is_same=False)
        except BaseException:
            self._change.release()
            workers.release()
            raise
        await asyncio.gather(self._change.switch(), workers.do("switch"))

    async def _start_beside(
        self, olds: Sequence[EngineKeeper], begun: "_Begun", places: Places, *, is_same: bool
    ) -> list[EngineKeeper]:
        """Start an engine for each of `olds`, and return their keepers when all are ready.

        Raises:
            EngineDeadError, ConfigError: one does not start; then none is left.
        """
        news: list[EngineKeeper] = []
        try:
            for old, gpus in zip(olds, places.gpus, strict=True):
                # On a GPU the first engine compiles, and the others find its code.
                after = news[0].ready if news and begun.is_on_gpu else None
                news.append(old.successor(_line(old, begun.settings, gpus), starts_after=after))
                self._prepare(news[-1])
            await self._wait_until_ready(news)
            for old, new in zip(olds, news, strict=True):
                if is_same:
                    _check_room(old, new)
                await self._parts.workers.num_suspects(
                    new.engine.generation
                )  # each says that it is ready there
        except BaseException:
            await self._remove(news)
            raise
        return news

    async def _replace_after(
        self, olds: Sequence[EngineKeeper], begun: "_Begun", places: Places, *, is_same: bool
    ) -> None:
        """Stop engines and start others in their places, which get the requests of the old ones.

        Raises:
            EngineDeadError, ConfigError: one does not start; engines as before are in their places again.
        """
        news: list[EngineKeeper] = []
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        for old, gpus in zip(olds, places.gpus, strict=True):
            # On a GPU the first engine compiles, and the others find its code.
            after = news[0].ready if news and begun.is_on_gpu else gone
            news.append(old.successor(_line(old, begun.settings, gpus), starts_after=after))
            await self._put(news[-1], old)
        await self._remove(olds)
        gone.set_result(None)
        try:
            await self._wait_until_ready(news)
            for old, new in zip(olds, news, strict=True):
                if is_same:
                    _check_room(old, new)
        except Exception as error:
            log.warning("reload: the new engine does not start; one as before takes its place: %s", error)
            await self._restore(olds, news)
            raise
        for new in news:
            self._parts.keepers.accept(new)
        self._hold([new.engine.number for new in news], places)

    async def _restore(self, olds: Sequence[EngineKeeper], news: Sequence[EngineKeeper]) -> None:
        """Start engines with the settings of `olds`, which have ended, in place of `news`."""
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        again: list[EngineKeeper] = []
        for old, new in zip(olds, news, strict=True):
            again.append(new.successor(old.settings.worker, starts_after=gone, may_fail_first=True))
            await self._put(again[-1], new)
            self._parts.keepers.accept(again[-1])
        await self._remove(news)
        gone.set_result(None)
        for keeper in again:
            await asyncio.wait((keeper.ready, keeper.failed), return_when=asyncio.FIRST_COMPLETED)

    async def _put(self, new: EngineKeeper, old: EngineKeeper) -> None:
        """Put an engine that is not ready yet in the place of another one, whose requests wait for it."""
        self._prepare(new)
        self._change.replace(old.engine, new.engine)
        self._parts.keepers.replace(old, new)
        await self._parts.workers.do("replace", _names(old, new))

    def _prepare(self, new: EngineKeeper) -> None:
        parts = self._parts
        parts.engines.prepare(new.engine)
        parts.workers.add(new.engine.generation, new.engine.pid, new.dir_of_life())
        parts.keepers.prepare(new, parts.workers)

    async def _remove(self, keepers: Sequence[EngineKeeper]) -> None:
        """End engines that have no requests any more, or never had."""
        for keeper in keepers:
            await self._parts.keepers.remove(keeper)
            with contextlib.suppress(EngineDeadError):  # a process that has ended needs no telling
                await self._parts.workers.do("end", _names(keeper))
            self._parts.engines.remove(keeper.engine)

    async def _wait_until_ready(self, news: Sequence[EngineKeeper]) -> None:
        for new in news:
            await asyncio.wait((new.ready, new.failed), return_when=asyncio.FIRST_COMPLETED)
            if new.failed.done():
                failure = new.failed.result()
                kind = ConfigError if failure.is_user_mistake else EngineDeadError
                raise kind(f"the new engine did not start, and the one before goes on: {failure.reason}")

    def _place(
        self, engine: EngineConfig, numbers: Sequence[int], beside: bool | None, is_on_gpu: bool
    ) -> Places:
        gpus = self._parts.gpus
        return place(engine, self._held, gpus, is_on_gpu=is_on_gpu, numbers=numbers, beside=beside)

    def _hold(self, numbers: Sequence[int], places: Places) -> None:
        for number, gpus in zip(numbers, places.gpus, strict=True):
            self._held[number] = [name for name in gpus.split(",") if name]

    async def _num_open(self, olds: Sequence[EngineKeeper]) -> int:
        if len(self._parts.keepers.all) == 1:
            return await self._parts.http_server.num_open()
        return sum(old.engine.num_open for old in olds)


class _Begun:
    """A reload that runs."""

    def __init__(self, settings: HttpServerSettings, is_on_gpu: bool, beside: bool | None) -> None:
        self.settings = settings
        self.is_on_gpu = is_on_gpu
        self.beside = beside  # what the caller wants
        self.was_beside = False
        self.num_streams = 0

    @property
    def name(self) -> str:
        return self.settings.model_name


def _check_room(old: EngineKeeper, new: EngineKeeper) -> None:
    """Refuse an engine in which open answers may not fit."""
    before, after = old.engine.last_ready, new.engine.last_ready
    if before is not None and after is not None and after.max_context_tokens < before.max_context_tokens:
        raise ConfigError(
            f"the new engine has room for {after.max_context_tokens} tokens of a request, the one before for "
            f"{before.max_context_tokens}, so open answers may not fit; give --max-context-tokens "
            f"{after.max_context_tokens}, and they end first"
        )


def _line(old: EngineKeeper, settings: HttpServerSettings, gpus: str) -> dict[str, Any]:
    """The first line of a new engine."""
    changed = {"engine": dataclasses.asdict(settings.engine), "model_folder": str(settings.model_folder)}
    return {**old.settings.worker, **changed, **({"visible_gpus": gpus} if gpus else {})}


def _is_same_path(one: str, other: str) -> bool:
    try:
        return Path(one).expanduser().samefile(Path(other).expanduser())
    except OSError:
        return False


def _names(*keepers: EngineKeeper) -> str:
    """As the other server processes know the engines."""
    return " ".join(str(keeper.engine.first_generation) for keeper in keepers)


def _fail(asked: Asked, error: Exception) -> None:
    if not asked.answer.done():
        asked.answer.set_exception(error)
