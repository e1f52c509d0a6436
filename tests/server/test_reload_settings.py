"""What a reload may change, who may ask for it, and where its engines run."""

import asyncio
import dataclasses
import io
import json
import threading
import typing
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer
from small_model import make_folder
from test_admin_key import ask

from minisgl.cli import main
from minisgl.commands.reload import run_reload
from minisgl.config import EngineConfig, ReloadConfig, ServerConfig
from minisgl.errors import ConfigError, RequestError
from minisgl.server.model_in_use import ModelInUse
from minisgl.server.reload.changes import (
    CHANGES_ANSWERS,
    ENGINE_FIELDS,
    FIELDS_OF_ONE_MODEL,
    RELOAD,
    ReloadFields,
    new_settings,
)
from minisgl.server.reload.places import choose_places

NOTHING: Any = None
SERVER = ServerConfig(chat_template="old.jinja", served_model_name="prod")
ENGINE = EngineConfig(model="a", revision="r1", tokenizer="t", max_running_requests=8)


def wanted_of(**changes: Any) -> Any:
    return new_settings(SERVER, ENGINE, RELOAD.read(json.dumps(changes).encode())[0])


def test_what_is_not_given_stays_as_it_is() -> None:
    assert wanted_of() == (SERVER, ENGINE, False)
    told = wanted_of(max_running_requests=9, overlap=True)
    assert told == (SERVER, dataclasses.replace(ENGINE, max_running_requests=9, overlap=True), False)
    assert wanted_of(max_running_requests=None).engine.max_running_requests is None


def test_another_model_does_not_keep_what_belongs_to_a_model() -> None:
    told = wanted_of(model="b", tokenizer="u")
    assert (told.engine.model, told.engine.revision, told.engine.tokenizer) == ("b", None, "u")
    assert (told.server.chat_template, told.server.served_model_name) == (None, "prod")
    assert told.engine.max_running_requests == 8
    assert wanted_of(model="a") == (SERVER, ENGINE, False)


@pytest.mark.parametrize(
    ("changes", "is_another"),
    [
        ({"dtype": "float32"}, True),
        ({"num_pages": 9}, True),
        ({"tp": 2}, False),
        ({"attention_backend": "torch"}, False),
        ({"served_model_name": "b"}, False),
    ],
)
def test_which_settings_open_answers_would_notice(changes: dict[str, Any], is_another: bool) -> None:
    assert wanted_of(**changes).changes_answers == is_another


VALUES: dict[Any, Any] = {int: 7, float: 0.5, str: "x", bool: True, tuple[str, ...]: ["a=b"]}


@pytest.mark.parametrize("name", [name for name in ReloadFields.__struct_fields__ if name != "beside"])
def test_every_setting_of_a_reload_changes_itself_alone(name: str) -> None:
    hints = {**typing.get_type_hints(ServerConfig), **typing.get_type_hints(EngineConfig)}
    (value,) = [value for kind, value in VALUES.items() if hints[name] in (kind, kind | None)]
    before: Any = {**dataclasses.asdict(SERVER), **dataclasses.asdict(ENGINE)}
    value = not before[name] if isinstance(before[name], bool) else value
    told = wanted_of(**{"model": "a", name: value})
    after = {**dataclasses.asdict(told.server), **dataclasses.asdict(told.engine)}
    changed = {one for one in after if after[one] != before[one]}
    assert changed - (set(FIELDS_OF_ONE_MODEL) if name == "model" else set()) == {name}
    assert after[name] == (tuple(value) if isinstance(value, list) else value)


def test_the_lists_name_settings_that_exist() -> None:
    names = {field.name for cls in (EngineConfig, ServerConfig) for field in dataclasses.fields(cls)}
    assert names >= {*CHANGES_ANSWERS, *FIELDS_OF_ONE_MODEL, *ENGINE_FIELDS}


HELD = {0: ["0"], 1: ["1"]}


@pytest.mark.parametrize(
    ("tp", "numbers", "gpus", "beside", "found"),
    [
        (1, [0], ["0", "1", "2"], None, (True, ["2"])),
        (1, [0], ["0", "1", "2"], False, (False, ["0"])),
        (1, [0], ["0", "1"], None, (False, ["0"])),
        (1, [0, 1], ["0", "1", "2"], None, (False, ["0", "1"])),
        (1, [0, 1], ["0", "1", "2", "3"], None, (True, ["2", "3"])),
        (2, [0], ["0", "1", "2"], None, (False, ["0,2"])),
        (2, [1], ["0", "1", "2", "3"], None, (True, ["2,3"])),
        (1, [0], None, None, (False, ["0"])),
    ],
)
def test_an_engine_starts_on_spare_gpus_or_on_those_of_the_old_one(
    tp: int, numbers: list[int], gpus: list[str] | None, beside: bool | None, found: tuple[bool, list[str]]
) -> None:
    engine = EngineConfig(tp=tp)
    assert choose_places(engine, HELD, gpus, is_on_gpu=True, numbers=numbers, beside=beside) == found


def test_on_a_cpu_there_is_room_beside_but_not_for_one_address() -> None:
    on_cpu: dict[str, Any] = {"is_on_gpu": False, "numbers": [0], "beside": None}
    assert choose_places(EngineConfig(), {0: []}, None, **on_cpu) == (True, [""])
    events = EngineConfig(kv_events_endpoint="tcp://*:5557")
    assert choose_places(events, {0: []}, None, **on_cpu) == (False, [""])


