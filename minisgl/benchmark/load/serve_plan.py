"""The plan of `minisgl bench serve`: its settings, checked and resolved before the first request.

Promise: every mistake in the settings that can be found without a server raises ConfigError here. Torch-free.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from minisgl.benchmark.load.arrivals import constant_arrivals, parse_counts, parse_rates, poisson_arrivals
from minisgl.benchmark.load.datasets import (
    DEFAULT_REQUESTS,
    DEFAULT_TURNS,
    SYNTHETIC,
    Conversation,
    Lengths,
    multi_turn_prompts,
    random_prompts,
    read_dataset,
    shared_prefix_prompts,
)
from minisgl.benchmark.load.latency import parse_slo
from minisgl.benchmark.load.load_client import Target
from minisgl.benchmark.load.load_run import Load
from minisgl.benchmark.reports.report import Cell
from minisgl.benchmark.settings import ServeBenchSettings
from minisgl.errors import ConfigError

MOST_REQUESTS = 1_000_000
MOST_PROMPT_TOKENS = 10_000_000
"""Both limits are far above any server's, and such a workload still fits into memory."""


class Point(NamedTuple):
    """One of the loads that a benchmark runs one after the other."""

    knob: str
    value: float
    load: Load

    @property
    def name(self) -> str:
        """For example "request_rate=4"."""
        return f"{self.knob}={self.cell}"

    @property
    def cell(self) -> Cell:
        """The value as tables show it: 4, 0.5, "inf"."""
        if math.isinf(self.value):
            return "inf"
        return int(self.value) if self.value == int(self.value) else self.value


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings, checked and resolved."""

    target: Target
    form: str
    """How prompts are sent: "tokens", "text" or "chat"."""
    conversations: Sequence[Conversation]
    points: Sequence[Point]
    slo: Mapping[str, float]
    prompt_seed: int
    assume_usage: bool
    """Where a server sends no usage, count the synthetic prompt tokens and the requested output tokens."""


def make_plan(settings: ServeBenchSettings, cache_dir: Path | None = None) -> Plan:
    """Check and resolve the settings, and make all conversations and arrival times.

    Raises:
        ConfigError: a setting is impossible, or the dataset can't be read.
    """
    _check(settings)
    conversations = make_conversations(settings, cache_dir)
    longest = max(turn.num_prompt_tokens or 0 for one in conversations for turn in one.turns)
    if longest > MOST_PROMPT_TOKENS:
        raise ConfigError(f"a prompt would have {longest} tokens, at most {MOST_PROMPT_TOKENS} can be made")
    form = _form(settings, conversations)
    fields: dict[str, Any] = {"temperature": settings.temperature}
    if settings.ignore_eos:
        fields["ignore_eos"] = True
    return Plan(
        target=Target(
            url=_url(settings.url),
            is_chat=settings.api == "chat",
            model=settings.served_model_name or "",
            api_key=settings.api_key,
            fields=fields | _extra_fields(settings.extra_body),
            timeout_s=settings.timeout_s,
        ),
        form=form,
        conversations=conversations,
        points=make_points(settings, conversations),
        slo=parse_slo(settings.slo) if settings.slo is not None else {},
        prompt_seed=secrets.randbits(32) if settings.prompt_seed is None else settings.prompt_seed,
        assume_usage=settings.tokens_from == "asked",
    )


def make_conversations(settings: ServeBenchSettings, cache_dir: Path | None = None) -> list[Conversation]:
    """The conversations of the dataset.

    Raises:
        ConfigError: there is no such dataset.
    """
    lengths = Lengths(
        (settings.min_prompt_tokens, settings.max_prompt_tokens),
        (settings.min_output_tokens, settings.max_output_tokens),
    )
    seed = settings.workload_seed
    num = settings.num_requests if settings.num_requests is not None else DEFAULT_REQUESTS
    try:
        scale = Fraction(settings.length_scale)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f'--length-scale must be a fraction as "1/8" or 0.5, got {settings.length_scale!r}'
        ) from None
    if settings.dataset in SYNTHETIC and scale != 1:
        raise ConfigError(
            "--length-scale needs a trace; --max-prompt-tokens and the like say how long others get"
        )
    if settings.dataset == "random":
        return random_prompts(num, lengths, seed)
    if settings.dataset == "shared-prefix":
        return shared_prefix_prompts(num, lengths, seed, settings.prefix_groups, settings.prefix_tokens)
    if settings.dataset == "multi-turn":
        return multi_turn_prompts(num, lengths, seed, settings.turns or DEFAULT_TURNS)
    path = Path(settings.dataset).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"--dataset must be one of {', '.join(SYNTHETIC)}, or a file; got {settings.dataset!r}"
        )
    return read_dataset(
        path,
        lengths,
        seed,
        limit=settings.num_requests,
        max_turns=settings.turns,
        length_scale=scale,
        count_tokens=_token_counter(settings.tokenizer, cache_dir)
        if settings.tokenizer is not None
        else None,
    )


def make_points(settings: ServeBenchSettings, conversations: Sequence[Conversation]) -> list[Point]:
    """The loads to run, one for each rate, time scale or concurrency in the settings.

    Raises:
        ConfigError: they contradict each other, or the dataset has no arrivals to follow.
    """
    num = len(conversations)
    recorded = [one.arrival_s for one in conversations if one.arrival_s is not None]
    rates = parse_rates(settings.request_rate or "inf", "--request-rate")
    time_scales = parse_rates(settings.time_scale, "--time-scale")
    counts = parse_counts(settings.concurrency or "1", "--concurrency")
    arrival = settings.arrival
    if arrival is None:
        if settings.concurrency is not None:
            arrival = "closed"
        elif settings.request_rate is None and len(recorded) == num:
            arrival = "trace"
        else:
            arrival = "poisson"
    if arrival not in ("poisson", "constant", "trace", "closed"):
        raise ConfigError(f"--arrival must be poisson, constant, trace or closed, got {arrival!r}")
    if (arrival == "closed") != (settings.concurrency is not None):
        raise ConfigError("--arrival closed and --concurrency N go together, and without --request-rate")
    if arrival in ("closed", "trace") and settings.request_rate is not None:
        raise ConfigError(f"--request-rate does nothing with {arrival} arrivals; use --arrival poisson")
    if arrival != "trace" and time_scales != [1.0]:
        raise ConfigError("--time-scale needs --arrival trace")
    if arrival == "trace":
        if len(recorded) != num:
            raise ConfigError("--arrival trace needs a dataset with recorded arrivals (docs/benchmarks.md)")
        if not all(map(math.isfinite, time_scales)):
            raise ConfigError(f"--time-scale must be finite, got {settings.time_scale!r}")
        return [
            Point("time_scale", scale, Load([scale * at for at in recorded], None)) for scale in time_scales
        ]
    if arrival == "closed":
        return [Point("concurrency", count, Load(None, count)) for count in counts]
    if arrival == "constant":
        return [Point("request_rate", rate, Load(constant_arrivals(num, rate), None)) for rate in rates]
    seed = settings.workload_seed
    return [Point("request_rate", rate, Load(poisson_arrivals(num, rate, seed), None)) for rate in rates]


def _form(settings: ServeBenchSettings, conversations: Sequence[Conversation]) -> str:
    """How prompts are sent.

    Raises:
        ConfigError: the settings ask for token ids, which these conversations do not have.
    """
    if settings.prompt_form not in (None, "tokens", "text"):
        raise ConfigError(f"--prompt-form must be tokens or text, got {settings.prompt_form!r}")
    are_ids_possible = settings.api == "completions" and all(
        len(one.turns) == 1 and not isinstance(one.turns[0].prompt, str) for one in conversations
    )
    if settings.prompt_form == "tokens" and not are_ids_possible:
        raise ConfigError(
            "--prompt-form tokens needs --api completions and made-up prompts of one turn: texts would need "
            "the server's tokenizer, and so would its answers"
        )
    if settings.api == "chat":
        return "chat"
    return "tokens" if are_ids_possible and settings.prompt_form != "text" else "text"


def _check(settings: ServeBenchSettings) -> None:
    if settings.api not in ("completions", "chat"):
        raise ConfigError(f"--api must be completions or chat, got {settings.api!r}")
    for name, least in (
        ("num_requests", 1),
        ("min_prompt_tokens", 1),
        ("min_output_tokens", 1),
        ("prefix_groups", 1),
        ("prefix_tokens", 1),
        ("turns", 1),
        ("vocab_size", 2),
        ("warmup", 0),
        ("think_time_s", 0),
        ("temperature", 0),
    ):
        value = getattr(settings, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if settings.tokens_from not in ("usage", "asked"):
        raise ConfigError(f"--tokens-from must be usage or asked, got {settings.tokens_from!r}")
    if settings.tokens_from == "asked" and not settings.ignore_eos:
        raise ConfigError("--tokens-from asked needs --ignore-eos: answers may end early without")
    if settings.num_requests is not None and settings.num_requests > MOST_REQUESTS:
        raise ConfigError(f"--num-requests must be at most {MOST_REQUESTS}, got {settings.num_requests}")
    for kind in ("prompt", "output"):
        if getattr(settings, f"min_{kind}_tokens") > getattr(settings, f"max_{kind}_tokens"):
            raise ConfigError(f"--min-{kind}-tokens must not be above --max-{kind}-tokens")
    if settings.api_key is not None and not settings.api_key.isprintable():
        raise ConfigError("--api-key has characters that no header can hold")
    if not settings.timeout_s > 0:
        raise ConfigError(f"--timeout-s must be positive, got {settings.timeout_s:g}")


def _url(text: str) -> str:
    """Add a missing scheme, and remove the path /v1 that OpenAI's library wants."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or the address is malformed
        is_complete = False
    if not is_complete:
        raise ConfigError(f"--url must be that of a server, as http://127.0.0.1:8000, got {text!r}")
    return url.rstrip("/").removesuffix("/v1")


def _extra_fields(text: str | None) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text) if text is not None else {}
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--extra-body is not valid JSON ({error}): {text}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {text}")
    return fields


def _token_counter(name: str, cache_dir: Path | None) -> Callable[[str], int]:
    # Imported here, because most runs need no tokenizer.
    from minisgl.text.tokenizer import Tokenizer
    from minisgl.weights.sources import resolve_model_folder

    tokenizer = Tokenizer.from_folder(resolve_model_folder(name, cache_dir=cache_dir))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
