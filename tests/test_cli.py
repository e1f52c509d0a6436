"""The `minisgl` command as a user meets it: exit codes, one-line errors, and what it does not load."""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compile_cache.store import open_cache
from minisgl import __version__
from minisgl.cli import COMMANDS, cache_dir, main, settings_from
from minisgl.commands.files import prompt_from
from minisgl.commands.parser import build_parser
from minisgl.errors import ConfigError
from minisgl.weights.sources import default_cache_dir

COMMAND = [sys.executable, "-m", "minisgl"]
PIPE_BYTES = 1 << 20
"""More than any pipe holds: writing this much returns only once the other side reads."""


def run(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")}
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**clean, **environ},
        stdin=subprocess.DEVNULL,
        timeout=240,
    )


def test_version_is_printed() -> None:
    answer = run("--version")
    assert (answer.returncode, answer.stdout.strip()) == (0, f"minisgl {__version__}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "hi", "--model", "/no/such/folder"], "/no/such/folder"),
        (["generate", "hi", "--temperature", "-1"], "temperature must be a number from 0 to 100"),
        (["generate", "hi", "--log-level", "loud"], "--log-level must be one of"),
        (["serve", "--model", "no-such-model"], "no-such-model"),
        (["serve", "--log-level", "loud"], "--log-level must be one of"),
        (["pull"], "pull --list"),
        (["pull", "no-such-model"], "no-such-model"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    answer = run(*arguments)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stderr.startswith("minisgl: error: ")
    assert said in answer.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["dance"], ["serve", "--por", "1"], ["serve", "--port", "many"], ["serve", "extra"]]
)
def test_words_that_are_no_command_line_give_the_usage_and_exit_code_2(arguments: list[str]) -> None:
    answer = run(*arguments)
    assert answer.returncode == 2
    assert "usage: minisgl" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["serve", "--page_size=3"], "did you mean --page-size?"),
        (["generate", "hi", "--temprature", "0"], "did you mean --temperature?"),
        (["bench", "offline", "--num-request", "3"], "did you mean --num-requests?"),
        (["cache", "ls", "--compile-cach", "x"], "did you mean --compile-cache?"),
        (["--versoin"], "did you mean --version?"),
        (["serve", "--xyzzy"], "see minisgl serve --help"),
        (["bench", "offline", "extra"], "see minisgl bench offline --help"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_most_like_it_or_with_where_to_look(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("minisgl: error: unrecognized arguments: ")
    assert last_line.partition("; ")[2] == hint


@pytest.mark.parametrize(
    ("typed", "prompt"), [("hi\n", "hi"), ("hi", "hi"), ("a\n\n", "a\n"), ("a\nb\n", "a\nb")]
)
def test_a_prompt_from_a_pipe_ends_where_its_last_line_does(typed: str, prompt: str) -> None:
    assert prompt_from("-", io.StringIO(typed)) == prompt
    assert prompt_from(None, io.StringIO(typed)) == prompt
    assert prompt_from(typed, io.StringIO()) == typed


def test_doctor_refuses_a_model_that_is_none_as_serve_does(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for command in ("serve", "doctor"):
        assert main([command, "--model", "/no/such/folder"]) == 2
        said.append(capsys.readouterr())
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("arguments", "choice"), [([], "serve"), (["bench"], "offline"), (["cache"], "verify")]
)
def test_without_a_command_all_are_shown(
    arguments: list[str], choice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"    {choice} " in shown.err


def test_a_bad_variable_is_one_line_and_exit_code_2() -> None:
    answer = run("serve", MINISGL_PORT="many")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == "minisgl: error: MINISGL_PORT must be a whole number, got 'many'\n"


def test_ctrl_c_exits_130_without_a_word() -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(b"x" * PIPE_BYTES)
    process.stdin.flush()  # it reads its prompt by now, and waits for the end of it
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_the_builtin_models_are_listed() -> None:
    answer = run("pull", "--list")
    assert answer.returncode == 0
    assert answer.stdout.startswith("smollm2-135m ")


def test_a_model_that_is_there_is_pulled_without_network(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    answer = run("pull", str(tmp_path))
    assert (answer.returncode, answer.stdout.strip()) == (0, str(tmp_path))


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({}, default_cache_dir()),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/minisgl")),
        ({"MINISGL_CACHE": "/m"}, Path("/m")),
        ({"MINISGL_CACHE": "/m", "XDG_CACHE_HOME": "/x"}, Path("/m")),
        ({"MINISGL_CACHE": "", "XDG_CACHE_HOME": ""}, default_cache_dir()),
        ({"MINISGL_CACHE": "~/here"}, Path.home() / "here"),
    ],
)
def test_the_cache_lies_where_the_environment_says(environ: dict[str, str], folder: Path) -> None:
    assert cache_dir(environ) == folder


def test_a_user_without_a_home_is_told_to_name_a_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for name in ("MINISGL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert main(["cache", "ls"]) == 2
    assert "MINISGL_CACHE" in capsys.readouterr().err
    assert main(["cache", "ls", "--compile-cache", "/no/such/place"]) == 0


def test_main_gives_the_exit_code_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["serve", "--model", "no-such-model"], ["pull", "--list"], ["cache", "ls"]]
)
def test_what_computes_nothing_loads_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from minisgl.cli import main; main(sys.argv[1:]);"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, timeout=60)
    assert answer.returncode == 0


def test_doctor_says_what_would_be_used_and_why(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = run("doctor", "--json", "--model", str(tmp_path), "--device", "cpu")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    report = json.loads(answer.stdout)
    choices = {choice["flag"]: (choice["value"], choice["why"]) for choice in report["choices"]}
    assert choices["--device"] == ("cpu", "asked for")
    assert choices["--dtype"][0] in ("float32", "bfloat16")
    assert "this processor" in choices["--dtype"][1]
    assert choices["--attention-backend"][0] == "torch"
    assert choices["--compile-mode"] == (
        "off",
        "graphs need a GPU and a kernel for decode; on a CPU the first answer comes sooner",
    )
    assert choices["--max-context-tokens"] == ("512", "the model's own limit")
    assert report["packages"]["torch"]
    assert report["attention"]["torch"] == "would run prefill and decode"
    assert report["attention"]["triton"] == report["attention"]["trtllm"] == "no: it needs --device cuda"
    assert report["problems"] == []

    impossible = run("doctor", "--model", str(tmp_path), "--device", "cpu", "--page-size", "3")
    assert impossible.returncode == 1
    assert "PROBLEM: --page-size" in impossible.stdout
    assert "serving will not work" in impossible.stdout


def test_doctor_notices_another_projects_triton_kernels(tmp_path: Path) -> None:
    stranger = tmp_path / "triton_kernels"
    stranger.mkdir()
    (stranger / "__init__.py").touch()
    answer = run("doctor", cwd=tmp_path)
    assert answer.returncode == 1
    assert f"another project's package in {stranger}" in answer.stdout


def test_doctor_without_the_model_warns_and_fetches_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    answer = run("doctor", MINISGL_CACHE=str(cache))
    assert answer.returncode == 0
    assert "warning: " in answer.stdout
    assert "minisgl pull smollm2-135m" in answer.stdout
    assert not cache.exists()


def test_a_prompt_is_asked_for_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    arguments = build_parser({}).parse_args(["generate"])
    with pytest.raises(ConfigError, match="give a prompt"):
        COMMANDS[arguments.command](arguments, {}, 0.0)


def test_every_command_of_the_parser_has_a_function() -> None:
    def commands_below(parser: argparse.ArgumentParser) -> set[str]:
        inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not inner:
            return {parser.get_default("command")}
        return {
            name for action in inner for below in action.choices.values() for name in commands_below(below)
        }

    assert commands_below(build_parser({})) == COMMANDS.keys()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--page-size", "3"], "--page-size must be a power of two"),
        (["--dtype", "float8"], "--dtype must be one of"),
        (["--memory-fraction", "nan"], "--memory-fraction must be between"),
        (["--num-pages", "-5"], "--num-pages must be at least 2"),
        (["--chunk-tokens", "65", "--max-step-tokens", "64"], "--chunk-tokens must be between 1 and"),
        (["--device", "cpu", "--compile-mode", "full"], "--compile-mode full needs --device cuda"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_engine_mistakes_that_need_no_device_are_known_before_a_model_is_looked_for(
    command: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["hi"] if command == "generate" else []
    assert main([command, *prompt, "--model", "/no/such/folder", *flags]) == 2
    words = capsys.readouterr().err
    assert words.startswith(f"minisgl: error: {said}")
    assert len(words.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-body-bytes", "0"], "--max-body-bytes must be between 1"),
        (["--heartbeat-timeout-s", "nan"], "--heartbeat-timeout-s must be a number of seconds"),
        (["--drain-timeout-s", "-1"], "--drain-timeout-s must be a number of seconds"),
        (["--port", "65536"], "--port must be between 0 and 65535"),
    ],
)
def test_server_mistakes_are_known_before_a_model_is_looked_for(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "/no/such/folder", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"minisgl: error: {said}")


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        ([""], b"", "the prompt is empty"),
        (["-"], b"", "the prompt is empty"),
        (["-"], b"\n", "the prompt is empty"),
        (["", "--chat"], b"", "the prompt is empty"),
        ([b"caf\xe9"], b"", "the prompt is not valid UTF-8"),
        (["-"], b"caf\xe9", "the prompt is not valid UTF-8"),
        (["hi", "--system", b"caf\xe9"], b"", "--system is not valid UTF-8"),
    ],
)
def test_a_prompt_that_is_none_is_noticed_before_a_model_is_looked_for(
    arguments: list[str | bytes], stdin: bytes, said: str
) -> None:
    answer = subprocess.run(
        [*COMMAND, "generate", "--model", "/no/such/folder", *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
    )
    assert answer.returncode == 2
    assert answer.stderr.decode().startswith(f"minisgl: error: {said}")
    assert len(answer.stderr.splitlines()) == 1


def test_the_variable_of_a_kubernetes_service_is_no_port() -> None:
    answer = run("serve", "--help", MINISGL_PORT="tcp://10.96.0.1:8000")
    assert answer.returncode == 0
    assert "(default: 8000)" in " ".join(answer.stdout.split())
    assert settings_from({"MINISGL_PORT": "tcp://10.96.0.1:80", "MINISGL_HOST": "::"}) == {
        "MINISGL_HOST": "::"
    }
    assert settings_from({"MINISGL_PORT": "9000"}) == {"MINISGL_PORT": "9000"}


def test_what_the_terminal_cannot_show_is_no_traceback(tmp_path: Path) -> None:
    answer = run("generate", "hi", "--model", str(tmp_path / "модель"), PYTHONIOENCODING="ascii")
    assert answer.returncode == 2
    assert answer.stderr.startswith("minisgl: error: ")
    assert "??????" in answer.stderr


def test_the_compile_cache_is_listed_packed_unpacked_and_cleared(tmp_path: Path, capsys) -> None:
    facts = {"gpu": "NVIDIA H200", "torch": "2.11"}

    def minisgl(*arguments: str) -> tuple[int, str]:
        code = main(["cache", *arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINISGL_CACHE", str(tmp_path / "here"))
        assert minisgl("ls") == (0, f"no compiled code in {tmp_path}/here/compiled\n")
        assert minisgl("export", str(tmp_path / "packed"))[0] == 2
        environ: dict[str, str] = {}
        cache = open_cache(tmp_path / "here" / "compiled", facts, environ)
        assert cache is not None
        Path(environ["TRITON_CACHE_DIR"]).mkdir()
        kernel = Path(environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
        kernel.write_text("x" * 100)
        cache.publish()
        cache.close()
        code, said = minisgl("ls")
        assert code == 0
        assert "1 files, 0.0 MiB  whole" in said
        assert "gpu NVIDIA H200" in said
        assert minisgl("export", str(tmp_path / "packed"))[0] == 0
        kernel.write_text("y" * 100)
        assert minisgl("verify")[0] == 1
        assert minisgl("clear")[0] == 0
        patch.setenv("MINISGL_CACHE", str(tmp_path / "there"))
        assert minisgl("import", str(tmp_path / "packed"))[0] == 0
        assert minisgl("verify")[0] == 0
        there = str(tmp_path / "there" / "compiled")
        patch.delenv("MINISGL_CACHE")
        assert "whole" in minisgl("ls", "--compile-cache", there)[1]
        code, said = minisgl("import", there, "--compile-cache", there)
        assert code == 2
        assert said.startswith(f"minisgl: error: {there} is not an exported compile cache: ")
        assert len(said.splitlines()) == 1
