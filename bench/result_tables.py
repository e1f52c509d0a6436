"""The tables of results in the documents, each made from the reports in bench/results.

A table stands between `<!-- table: NAME -->` and `<!-- end -->` in one of `PAGES`.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minisgl.benchmark.reports.report import read_report

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "bench" / "results" / "h200"
TABLE_CONTEXT = 1024
"""Of the decode steps that tables show."""
PAGES = tuple(
    ROOT / "docs" / name
    for name in ("benchmarks.md", "kernels.md", "quantization.md", "results.md", "structured-output.md")
)
"""Documents with tables of results."""
MARKED = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->\n", re.DOTALL)
KERNEL_REPORTS = (
    "kernels-attention",
    "kernels-llama-3.1-8b",
    "kernels-qwen3-30b-a3b",
    "kernels-sample",
    "kernels-inductor",
)
KERNEL_SHAPES = {
    "paged_decode": (
        "1x1024 32/8/128",
        "8x8192 32/8/128",
        "256x1024 32/8/128",
        "64x4096 32/8/128",
        "1x131072 32/8/128",
        "1x100000+255x100 32/8/128",
    ),
    "paged_prefill": ("1x8192 32/8/128", "8x2048 32/8/128", "1x32768 32/8/128", "512 on 32k 32/8/128"),
    "rms_norm": ("1x4096", "4096x4096"),
    "add_rms_norm": ("1x4096", "64x4096", "4096x4096"),
    "linear": ("1x4096 to 4096", "1x14336 to 4096", "16x14336 to 4096"),
    "gated_linear": ("1x4096 to 28672", "16x4096 to 28672"),
    "rope_store": ("4096x32/8/128", "4096x32/4/128 normed"),
    "silu_mul": ("1x14336", "64x14336", "4096x14336"),
    "sample": ("1x151936 greedy", "1x151936 top_p", "256x151936 greedy", "256x151936 top_p"),
    "fused_moe": ("1x2048 128x768 top 8", "16x2048 128x768 top 8", "8192x2048 128x768 top 8"),
}
"""Op -> its shapes in the table of docs/kernels.md, named as in the reports."""

Row = Sequence[str]


def markdown(head: Row, rows: Iterable[Row]) -> str:
    """A table in Markdown; the first column is text, the others are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def load(name: str) -> Mapping[str, Any]:
    """A report as its JSON has it: of bench/results/h200, or of another folder if `name` has one."""
    return json.loads((REPORTS.parent / f"{with_folder(name)}.json").read_text(encoding="utf-8"))


def with_folder(name: str) -> str:
    return name if "/" in name else f"{REPORTS.name}/{name}"


def link(name: str) -> str:
    """The source of a row: its commit, as a link to the report."""
    report = load(name)
    commit = report["environment"]["git_commit"] if "environment" in report else report["git_commit"]
    return f"[{commit[:7]}](../bench/results/{with_folder(name)}.json)"


def offline_table() -> str:
    """`minisgl bench offline`: tokens per second and the time of the workload."""
    models = {
        "Qwen3-0.6B": "offline-qwen3-0.6b",
        "Llama-3.1-8B": "offline-llama-3.1-8b",
        "Llama-3.1-8B, `--attention-backend flashinfer-fa2`": "offline-llama-3.1-8b-flashinfer-fa2",
        "Qwen3-14B": "offline-qwen3-14b",
    }
    rows = []
    for model, name in models.items():
        metrics = load(name)["metrics"]
        rows.append(
            [model, f"{metrics['output_tokens_per_s']:,.0f}", f"{metrics['elapsed_s']:.2f}", link(name)]
        )
    return markdown(["model", "output tokens/s", "seconds", "report of commit"], rows)


def decode_table() -> str:
    """Decode steps at context 1024, on one GPU."""
    models = {
        "Qwen3-0.6B": "step-qwen3-0.6b-cc60122",
        "Llama-3.1-8B": "step-llama-3.1-8b-cc60122",
        "Llama-3.1-8B, another GPU": "step-llama-3.1-8b-tp1",
        "Llama-3.1-8B, a slower GPU": "step-llama-3.1-8b-884a771",
        "Llama-3.1-8B, an H100": "h100/step-llama-3.1-8b",
        "Qwen3-14B": "step-qwen3-14b-cc60122",
        "Qwen3-30B-A3B": "step-qwen3-30b-a3b",
    }
    batches = (1, 8, 16, 24, 32, 64, 128, 256)
    rows = [[model, *decode_cells(name, batches), link(name)] for model, name in models.items()]
    return markdown(["model", *map(str, batches), "report of commit"], rows)


