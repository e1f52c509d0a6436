"""`minisgl chat`: a streamed conversation in the terminal, with line history and a few commands.

Promise: Ctrl-C during an answer stops only that answer, and its text so far stays in the conversation. No
user mistake ends the program. It works on a pipe as well as on a terminal.
"""

import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, cast

from minisgl.commands.reply_printer import ReplyPrinter
from minisgl.errors import RequestError
from minisgl.offline import Delta
from minisgl.replies.tools import new_call_id
from minisgl.request import FinishReason, SamplingParams
from minisgl.text.formats.events import Call, Event, collect

if TYPE_CHECKING:
    from collections.abc import Generator

    from minisgl.llm import LLM

PROMPT = ">>> "
PASTE_WAIT_S = 0.02
HISTORY_LINES = 1000
HELP = """\
/reset          start a new conversation (the system prompt stays)
/system TEXT    set the system prompt and start anew; without TEXT remove it
/stats          figures of the last answer and of the session
/help           this list
/exit           leave (Ctrl-D too)
Ctrl-C stops an answer; at the prompt it leaves. A line that ends in \\ goes on in the next one."""


class Figures(NamedTuple):
    """Text without thoughts and calls, calls, token counts and times of one reply."""

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    first_token_s: float
    """From the question to the first token."""
    total_s: float
    finish_reason: str
    """As in the API, or "stopped" if the user stopped the reply."""
    calls: tuple[Call, ...] = ()
    """Those that are whole."""

    def line(self) -> str:
        """The figures as one line of text."""
        decode_s = self.total_s - self.first_token_s
        rate = f", {(self.num_output_tokens - 1) / decode_s:.1f} tokens/s" if decode_s > 0 else ""
        return (
            f"[{self.num_prompt_tokens} prompt tokens ({self.num_cached_tokens} cached), "
            f"{self.num_output_tokens} output tokens, first after {1000 * self.first_token_s:.0f} ms{rate}, "
            f"{self.finish_reason}]"
        )


