"""What does quantization cost in quality, and is that the format's cost or ours? SmolLM2 on the CPU.

    python bench/quality.py --out bench/results/cpu/quality.json
    python bench/quality.py --out ... 4-bit int4     # formats with these in their names; replaces their rows

Each format's checkpoint is written from the same bfloat16 weights, run by the engine's model in float32, and
compared with the unquantized model over a fixed text: KL divergence per token, perplexity, and how often the
likeliest next token is the same. Beside it stands the same quantization in plain torch
(tests/models). Exit code 1 where our KL is above 1.05 times plain torch's.
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "models"))
from int4_models import INT4_FORMATS, quantize_int4  # pyright: ignore[reportMissingImports]
from quantized_models import FORMATS, quantize  # pyright: ignore[reportMissingImports] - the path above
from tiny_models import PagedRunner  # pyright: ignore[reportMissingImports]

from minisgl.benchmark.reports.report import Cell, format_table, make_report, read_report, write_report
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.registry import build_model
from minisgl.weights.loader import load_weights
from minisgl.weights.sources import resolve_model_folder

MODEL = "smollm2-135m"
ALLOWED = 1.05
"""Times the KL divergence of plain torch."""
LICENSE_CHARACTERS = 7000
"""Of the project's license, behind the text: with fewer tokens, single activations that lie halfway between
two FP8 numbers decide about percents of the divergence."""
UNQUANTIZED = ("float32", "bfloat16")
LIKE_FLAG = {
    "--quantization fp8": "compressed-tensors, dynamic",
    "--quantization fp8-block": "compressed-tensors, block",
    "--quantization int4": "4-bit gptq",
}
"""The format that quantizes as a value of --quantization does. The built-in model's widths allow int4 groups
of 64 inputs, as this GPTQ has."""
TEXT = """\
The harbour of a small town is quiet in the early morning. Boats rest on the water, ropes creak, and a
few gulls walk along the wall. At six o'clock the first fishermen arrive with coffee in paper cups. They
check their nets, talk about the weather, and load boxes of ice. By the time the sun is over the hills,
most of the boats have left. The market opens at nine. People come to buy bread, vegetables, cheese and
whatever was caught during the night. Children run between the stalls while their parents compare prices.

Bread is one of the oldest foods that people prepare. Flour and water are mixed to a dough, which is
kneaded until it becomes smooth. Yeast turns sugar into carbon dioxide, and the gas makes the dough rise.
In the oven the water becomes steam, the starch sets, and the crust turns brown because sugars and
proteins react with each other. A loaf is ready when it sounds hollow if you knock on its base.

A computer stores numbers with a limited number of digits. If a result needs more digits, it has to be
rounded to the nearest number that can be stored. A single rounding error is tiny, but a long calculation
has many of them, and they can add up. Careful programmers therefore think about the order in which
numbers are added, and they test their programs with inputs for which the exact answer is known. The same
is true for engineers who measure the length of a bridge, and for accountants who add thousands of small
amounts of money."""


def our_logits(folder: Path, token_ids: list[int], dtype: str, flag: str | None = None) -> Tensor:
    """float32 [T, V] of the engine's model."""
    config = read_model_config(folder, flag)
    kind: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": "cpu"}
    model = build_model(config, attention_backend="torch", **kind)
    load_weights(model, folder, config, **kind)
    runner = PagedRunner(model, num_rows=1, page_size=16, max_tokens=len(token_ids), seed=0)
    for attention in model.attention_layers():
        attention.k_cache, attention.v_cache = (
            cache.to(kind["dtype"]) for cache in (attention.k_cache, attention.v_cache)
        )
    return runner.feed([(0, token_ids)]).float()


