"""Draws the state of `minisgl top` with rich, for terminals of 80 columns and more."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minisgl.server.watch.history import Sample
from minisgl.server.watch.views import EngineView, RequestView
from minisgl.top.state import State

BLOCKS = "▁▂▃▄▅▆▇█"
LOOKS = {
    "serving": "green", "starting": "yellow", "stopping": "yellow", "silent": "red", "dead": "red",
    "restarting": "yellow", "restart": "yellow",
    "decoding": "green", "prompt": "cyan", "queued": "yellow", "grammar": "magenta", "preempted": "red",
    "ended": "bright_black",
}  # fmt: skip
MIN_ROWS = 3


def draw(state: State, width: int, height: int) -> RenderableType:
    """The whole screen: `height` lines of `width` columns at most."""
    head = _head(state, width)
    foot = _foot(state)
    chosen = state.chosen_request()
    if state.explains and chosen is not None:
        middle: list[RenderableType] = [explanation(chosen)]
    else:
        middle = [_requests(state, width, max(MIN_ROWS, height - len(head) - 3))]
    return Group(*head, *middle, foot)


def _head(state: State, width: int) -> list[RenderableType]:
    snapshot = state.snapshot
    if snapshot is None or not snapshot.engines.engines:
        return [Text.assemble(("minisgl top", "bold"), "  ", (state.problem or "connecting", "yellow"))]
    engines = state.shown(snapshot.engines.engines)
    histories = state.shown(snapshot.history.engines)
    of = f" of {state.num_engines}" if state.num_engines > 1 else ""
    name = f"engine {engines[0].id}{of}" if len(engines) == 1 else f"{len(engines)} engines"
    word, look = _state(engines)
    first = Text.assemble(
        ("minisgl top", "bold"),
        f"  {snapshot.engines.model}  {name} on {engines[0].device or '?'}  ",
        (word, look),
    )
    if state.problem:
        first = Text.assemble(
            ("minisgl top", "bold"), "  ", (f"no answer: {state.problem}; trying again", "red")
        )
    samples = [engine.sample or Sample(time=0.0) for engine in engines]
    lines = [
        first,
        *(_figures_of_one(engines[0], samples[0]) if len(engines) == 1 else _sums(engines, samples)),
    ]
    output = _sum_of_columns([one.columns.get("output_tokens_per_s", []) for one in histories])
    lines.append(
        Text.assemble(
            ("output, last minute  ", "bright_black"), (_sparkline(output, max(10, width - 24)), "green")
        )
    )
    moments = snapshot.moments.refused + [one for part in snapshot.moments.engines for one in part.moments]
    if moments:
        last = max(moments, key=lambda one: one.until)
        when = datetime.fromtimestamp(last.at).strftime("%H:%M:%S")
        lines.append(Text.assemble(("last slow  ", "bright_black"), f"{when}  {last.words}"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return list(lines)


def _state(engines: Sequence[EngineView]) -> tuple[str, str]:
    """What the engines are, in words, and how it looks: the state that they share, or how many serve."""
    states = {engine.state for engine in engines}
    if len(states) == 1:
        (word,) = states
        return word, LOOKS.get(word, "")
    return f"{sum(engine.state == 'serving' for engine in engines)} serving", "yellow"


def _figures_of_one(engine: EngineView, sample: Sample) -> list[Text]:
    return [
        _figures(
            [
                ("output", _number(sample.output_tokens_per_s), "tok/s"),
                ("prompts", _number(sample.prompt_tokens_per_s), "tok/s"),
                ("running", _number(sample.running), ""),
                ("waiting", _number(sample.waiting), ""),
                ("cache hits", _percent(sample.hit_rate), ""),
            ]
        ),
        _figures(
            [
                ("first token p50", _ms(sample.first_token_p50_ms), ""),
                ("p99", _ms(sample.first_token_p99_ms), ""),
                ("between tokens p50", _ms(sample.token_p50_ms), ""),
                ("p99", _ms(sample.token_p99_ms), ""),
            ]
        ),
        _figures(
            [
                ("step p50", _ms(sample.step_p50_ms), ""),
                ("p99", _ms(sample.step_p99_ms), ""),
                *_pages(engine, sample),
            ]
        ),
    ]


def _sums(engines: Sequence[EngineView], samples: Sequence[Sample]) -> list[Text]:
    """What adds up over the engines, then a line for each."""
    lines = [
        _figures(
            [
                ("output", _number(_sum(one.output_tokens_per_s for one in samples)), "tok/s"),
                ("prompts", _number(_sum(one.prompt_tokens_per_s for one in samples)), "tok/s"),
                ("running", _number(_sum(one.running for one in samples)), ""),
                ("waiting", _number(_sum(one.waiting for one in samples)), ""),
            ]
        )
    ]
    for engine, sample in zip(engines, samples, strict=True):
        line = Text.assemble(f"engine {engine.id} ", (f"{engine.state:<11}", LOOKS.get(engine.state, "")))
        figures = [
            ("output", f"{_number(sample.output_tokens_per_s):>5}", "tok/s"),
            ("running", f"{_number(sample.running):>2}", ""),
            ("waiting", f"{_number(sample.waiting):>2}", ""),
            ("step", _ms(sample.step_p50_ms), ""),
        ]
        lines.append(line + _figures(figures))
    return lines


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum of those that are known; None = none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum_of_columns(columns: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The sum of lists that end with the same second."""
    longest = max(map(len, columns), default=0)
    padded = [[None] * (longest - len(column)) + list(column) for column in columns]
    return [_sum(values) for values in zip(*padded, strict=True)]