def ranks_table() -> str:
    """Decode steps at context 1024 of one, two and four GPUs."""
    models = {
        "Llama-3.1-8B, 1 GPU": "step-llama-3.1-8b-tp1",
        "Llama-3.1-8B, 2 GPUs": "step-llama-3.1-8b-tp2",
        "Llama-3.1-8B, 4 GPUs": "step-llama-3.1-8b-tp4",
        "Llama-3.1-70B, 4 GPUs": "step-llama-3.1-70b-tp4",
        "Qwen3-32B, 4 GPUs": "step-qwen3-32b-tp4",
    }
    rows = [[model, *decode_cells(name, (1, 64, 256)), link(name)] for model, name in models.items()]
    return markdown(["model", "batch 1", "64", "256", "report of commit"], rows)


def decode_cells(name: str, batches: Iterable[int]) -> list[str]:
    """Milliseconds (share of the floor), and the share of time in sums over ranks where there are several."""
    found = {row["batch"]: row for row in load(name)["tables"]["decode"] if row["context"] == TABLE_CONTEXT}
    return [step_cell(found.get(batch)) for batch in batches]


def step_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    sums = f", {row['collectives']:.0%}".replace("%", " %") if row.get("collectives") else ""
    return f"{row['wall_ms']:.2f} ({row['fraction']:.2f}){sums}"


def prefill_table() -> str:
    """Prefill of one prompt without a cached prefix, on one GPU."""
    models = {
        "Qwen3-0.6B": "step-qwen3-0.6b-cc60122",
        "Llama-3.1-8B": "step-llama-3.1-8b-884a771",
        "Llama-3.1-8B, an H100": "h100/step-llama-3.1-8b",
        "Qwen3-14B": "step-qwen3-14b-cc60122",
        "Qwen3-30B-A3B": "step-qwen3-30b-a3b",
    }
    sizes = (128, 512, 2048, 8192)
    rows = []
    for model, name in models.items():
        found = {row["new_tokens"]: row for row in load(name)["tables"]["prefill"] if not row["prefix"]}
        rows.append([model, *(step_cell(found.get(size)) for size in sizes), link(name)])
    return markdown(["model", *(f"{size} tokens" for size in sizes), "report of commit"], rows)


def modes_table() -> str:
    """What each switch is worth, from bench/modes.py."""
    names = {
        "layers": "the default, `--compile-mode layers`",
        "no-overlap": "the same with `--no-overlap`",
        "no-prefill-graphs": "no prefill graphs",
        "off": "`--compile-mode off` (graphs of uncompiled blocks)",
        "no-graphs": "no graphs",
    }
    figures = ("ttft_128_ms", "decode_1_ms", "decode_64_ms")
    prefills = ("prefill_16_ms", "prefill_128_ms", "prefill_600_ms", "prefill_2048_ms")
    rows = [
        [
            names.get(row["mode"], row["mode"]),
            f"{row[figures[0]]:.1f}",
            *(f"{row[figure]:.2f}" for figure in figures[1:]),
            *(f"{row[figure]:.1f}" for figure in prefills),
            f"{row['output_tokens_per_s']:,.0f}",
        ]
        for row in load("modes-llama-3.1-8b")["tables"]["modes"]
    ]
    head = ["mode", "first token of 128", "decode, 1 row", "64 rows", "prefill of 16", "128", "600", "2048"]
    return markdown([*head, "tokens/s"], rows)


def startup_table() -> str:
    """A cold and a warm start, in seconds."""
    models = {
        "Llama-3.1-8B": "startup-llama-3.1-8b",
        "Qwen3-0.6B": "startup-qwen3-0.6b",
        "Qwen3-14B": "startup-qwen3-14b",
        "Llama-3.1-8B, 4 GPUs": "startup-llama-3.1-8b-tp4",
    }
    rows = []
    for model, name in models.items():
        report = load(name)
        stages = {row["stage"]: row["warm_s"] or 0 for row in report["tables"]["stages"]}
        imports = sum(seconds for stage, seconds in stages.items() if stage.startswith("import torch"))
        compiling = sum(seconds for stage, seconds in stages.items() if is_compiling(stage))
        totals = [report["metrics"][f"{kind}_total_s"] for kind in ("cold", "warm")]
        rows.append([model, *(f"{seconds:.1f}" for seconds in (*totals, imports, compiling)), link(name)])
    return markdown(
        ["model", "cold", "warm", "of the warm start: imports", "compiling and graphs", "report of commit"],
        rows,
    )


def is_compiling(stage: str) -> bool:
    """Whether a stage of a start compiles something, imports a compiler or records graphs."""
    return stage != "compile cache" and ("compile" in stage or "record" in stage)