@pytest.mark.parametrize(
    ("tp", "beside", "message"),
    [(3, None, "--tp 3 needs 3 GPUs, and 1 are free"), (1, True, "needs 1 spare GPUs, and 0 are here")],
)
def test_too_few_gpus_are_refused(tp: int, beside: bool | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_places(EngineConfig(tp=tp), HELD, ["0", "1"], is_on_gpu=True, numbers=[0], beside=beside)


def no_check(_: int) -> None:
    pass


def test_a_call_that_is_prepared_holds_up_a_change_and_later_calls_get_the_other_model() -> None:
    async def main() -> None:
        model = ModelInUse("old", NOTHING, no_check, 60.0)  # pyright: ignore[reportArgumentType]
        seen: list[Any] = []

        async def call() -> None:
            async with model.prepared() as found:
                seen.append(found)

        async with model.prepared() as first:
            held = asyncio.ensure_future(model.hold("a reason"))
            await asyncio.sleep(0)
            assert (first, model.held_because, held.done()) == ("old", "a reason", False)
            later = asyncio.ensure_future(call())
            await asyncio.sleep(0)
            assert model.num_waiting == 1
        await held
        assert seen == []
        model.release("new", NOTHING)  # pyright: ignore[reportArgumentType]
        again = asyncio.ensure_future(model.hold("another reason"))
        await asyncio.sleep(0)
        assert again.done()
        assert seen == []
        assert not later.done()
        model.release()
        await later
        assert seen == ["new"]
        assert (model.num_waiting, model.held_because) == (0, "")

    asyncio.run(main())


def test_a_call_waits_a_limited_time_and_only_if_there_is_room() -> None:
    def refuse(num: int) -> None:
        raise RequestError(429, "too_many_requests", f"{num} are too many")

    async def main() -> None:
        for check, status in ((no_check, 504), (refuse, 429)):
            model = ModelInUse(NOTHING, NOTHING, check, 0.01)
            await model.hold("a reason")
            with pytest.raises(RequestError) as error:
                async with model.prepared():
                    pass
            assert error.value.status == status
            assert model.num_waiting == 0

    asyncio.run(main())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("reload") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with RunningServer(folder, admin_key=("admin-key",), api_workers=2) as running:
        yield running.ready()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"no_such_field": 1}, "no_such_field"),
        ({"port": 1}, "port"),
        ({"seed": 1}, "seed"),
        ({"page_size": 3}, "--page-size must be a power of two"),
        ({"page_size": "many"}, "page_size must be"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"chat_template": "/no/such/file"}, "/no/such/file"),
        ({"sampling_defaults": "none"}, "--sampling-defaults must be"),
    ],
)
def test_settings_that_can_t_work_are_refused_by_name_before_anything_starts(
    server: RunningServer, body: dict[str, Any], said: str
) -> None:
    pid = server.health()[1]["engine_pid"]
    for _ in range(3):  # whichever process answers
        status, answer = ask(server, "admin-key", "POST", "/reload", body)
        assert (status, said in answer["error"]["message"]) == (400, True), answer
    assert server.health()[1]["engine_pid"] == pid


def test_only_an_admin_key_reloads(server: RunningServer, folder: Path) -> None:
    assert ask(server, None, "POST", "/reload", {})[1]["error"]["code"] == "admin_key_required"
    with RunningServer(folder) as keyless:
        keyless.ready()
        status, answer = ask(keyless, None, "POST", "/reload", {})
        assert (status, "--admin-key" in answer["error"]["message"]) == (403, True)


def test_engines_that_come_from_elsewhere_are_not_reloaded(folder: Path) -> None:
    door = {"engine_listen": "tcp://127.0.0.1:0", "admin_key": ("admin-key",)}
    with RunningServer(folder, secret="a secret of the door", **door) as running:
        running.read_until("Listening on")
        status, answer = ask(running, "admin-key", "POST", "/reload", {})
        assert (status, answer["error"]["code"]) == (409, "not_possible")
        assert "--engine-listen" in answer["error"]["message"]


def test_the_command_reloads_and_says_what_was_done(
    server: RunningServer, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_ADMIN_KEY", "admin-key")
    monkeypatch.setenv("MINISGL_MAX_RUNNING_REQUESTS", "77")  # of another start
    monkeypatch.chdir(folder.parent)
    command = ["reload", "--url", server.url("").rstrip("/"), "--no-join-decodes", "--model", folder.name]
    assert main(command) == 0
    assert "tiny is served after" in capsys.readouterr().out
    settings = ask(server, "admin-key", "GET", "/server_info")[1]["engine_settings"]
    assert (settings["join_decodes"], settings["max_running_requests"]) == (False, None)
    assert main([*command, "--page-size", "3"]) == 2
    assert "--page-size must be" in capsys.readouterr().err
    monkeypatch.setenv("MINISGL_ADMIN_KEY", "wrong")
    assert main(command) == 2
    assert "--admin-key" in capsys.readouterr().err


def test_the_command_says_when_there_is_no_server_or_another_one() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        with pytest.raises(ConfigError, match="no server of minisgl, or one that can't reload"):
            run_reload(ReloadConfig(url=url), {}, io.StringIO())
        other.shutdown()
    with pytest.raises(ConfigError, match="see --url"):
        run_reload(ReloadConfig(url=url), {}, io.StringIO())
