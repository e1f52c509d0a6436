"""The chat shell: what is asked, kept and forgotten; on a script, and on a terminal with a real model."""

import io
import os
import pty
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from minisgl.commands.chat import print_reply, run_chat
from minisgl.errors import MinisglError, RequestError
from minisgl.llm import LLM
from minisgl.offline import Delta
from minisgl.request import FinishReason, SamplingParams
from minisgl.text.formats.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from minisgl.weights.sources import resolve_model_folder


class ScriptedModel:
    """Answers the n-th question with the n-th answer, word by word, and remembers what it was sent."""

    def __init__(self, *answers: str | RequestError) -> None:
        self._answers = list(answers)
        self.asked: list[list[dict[str, Any]]] = []
        self.num_closed_early = 0

    def stream(
        self, messages: Sequence[Any], params: SamplingParams, *, tools: Sequence[Any] = ()
    ) -> Iterator[Delta]:
        self.asked.append([dict(message) for message in messages])
        answer = self._answers.pop(0)
        if isinstance(answer, RequestError):
            raise answer
        return self._deltas(answer.split(" "))

    def _deltas(self, words: list[str]) -> Iterator[Delta]:
        ended = False
        try:
            for index, word in enumerate(words):
                if word == "<ctrl-c>":
                    signal.raise_signal(signal.SIGINT)
                    word = ""
                ended = index == len(words) - 1
                yield Delta(
                    text=word if index == 0 or not word else " " + word,
                    token_ids=(index,),
                    finish_reason=FinishReason.STOP if ended else None,
                    num_prompt_tokens=7,
                    num_cached_tokens=2,
                )
        finally:
            self.num_closed_early += not ended


def talk(
    model: ScriptedModel, tmp_path: Path, *lines: str, system: str | None = None, code: int = 0
) -> tuple[str, str]:
    """Type `lines`, then leave; returns what was written to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    left_with = run_chat(
        cast(LLM, model),
        SamplingParams(),
        system=system,
        history_file=tmp_path / "history",
        stdin=io.StringIO("\n".join(lines)),
        stdout=out,
        stderr=err,
    )
    assert left_with == code
    return out.getvalue(), err.getvalue()


def roles(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_answers_go_to_stdout_and_into_the_next_question(tmp_path: Path) -> None:
    model = ScriptedModel("Hello there", "Fine")
    out, _ = talk(model, tmp_path, "Hi", "", "How are you?", system="Be kind.")
    assert out == "Hello there\nFine\n"
    assert roles(model.asked[1]) == [
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Hello there"),
        ("user", "How are you?"),
    ]


def test_reset_forgets_the_turns_and_keeps_the_system_prompt(tmp_path: Path) -> None:
    model = ScriptedModel("one", "two")
    talk(model, tmp_path, "first", "/reset", "second", system="S")
    assert roles(model.asked[1]) == [("system", "S"), ("user", "second")]


def test_system_sets_the_prompt_and_without_text_removes_it(tmp_path: Path) -> None:
    model = ScriptedModel("one", "two", "three")
    talk(model, tmp_path, "a", "/system Be brief.", "b", "/system", "c")
    assert [roles(messages) for messages in model.asked] == [
        [("user", "a")],
        [("system", "Be brief."), ("user", "b")],
        [("user", "c")],
    ]


def test_exit_leaves_what_follows_unread(tmp_path: Path) -> None:
    model = ScriptedModel()
    talk(model, tmp_path, "/exit", "never asked")
    assert model.asked == []


def test_help_stats_and_unknown_commands_talk_to_nobody(tmp_path: Path) -> None:
    model = ScriptedModel("one two three")
    out, err = talk(model, tmp_path, "/stats", "/help", "/dance", "q", "/stats")
    assert len(model.asked) == 1
    assert out == "one two three\n"
    assert "nothing answered yet" in err
    assert "/system TEXT" in err
    assert "no command /dance" in err
    assert "7 prompt tokens (2 cached), 3 output tokens" in err


def test_ctrl_c_stops_the_answer_keeps_what_was_said_and_goes_on(tmp_path: Path) -> None:
    model = ScriptedModel("a long <ctrl-c> answer nobody wants", "next")
    before = signal.getsignal(signal.SIGINT)
    out, err = talk(model, tmp_path, "tell me", "and now?")
    assert out == "a long\nnext\n"
    assert "[stopped]" in err
    assert model.num_closed_early == 1
    assert roles(model.asked[1])[1] == ("assistant", "a long")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_refused_question_is_reported_and_not_remembered(tmp_path: Path) -> None:
    model = ScriptedModel(RequestError(400, "context_length_exceeded", "too long"), "fine")
    out, err = talk(model, tmp_path, "a very long question", "short")
    assert out == "fine\n"
    assert "[too long; /reset starts anew]" in err
    assert roles(model.asked[1]) == [("user", "short")]


def test_a_line_that_ends_in_a_backslash_goes_on(tmp_path: Path) -> None:
    model = ScriptedModel("ok")
    talk(model, tmp_path, "first \\", "second")
    assert roles(model.asked[0]) == [("user", "first \nsecond")]


@pytest.mark.parametrize("last", ["", "no newline at the end"])
def test_the_end_of_the_input_leaves(tmp_path: Path, last: str) -> None:
    model = ScriptedModel("ok")
    talk(model, tmp_path, *([last] if last else []))
    assert len(model.asked) == (1 if last else 0)


def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(tmp_path: Path) -> None:
    try:
        model = resolve_model_folder("smollm2-135m")
    except MinisglError as error:
        pytest.skip(f"the built-in model is not on this machine and can't be fetched: {error}")
    settings = ["--ignore-eos", "--max-tokens=400", "--max-context-tokens=512", "--cpu-threads=1"]
    settings += ["--model", str(model), "--device=cpu", "--dtype=float32", "--log-level=error"]
    child, terminal = pty.fork()
    if child == 0:  # a session of its own, so that Ctrl-C reaches it alone
        os.environ["MINISGL_CACHE"] = str(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "minisgl", "chat", *settings])
    unread = b""

    def wait_for(text: bytes) -> None:
        nonlocal unread
        while text not in unread:
            assert select.select([terminal], [], [], 120)[0], f"no {text!r} came after {unread!r}"
            unread += os.read(terminal, 4096)
        unread = unread.split(text, 1)[1]

    try:
        wait_for(b">>> ")
        os.write(terminal, b"Tell me a long story\n")
        wait_for(b"story\r\n")
        wait_for(b" ")
        os.write(terminal, b"\x03")
        wait_for(b"[stopped]")
        wait_for(b">>> ")
        os.write(terminal, b"/stats\n")
        wait_for(b"session: 1 answers")
        wait_for(b">>> ")
        os.write(terminal, b"\x04")
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = 0
        assert code == 0
        assert (tmp_path / "chat_history").read_text() == "Tell me a long story\n/stats\n"
    finally:
        os.close(terminal)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


class Terminal(io.StringIO):
    """A terminal's output."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def says(*pieces: Event) -> Iterator[Delta]:
    for index, piece in enumerate(pieces):
        yield Delta(
            text=piece.text if isinstance(piece, Content) else "",
            token_ids=(index,),
            finish_reason=FinishReason.STOP if index == len(pieces) - 1 else None,
            num_prompt_tokens=7,
            num_cached_tokens=2,
            events=(piece,),
        )