def families_table() -> str:
    """How far logits are from transformers in float32, from bench/families.py."""
    report = load("families")["compiled"]
    rows = [
        [model, *(f"{found['varied'][figure]:.4f}" for figure in ("prefill", "decode", "theirs"))]
        for model, found in report.items()
    ]
    return markdown(
        ["model", "prompt of 300 tokens", "tokens decoded behind it", "transformers in bfloat16"], rows
    )


def family_steps_table() -> str:
    """Decode steps of whole models with random weights, beside what the memory would take."""
    models = ("qwen3.5-35b-a3b", "gpt-oss-20b", "gemma-4-26b-a4b", "gemma-4-31b", "qwen3.5-27b")
    reports = {(model, "H200"): load(f"step-{model}")["tables"]["decode"] for model in models}
    reports |= {(model, "H100"): load(f"h100/step-{model}")["tables"]["decode"] for model in models[:3]}
    rows = [
        [
            model,
            gpu,
            f"{step['batch']}",
            f"{step['wall_ms']:.2f}",
            f"{step['floor_ms']:.2f}",
            f"{step['fraction']:.2f}",
        ]
        for (model, gpu), steps in reports.items()
        for step in steps
    ]
    return markdown(["model", "GPU", "rows", "a step, ms", "its floor, ms", "share"], rows)


def trace_table() -> str:
    """Mooncake's trace over HTTP: Qwen3-14B on one GPU, Qwen3-32B on four."""
    reports = {
        "serve-qwen3-14b-prefix-cache": ("Qwen3-14B, 1 GPU", "on"),
        "serve-qwen3-14b-no-prefix-cache": ("Qwen3-14B, 1 GPU", "off"),
        "serve-qwen3-32b-tp4-prefix-cache": ("Qwen3-32B, 4 GPUs", "on"),
        "serve-qwen3-32b-tp4-prefix-cache-1.6": ("Qwen3-32B, 4 GPUs", "on"),
        "serve-qwen3-32b-tp4-no-prefix-cache": ("Qwen3-32B, 4 GPUs", "off"),
        "serve-qwen3-32b-tp4-no-prefix-cache-1.6": ("Qwen3-32B, 4 GPUs", "off"),
    }
    rows = []
    for name, (model, cache) in reports.items():
        for load_name, metrics in loads_of(name):
            scale = load_name.removeprefix("time_scale=") or str(load(name)["arguments"]["time_scale"])
            rate = f"{metrics['requests_per_s']:.2f}"
            within = f"{metrics['slo_attainment']:.0%}".replace("%", " %")
            rows.append([model, cache, scale, rate, *latency_cells(metrics), within, link(name)])
    head = ["model", "prefix cache", "time scale", "requests/s", "TTFT", "TPOT", "E2E", "within limits"]
    return markdown([*head, "report of commit"], rows)


def mixed_limit_table() -> str:
    """How long steps may be that decode beside prompts."""
    rows = []
    for limit in (2048, 1024, 512):
        name = f"serve-qwen3-14b-mixed-{limit}"
        ((_, metrics),) = loads_of(name)
        pauses = latency_cell(metrics, "itl")
        within = f"{metrics['slo_attainment']:.0%}".replace("%", " %")
        rows.append([str(limit), *latency_cells(metrics), pauses, within, link(name)])
    return markdown(["tokens", "TTFT", "TPOT", "E2E", "ITL", "within limits", "report of commit"], rows)


def chat_table() -> str:
    """Decodes apart from prompts and joined with them, as clients see it."""
    reports = {"apart": "chat-llama-3.1-8b-apart", "joined": "chat-llama-3.1-8b"}
    rows = [
        [load_name.removeprefix("request_rate="), way, *latency_cells(metrics), link(name)]
        for way, name in reports.items()
        for load_name, metrics in loads_of(name)
    ]
    return markdown(["requests/s asked", "decodes", "TTFT", "TPOT", "E2E", "report of commit"], sorted(rows))


def loads_of(name: str) -> list[tuple[str, dict[str, float]]]:
    """The loads of a report of `minisgl bench serve`, each with its metrics."""
    loads: dict[str, dict[str, float]] = {}
    for metric, value in load(name)["metrics"].items():
        load_name, _, figure = metric.rpartition("/")
        loads.setdefault(load_name, {})[figure] = value
    return list(loads.items())


def latency_cells(metrics: Mapping[str, float]) -> list[str]:
    return [
        latency_cell(metrics, "ttft"),
        latency_cell(metrics, "tpot", digits=1),
        latency_cell(metrics, "e2e"),
    ]


