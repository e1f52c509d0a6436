"""What a hostile reply costs to read: twice the text is about twice the work, however it is cut."""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from families import FAMILIES, TOOLS
from test_response_template import CASES

from minisgl.text.formats import patterns, writer
from minisgl.text.formats.parser import MAX_PIECE_CHARS, ReplyParser, new_parser
from minisgl.text.formats.response_template import load_response_template

UNITS = ["{", "<", "[", "\\", '"', " ", '{"name": ']
SLACK = 12_000
"""Work that does not depend on the text's length."""
MAX_IN_SIGHT = 2 * MAX_PIECE_CHARS


class Work:
    """Counts function calls, characters of events, and characters that searches have in sight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.most_in_sight = 0
        for name in ("Content", "Reasoning", "CallArguments"):
            monkeypatch.setattr(writer, name, self.counted(getattr(writer, name)))
        compiled = patterns.re.compile

        def compile_counted(*arguments: Any) -> Any:
            return CountedPattern(self, compiled(*arguments))

        monkeypatch.setattr(
            patterns, "re", type("re", (), {**vars(re), "compile": staticmethod(compile_counted)})
        )

    def counted(self, event: type) -> type:
        work = self

        class Counted(event):
            def __new__(cls, *values: Any) -> Any:
                work.count += len(values[-1])
                return super().__new__(cls, *values)

        return Counted

    def see(self, num_chars: int) -> None:
        self.count += num_chars
        self.most_in_sight = max(self.most_in_sight, num_chars)

    def of(self, parser: ReplyParser, pieces: list[str] | str) -> int:
        """The work of reading a reply to its end."""
        self.count = 0

        def called(frame: object, event: str, _: object) -> None:
            self.count += event in ("call", "c_call")

        sys.setprofile(called)
        try:
            for piece in pieces:
                parser.feed(piece)
            parser.finish()
        finally:
            sys.setprofile(None)
        return self.count


class CountedPattern:
    """A compiled expression that counts what it may look at."""

    def __init__(self, work: Work, pattern: re.Pattern[str]) -> None:
        self._work, self._pattern = work, pattern
        self.groupindex = pattern.groupindex

    def search(self, text: str, begin: int = 0) -> re.Match[str] | None:
        return self._look(self._pattern.search, text, begin)

    def match(self, text: str, begin: int = 0) -> re.Match[str] | None:
        return self._look(self._pattern.match, text, begin)

    def _look(self, find: Callable[..., Any], text: str, begin: int) -> Any:
        found = find(text, begin)
        self._work.see((len(text) if found is None else found.end()) - begin)
        return found


def check_linear(work: Work, new: Callable[[], ReplyParser], begin: str, unit: str, size: int) -> None:
    for cut in (list, lambda text: [text]):
        once, twice, four_times = (
            work.of(new(), cut(begin + unit * (times * size // len(unit)))) for times in (1, 2, 4)
        )
        assert four_times - twice < 2.3 * (twice - once) + SLACK, (begin, unit)
        assert work.most_in_sight <= MAX_IN_SIGHT


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_long_run_costs_in_proportion_to_its_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, work = FAMILIES[name], Work(monkeypatch)
    reply = family.reply(family.message())
    for begin in ("", reply.partition("Köln")[0]):
        for unit in UNITS:
            check_linear(
                work,
                lambda: new_parser(family.format, prompt=family.begin, tools=TOOLS),
                begin,
                unit,
                size=320,
            )


@pytest.mark.parametrize("name", sorted(CASES))
def test_of_templates_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, prompt, text = CASES[name]
    work = Work(monkeypatch)
    form = load_response_template(template)
    for unit in ("{", " ", text[:20]):
        check_linear(work, lambda: new_parser(form, prompt=prompt, tools=TOOLS), "", unit, size=600)