REPLY = (
    *(Reasoning("Hm"), Reasoning(", yes."), Content("Let "), Content("me see.")),
    *(CallStart(0, "weather"), CallArguments(0, '{\n"city": '), CallArguments(0, '"Rom"}'), CallEnd(0, True)),
    *(CallStart(1, "time"), CallArguments(1, "{"), CallEnd(1, False)),
)


def test_a_terminal_shows_thoughts_dimmed_and_calls_in_a_frame() -> None:
    out = Terminal()
    figures = print_reply(says(*REPLY), out)
    assert out.getvalue() == (
        "\x1b[2mHm, yes.\x1b[22m\n\nLet me see.\n"
        '╭─ weather\n│ {\n│ "city": "Rom"}\n╰─\n╭─ time\n│ {\n╰─ broken off\n'
    )
    assert (figures.text, [call.name for call in figures.calls]) == ("Let me see.", ["weather"])


def test_elsewhere_the_same_parts_are_plain_text() -> None:
    out = io.StringIO()
    print_reply(says(*REPLY), out)
    assert out.getvalue() == ('Hm, yes.\n\nLet me see.\nweather {\n"city": "Rom"}\ntime { broken off\n')


def test_a_thought_that_is_stopped_leaves_the_terminal_as_it_was() -> None:
    out = Terminal()
    print_reply(says(Reasoning("Hm"), Reasoning(" so")), out, lambda: True)
    assert out.getvalue() == "\x1b[2mHm\x1b[22m\n"


class CallingModel(ScriptedModel):
    """Calls a tool first, then answers."""

    def stream(self, messages: Sequence[Any], params: SamplingParams, *, tools: Any = ()) -> Iterator[Delta]:
        self.asked.append([dict(message) for message in messages])
        if messages[-1]["role"] == "tool":
            return says(Content("Sunny."))
        return says(CallStart(0, "weather"), CallArguments(0, "{}"), CallEnd(0, True))


def test_the_line_after_a_call_is_its_result(tmp_path: Path) -> None:
    model = CallingModel()
    out, err = talk(model, tmp_path, "Rom?", "25 degrees", "And Oslo?")
    assert out == "weather {}\nSunny.\nweather {}\n"
    assert "[the result of weather, in one line:]" in err
    _, called, result = model.asked[1]
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
    assert result == {
        "role": "tool",
        "tool_call_id": called["tool_calls"][0]["id"],
        "content": "25 degrees",
    }
    assert [message["role"] for message in model.asked[2]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