def latency_cell(metrics: Mapping[str, float], figure: str, digits: int = 0) -> str:
    """Mean, p50, p90, p99 and max, in milliseconds."""
    kinds = ("mean", "p50", "p90", "p99", "max")
    return " / ".join(f"{metrics[f'{figure}_{kind}_ms']:,.{digits}f}" for kind in kinds)


def joined_table() -> str:
    """Steps with decodes and a prompt, one after the other and in one batch."""
    apart, joined = (
        {(row["batch"], row["new_tokens"]): row["wall_ms"] for row in load(name)["tables"]["mixed"]}
        for name in ("step-llama-3.1-8b-mixed-apart", "step-llama-3.1-8b-mixed")
    )
    rows = []
    for batch in sorted({batch for batch, _ in joined}):
        cells = []
        for size in (128, 448):
            before, after = apart[batch, size], joined[batch, size]
            cells += [f"{before:.1f}", f"{after:.1f} ({after / before:.2f})"]
        rows.append([str(batch), *cells])
    return markdown(["rows that decode", "prompt of 128: apart", "joined", "of 448: apart", "joined"], rows)


def shared_prefix_table() -> str:
    """Bursts of requests with one prefix, before and after admitted requests shared pages in one step."""
    names = ("before", "after")
    report = load("shared-prefix-llama-3.1-8b")
    turns = [[{row["workload"]: row for row in turn} for turn in report[name]["turns"]] for name in names]
    rows = []
    for workload, first in turns[0][0].items():
        computed = [f"{runs[0][workload]['computed_tokens']:,}" for runs in turns]
        times = [
            f"{statistics.median(run[workload]['first_tokens_ms'] for run in runs):.0f}" for runs in turns
        ]
        rows.append([workload, f"{first['prompt_tokens']:,}", *computed, *times])
    commits = [report[name]["commit"] for name in names]
    head = [
        *(f"computed in {commit}" for commit in commits),
        *(f"first tokens in {commit}, ms" for commit in commits),
    ]
    return markdown(["workload", "prompt tokens", *head], rows)


def backends_table() -> str:
    """Whether the attention backends agree, from bench/attention_backends.py."""
    rows = []
    for name, found in load("attention-backends")["backends"].items():
        errors = [f"{found[key]:.1e}" if key in found else "" for key in ("prefill_error", "decode_error")]
        plan_us = found.get("plan_us", {})
        plans = " / ".join(f"{plan_us[size] / 1e3:.2f}" for size in ("4", "64") if size in plan_us)
        counts = [str(found[key]) for key in ("equal", "close", "wrong")]
        rows.append([f"`{name}`", *errors, f"{found['largest_logprob_error']:.3f}", *counts, plans])
    head = ["error, prompts", "error, decode", "log probabilities", "equal", "near ties", "wrong"]
    return markdown(["backend", *head, "planning 4 / 64 rows, ms"], rows)


def kernels_by_gpu_table() -> str:
    """What every kernel takes of each GPU's shared memory, from bench/compile_kernels.py."""
    report = read_report(REPORTS.parent / "cpu" / "kernels-by-gpu.json")
    targets = {str(row["target"]): row for row in report.tables["targets"]}
    taken = {(row["kernel"], row["target"]): row for row in report.tables["kernels"]}
    rows = []
    for kernel in sorted({str(row["kernel"]) for row in report.tables["kernels"]}):
        found = [taken.get((kernel, target)) for target in targets]
        rows.append([f"`{kernel}`", *(kib(row["shared_bytes"]) if row else "–" for row in found)])
    tried = [
        sum(int(row["compiled"] or 0) for row in report.tables["candidates"] if row["target"] == target)
        for target in targets
    ]
    rows.append(["compiled for tuning", *map(str, tried)])
    rows.append(["a program's limit", *(kib(row["shared_bytes"]) for row in targets.values())])
    return markdown(["kernel", *(f"{name}: {row['boards']}" for name, row in targets.items())], rows)


def quality_table() -> str:
    """What quantization costs in quality, from bench/quality.py."""
    rows = []
    for row in read_report(REPORTS.parent / "cpu" / "quality.json").tables["formats"]:
        ours = [f"{float(row[name] or 0):.{digits}f}" for name, digits in (("kl", 4), ("perplexity", 2))]
        ours.append(f"{100 * float(row['same_token'] or 0):.1f} %")
        torch = [row["kl_in_torch"], row["kl_ratio"]]
        rows.append([str(row["format"]), *ours, *("" if one is None else f"{one}" for one in torch)])
    head = [
        "format",
        "KL per token",
        "perplexity",
        "same likeliest token",
        "KL in plain torch",
        "ours / torch",
    ]
    return markdown(head, rows)


