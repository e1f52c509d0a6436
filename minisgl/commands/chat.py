"""`minisgl chat`: a streamed conversation in the terminal, with line history and a few commands.

Promise: Ctrl-C during an answer stops only that answer, and its text so far stays in the conversation. No
user mistake ends the program. It works on a pipe as well as on a terminal.
"""

import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, cast

from minisgl.errors import RequestError
from minisgl.offline import Delta
from minisgl.request import FinishReason, SamplingParams

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
    """Text, token counts and times of one reply."""

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    first_token_s: float
    """From the question to the first token."""
    total_s: float
    finish_reason: str
    """As in the API, or "stopped" if the user stopped the reply."""

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
    turns: list[dict[str, str]]

    def messages_with(self, question: str) -> list[dict[str, str]]:
        """The messages to send to the model for `question`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Append a question and its answer."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def print_reply(deltas: Iterator[Delta], out: TextIO, stopped: Callable[[], bool] = lambda: False) -> Figures:
    """Write a reply to `out` as it arrives, and a final newline. Stops early once `stopped()` is true."""
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
            out.write(delta.text)
            out.flush()
            interrupted = delta.finish_reason is None and stopped()
            if interrupted:
                break
    out.write("\n")
    out.flush()
    reason = last.finish_reason if last is not None and last.finish_reason is not None else FinishReason.ABORT
    return Figures(
        text=text,
        num_prompt_tokens=last.num_prompt_tokens if last is not None else 0,
        num_cached_tokens=last.num_cached_tokens if last is not None else 0,
        num_output_tokens=num_output_tokens,
        first_token_s=first_s,
        total_s=time.monotonic() - asked_at,
        finish_reason="stopped" if interrupted else reason.value,
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
) -> int:
    """Chat until the user leaves; returns the exit code. Answers go to `stdout`, all else to `stderr`."""
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
            try:
                deltas = llm.stream(conversation.messages_with(question), params)
                with _interrupt_flag() as stopped:
                    figures = print_reply(deltas, stdout, stopped)
            except RequestError as error:
                hint = "; /reset starts anew" if error.code == "context_length_exceeded" else ""
                _say(stderr, f"[{error.message}{hint}]")
                continue
            if figures.finish_reason == "stopped":
                _say(stderr, "[stopped]")
            elif figures.finish_reason == FinishReason.LENGTH.value:
                _say(stderr, "[cut off: no room left, or --max-tokens reached]")
            conversation.add(question, figures.text)
            answers.append(figures)


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