def their_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """float32 [T, V] of transformers' model."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def exact_logits(model: PreTrainedModel, token_ids: list[int]) -> tuple[Tensor, dict[str, float]]:
    """The unquantized model's logits, and each linear layer's largest input, as a calibration finds it."""
    peaks: dict[str, float] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            peaks[name] = inputs[0].abs().max().item()

        return hook

    hooks = [
        layer.register_forward_pre_hook(note(name))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    logits = their_logits(model, token_ids)
    for hook in hooks:
        hook.remove()
    return logits, peaks


def quality(logits: Tensor, exact: Tensor, token_ids: list[int]) -> dict[str, float]:
    """KL(exact || logits) per token in nats, perplexity, share of equal likeliest tokens."""
    ours, theirs = logits.double().log_softmax(-1), exact.double().log_softmax(-1)
    following = torch.tensor(token_ids[1:])
    return {
        "kl": (theirs.exp() * (theirs - ours)).sum(-1).mean().item(),
        "perplexity": (-ours[:-1].gather(1, following[:, None]).mean()).exp().item(),
        "same_token": (logits.argmax(-1) == exact.argmax(-1)).double().mean().item(),
    }


def row(name: str, ours: dict[str, float], plain: dict[str, float] | None) -> dict[str, Cell]:
    """A line of the table."""
    line: dict[str, Cell] = {"format": name}
    for measure, value in ours.items():
        line[measure] = round(value, 4)
        line[f"{measure}_in_torch"] = None if plain is None else round(plain[measure], 4)
    line["kl_ratio"] = None if plain is None else round(ours["kl"] / plain["kl"], 4)
    return line


def with_other_rows(
    new: list[dict[str, Cell]], old: Sequence[Mapping[str, Cell]], order: Sequence[str]
) -> list[dict[str, Cell]]:
    """The new rows, and an older report's rows of formats that were not measured now."""
    mine = {line["format"] for line in new}
    rows = [*new, *(dict(line) for line in old if line["format"] not in mine)]
    return sorted(rows, key=lambda line: order.index(str(line["format"])))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="only formats with one of these in their names")
    parser.add_argument("--out", type=Path, help="write a report here; with names, replace their rows in it")
    arguments = parser.parse_args()
    folder = resolve_model_folder(MODEL)
    license_text = (Path(__file__).resolve().parent.parent / "LICENSE").read_text()[:LICENSE_CHARACTERS]
    token_ids = AutoTokenizer.from_pretrained(folder)(f"{TEXT}\n\n{license_text}").input_ids
    plain_rows = {f"unquantized, {dtype}": dtype for dtype in UNQUANTIZED}
    order = [*plain_rows, *FORMATS, *(f"4-bit {name}" for name in INT4_FORMATS), *LIKE_FLAG]
    chosen = [name for name in order if not arguments.names or any(part in name for part in arguments.names)]
    if not chosen:
        parser.error(
            f"no format has {' or '.join(arguments.names)} in its name; there are {'; '.join(order)}"
        )
    old = None
    if arguments.names and arguments.out and arguments.out.exists():
        old = read_report(arguments.out)
        if old.metrics["num_tokens"] != len(token_ids):
            parser.error(f"{arguments.out} is of another text; measure all formats, or choose another --out")

    def reference() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    exact, peaks = exact_logits(reference(), token_ids)
    writers: dict[str, Callable[[PreTrainedModel, Path], None]] = {
        name: functools.partial(_write_fp8, form, peaks) for name, form in FORMATS.items()
    }
    for name, form in INT4_FORMATS.items():
        writers[f"4-bit {name}"] = functools.partial(_write_int4, form)
    rows = []
    for name in chosen:
        if name in plain_rows:
            measured = quality(our_logits(folder, token_ids, plain_rows[name]), exact, token_ids)
            rows.append(row(name, measured, None))
    for name, write in writers.items():
        like = [flag for flag, format_name in LIKE_FLAG.items() if format_name == name and flag in chosen]
        if name not in chosen and not like:
            continue
        with tempfile.TemporaryDirectory(prefix="minisgl-") as place:
            model = reference()
            write(model, Path(place))
            plain = quality(their_logits(model, token_ids), exact, token_ids)
            if name in chosen:
                ours = quality(our_logits(Path(place), token_ids, "float32"), exact, token_ids)
                rows.append(row(name, ours, plain))
                print(rows[-1], flush=True)
        for flag in like:
            logits = our_logits(folder, token_ids, "float32", flag.removeprefix("--quantization "))
            rows.append(row(flag, quality(logits, exact, token_ids), plain))
            print(rows[-1], flush=True)
    rows = with_other_rows(rows, old.tables["formats"] if old else [], order)
    print(format_table(rows))
    worst = max((ratio for line in rows if isinstance(ratio := line["kl_ratio"], float)), default=0.0)
    if arguments.out:
        metrics = {"num_tokens": len(token_ids), "worst_kl_ratio": worst}
        report = make_report("quality", arguments={"model": MODEL}, metrics=metrics, tables={"formats": rows})
        write_report(arguments.out, report)
    return int(worst > ALLOWED)


def _write_fp8(form: Any, peaks: dict[str, float], model: PreTrainedModel, place: Path) -> None:
    quantize(model, form, place, peaks=peaks)


def _write_int4(form: Any, model: PreTrainedModel, place: Path) -> None:
    quantize_int4(model, form, place)


if __name__ == "__main__":
    raise SystemExit(main())