def kib(num_bytes: Any) -> str:
    """Whole KiB, rounded up."""
    return str(-(-num_bytes // 1024))


def client_table() -> str:
    """How fast the load client reads, from bench/serve_client.py on a CPU."""
    report = json.loads((REPORTS.parent / "cpu" / "serve-client.json").read_text(encoding="utf-8"))
    rows = [
        [
            f"{row['asked_tokens_per_s']:,.0f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['cpu_share']:.0%}".replace("%", " %"),
            f"{row['tokens_per_read']:.2f}",
            f"{row['itl_p50_ms']:.1f}",
            f"{row['itl_p99_ms']:.1f}",
        ]
        for row in report["tables"]["rates"]
    ]
    return markdown(
        ["asked tokens/s", "taken in", "of a core", "tokens per read", "ITL p50, ms", "p99"], rows
    )


def json_schema_report() -> Mapping[str, Any]:
    return json.loads((REPORTS.parent / "cpu" / "json-schema.json").read_text(encoding="utf-8"))


def json_schema_table() -> str:
    """The JSON-Schema test suite by keyword, from bench/json_schema_suite.py."""
    suites = json_schema_report()["suites"]
    keys = ("taken", "refused", "valid", "valid accepted", "invalid", "invalid accepted", "other orders")
    rows = []
    for suite, found in suites.items():
        files = [row for row in found["files"] if "/" not in row["file"]] if suite == "draft2020-12" else []
        others = [row for row in found["files"] if row not in files]
        optional = {"file": "optional, all files" if files else "all files"}
        optional |= {key: sum(row.get(key, 0) for row in others) for key in keys}
        rows += [
            [f"{suite}: {row['file']}", *(str(row.get(key, 0)) for key in keys)] for row in [*files, optional]
        ]
    head = [
        "schemas taken",
        "refused by name",
        "valid",
        "accepted",
        "invalid",
        "accepted",
        "wrong orders refused",
    ]
    return markdown(["keyword", *head], rows)


def bfcl_table() -> str:
    """BFCL's tool schemas and answers, from the same report."""
    found = json_schema_report()["bfcl"]
    pairs = [
        ("schemas", "schemas", None),
        ("of these taken", "taken", "schemas"),
        ("possible answers", "answers", None),
        ("of these accepted", "answers accepted", "answers"),
        ("answers that their own schema allows", "answers that their schema allows", None),
        ("of these accepted", "answers accepted", "answers that their schema allows"),
    ]
    rows = [
        [name, f"{found[key]:,}", f"{100 * found[key] / found[whole]:.2f} %" if whole else ""]
        for name, key, whole in pairs
    ]
    return markdown(["", "number", "share"], rows)


def kernels_table() -> str:
    """Kernels beside the roofline, flashinfer and torch.compile."""
    rows = []
    for op, shapes in KERNEL_SHAPES.items():
        for shape in shapes:
            found = [
                row
                for name in KERNEL_REPORTS
                for row in load(name)["tables"].get(op, [])
                if row["shape"] == shape
            ]
            others = [
                next((f"{row[peer]:,.1f}" for row in found if row[peer]), "")
                for peer in ("flashinfer_us", "inductor_us")
            ]
            share = f"{found[0]['ours_fraction']:.0%}".replace("%", " %")
            rows.append([f"`{op}`", shape, f"{found[0]['ours_us']:,.1f}", share, *others])
    return markdown(["op", "shape", "µs", "of the roofline", "flashinfer, µs", "torch.compile, µs"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "attention-backends": backends_table,
    "bfcl": bfcl_table,
    "chat": chat_table,
    "client": client_table,
    "decode": decode_table,
    "families": families_table,
    "family-steps": family_steps_table,
    "json-schema": json_schema_table,
    "kernels": kernels_table,
    "kernels-by-gpu": kernels_by_gpu_table,
    "joined": joined_table,
    "mixed-limit": mixed_limit_table,
    "modes": modes_table,
    "offline": offline_table,
    "prefill": prefill_table,
    "quality": quality_table,
    "ranks": ranks_table,
    "shared-prefix": shared_prefix_table,
    "startup": startup_table,
    "trace": trace_table,
}
"""Name in a marker -> what makes the table."""


def with_result_tables(text: str) -> str:
    """The text of one of `PAGES` with every marked table made anew."""
    return MARKED.sub(
        lambda found: f"<!-- table: {found[1]} -->\n\n{TABLES[found[1]]()}\n<!-- end -->\n", text
    )