def _pages(engine: EngineView, sample: Sample) -> list[tuple[str, str, str]]:
    if not engine.num_pages or sample.pages_running is None or sample.pages_cached is None:
        return []
    return [
        ("pages in use", _percent(sample.pages_running / engine.num_pages), ""),
        ("cached", _percent(sample.pages_cached / engine.num_pages), ""),
    ]


def _figures(parts: Sequence[tuple[str, str, str]]) -> Text:
    line = Text()
    for name, value, unit in parts:
        line.append(f"{name} ", "bright_black")
        line.append(f"{value}{' ' + unit if unit else ''}   ")
    line.rstrip()
    return line


def _requests(state: State, width: int, num_rows: int) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold", width=width)
    names_engines = state.num_engines > 1 and state.engine is None
    for name, columns in (("REQUEST", 16), *([("ENG", 3)] if names_engines else []), ("STATE", 9)):
        table.add_column(name, width=columns, no_wrap=True, overflow="ellipsis")
    for name, columns in (("TOOK", 8), ("FIRST", 8), ("PROMPT", 6), ("OUTPUT", 6)):
        table.add_column(name, width=columns, justify="right", no_wrap=True)
    table.add_column("WHY", ratio=1, no_wrap=True, overflow="ellipsis")
    shown = state.requests()
    place = next((place for place, one in enumerate(shown) if one.number == state.chosen), 0)
    first = max(0, min(place - num_rows // 2, len(shown) - num_rows))
    for one in shown[first : first + num_rows]:
        table.add_row(
            _name(one),
            *([str(state.engine_of(one.number))] if names_engines else []),
            Text(one.end or one.state, _look(one)),
            _ms(one.total_ms),
            _ms(one.first_token_ms),
            str(one.prompt_tokens),
            str(one.output_tokens),
            one.why,
            style="reverse" if one.number == state.chosen else "",
        )
    return table


def explanation(one: RequestView) -> RenderableType:
    """A request in words."""
    lines = [
        Text.assemble("\n", (_name(one, 128), "bold"), "  ", (one.end or one.state, _look(one))),
        Text(
            f"{one.prompt_tokens} prompt tokens, {one.cached_tokens} of them cached; "
            f"{one.output_tokens} output tokens; {_ms(one.total_ms)} in all, "
            f"the first token after {_ms(one.first_token_ms)}\n"
        ),
    ]
    for cause in one.causes:
        lines.append(Text(f"• {cause.words}"))
        if cause.knobs:
            lines.append(Text(f"  helps: {', '.join(cause.knobs)}", "cyan"))
    if not one.causes:
        lines.append(Text("Nothing has held it up so far."))
    return Group(*lines)


def _foot(state: State) -> Text:
    if state.confirms is not None:
        asked = f"End {_name(state.confirms)}? Its client gets an error. y = yes, any other key = no"
        return Text(f"\n{asked}", "bold red")
    engine = "  e engine" if state.num_engines > 1 else ""
    keys = f"↑↓ choose  ⏎ why  s sort: {state.sort}  f show: {state.filter}  a abort{engine}  q quit"
    return Text.assemble("\n", (state.message or keys, "bright_black"), no_wrap=True)


def _name(one: RequestView, most: int = 16) -> str:
    name = one.id or f"request {one.number}"
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _look(one: RequestView) -> str:
    return "red" if one.end == "error" else LOOKS.get(one.state, "")


def _sparkline(values: Sequence[float | None], width: int) -> str:
    last = values[-width:]
    most = max((value for value in last if value is not None), default=0.0)
    if most <= 0:
        return "·" * len(last)
    return "".join(
        "·" if value is None else BLOCKS[min(len(BLOCKS) - 1, int(value / most * len(BLOCKS)))]
        for value in last
    )


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if 0 < value < 100 and value != int(value) else f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 1000:
        return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"
    return f"{value / 1000:.1f} s" if value < 100_000 else f"{value / 60_000:.0f} min"