@dataclass
class Conversation:
    """The messages so far. A question is added only together with its answer."""

    system: str | None
    turns: list[dict[str, Any]]

    def messages_with(self, new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages to send to the model, when `new` follows the conversation so far."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, *new]


def print_reply(deltas: Iterator[Delta], out: TextIO, stopped: Callable[[], bool] = lambda: False) -> Figures:
    """Write a reply to `out` as it arrives, and a final newline. Stops early once `stopped()` is true.

    On a terminal, thoughts are dimmed and calls stand in a frame.
    """
    printer = ReplyPrinter(out)
    events: list[Event] = []
    asked_at = time.monotonic()
    first_s = 0.0
    last: Delta | None = None
    text = ""
    num_output_tokens = 0
    interrupted = False
    # closing aborts the request at once when the loop ends early, not when the iterator is collected
    with closing(cast("Generator[Delta]", deltas)):
        for delta in deltas:
            if last is None:
                first_s = time.monotonic() - asked_at
            last = delta
            text += delta.text
            num_output_tokens += len(delta.token_ids)
            events += delta.events
            printer.write(delta)
            interrupted = delta.finish_reason is None and stopped()
            if interrupted:
                break
    printer.finish()
    reason = last.finish_reason if last is not None and last.finish_reason is not None else FinishReason.ABORT
    return Figures(
        text=text,
        num_prompt_tokens=last.num_prompt_tokens if last is not None else 0,
        num_cached_tokens=last.num_cached_tokens if last is not None else 0,
        num_output_tokens=num_output_tokens,
        first_token_s=first_s,
        total_s=time.monotonic() - asked_at,
        finish_reason="stopped" if interrupted else reason.value,
        calls=tuple(call for call in collect(events).calls if call.complete),
    )


def run_chat(
    llm: "LLM",
    params: SamplingParams,
    *,
    system: str | None,
    history_file: Path,
    stdin: TextIO,
    stdout: TextIO,
    stderr: TextIO,
    tools: Sequence[dict[str, Any]] = (),
) -> int:
    """Chat until the user leaves; returns the exit code. Answers go to `stdout`, all else to `stderr`.

    Where the model calls one of `tools`, the next line that is read is the call's result.
    """
    conversation = Conversation(system, [])
    answers: list[Figures] = []
    with _line_reader(stdin, stderr, history_file) as read_line:
        if stdin.isatty():
            _say(stderr, "Ask something; /help shows the commands.")
        while True:
            try:
                line = read_line()
            except (EOFError, KeyboardInterrupt):
                if stdin.isatty():
                    _say(stderr, "")
                return 0
            question = line.strip()
            if not question:
                continue
            if question.startswith("/"):
                if question.split()[0] in ("/exit", "/quit"):
                    return 0
                _run_command(question, conversation, answers, stderr)
                continue
            new: list[dict[str, Any]] = [{"role": "user", "content": question}]
            try:
                while True:
                    deltas = llm.stream(conversation.messages_with(new), params, tools=tools)
                    with _interrupt_flag() as stopped:
                        figures = print_reply(deltas, stdout, stopped)
                    if figures.finish_reason == "stopped":
                        _say(stderr, "[stopped]")
                    elif figures.finish_reason == FinishReason.LENGTH.value:
                        _say(stderr, "[cut off: no room left, or --max-tokens reached]")
                    answers.append(figures)
                    new += _with_results(figures, read_line, stderr)
                    if new[-1]["role"] == "assistant":
                        break
            except RequestError as error:
                hint = "; /reset starts anew" if error.code == "context_length_exceeded" else ""
                _say(stderr, f"[{error.message}{hint}]")
                continue
            except (EOFError, KeyboardInterrupt):  # instead of a call's result
                return 0
            conversation.turns += new


def _with_results(figures: Figures, read_line: Callable[[], str], stderr: TextIO) -> list[dict[str, Any]]:
    """The reply as a message, and the results of its calls, which the user writes."""
    message: dict[str, Any] = {"role": "assistant", "content": figures.text}
    if not figures.calls or figures.finish_reason == "stopped":
        return [message]
    results = []
    message["tool_calls"] = []
    for call in figures.calls:
        call_id = new_call_id()
        function = {"name": call.name, "arguments": call.arguments}
        message["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        _say(stderr, f"[the result of {call.name}, in one line:]")
        results.append({"role": "tool", "tool_call_id": call_id, "content": read_line().strip()})
    return [message, *results]


def _run_command(command: str, conversation: Conversation, answers: list[Figures], stderr: TextIO) -> None:
    name, _, argument = command.partition(" ")
    if name == "/reset":
        conversation.turns.clear()
        _say(stderr, "[a new conversation]")
    elif name == "/system":
        conversation.system = argument.strip() or None
        conversation.turns.clear()
        _say(
            stderr, "[system prompt set, a new conversation]" if conversation.system else "[no system prompt]"
        )
    elif name == "/stats":
        if not answers:
            _say(stderr, "[nothing answered yet]")
            return
        total = sum(figures.num_output_tokens for figures in answers)
        _say(stderr, f"last answer: {answers[-1].line()}")
        _say(stderr, f"session: {len(answers)} answers, {total} output tokens")
    elif name == "/help":
        _say(stderr, HELP)
    else:
        _say(stderr, f"[no command {name}; /help shows them]")


def _say(stderr: TextIO, text: str) -> None:
    stderr.write(text + "\n")
    stderr.flush()


@contextmanager
def _interrupt_flag() -> Iterator[Callable[[], bool]]:
    """In the `with` block Ctrl-C only sets a flag, so that no engine step is interrupted.

    The third Ctrl-C raises KeyboardInterrupt.
    """
    presses = 0

    def note(signum: int, frame: object) -> None:
        nonlocal presses
        presses += 1
        if presses >= 3:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _line_reader(stdin: TextIO, stderr: TextIO, history_file: Path) -> Iterator[Callable[[], str]]:
    """Yields a function that reads the next message, with line editing and history on a terminal.

    The function raises EOFError at the end of the input. Lines pasted together are one message.
    """
    if not stdin.isatty():

        def read_plain() -> str:
            line = stdin.readline()
            if not line:
                raise EOFError
            return line

        yield lambda: _read_message(read_plain)
        return

    readline = _load_history(history_file)

    def read_terminal() -> str:
        lines = [input(PROMPT)]
        while select.select([stdin], [], [], PASTE_WAIT_S)[0]:
            lines.append(input())
        return "\n".join(lines)

    try:
        yield lambda: _read_message(read_terminal)
    finally:
        _save_history(readline, history_file, stderr)


def _read_message(read: Callable[[], str]) -> str:
    """Read one message. A line that ends in a backslash continues in the next line."""
    text = read().rstrip("\n")
    while text.endswith("\\"):
        text = text[:-1] + "\n" + read().rstrip("\n")
    return text


def _load_history(history_file: Path) -> Any:
    """The readline module with the history loaded; None if Python has no readline."""
    try:
        import readline  # lazy: some Pythons lack it, and importing it changes the terminal
    except ImportError:
        return None
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError):  # no history file yet
        readline.read_history_file(history_file)
    return readline


def _save_history(readline: Any, history_file: Path, stderr: TextIO) -> None:
    if readline is None:
        return
    try:
        history_file.parent.mkdir(parents=True, exist_ok=True)
        history_file.touch(mode=0o600)
        readline.write_history_file(history_file)
    except OSError as error:
        _say(stderr, f"[the history could not be saved to {history_file}: {error.strerror}]")
