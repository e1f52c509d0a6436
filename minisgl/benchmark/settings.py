"""The flags of the commands that measure. Torch-free, so that the command line starts fast."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What `minisgl tune` measures, and where it writes the table."""

    model: str = "llama-3.1-8b"
    """Whose shapes: names of minisgl/benchmark/model_configs.py or folders with config.json, separated by
    commas; "/tp4" behind a name is one of four ranks; "all" is every model that tables are shipped for."""
    ops: str | None = None
    """Tune only these ops, separated by commas. Auto: all ops with a configuration."""
    device: str = "cuda"
    """Either "cuda" or "cpu"; cpu tries the command out in Triton's interpreter and needs --out."""
    gpu: int = 0
    """Index of the GPU."""
    out: str | None = None
    """Folder of the table. Auto: the installed package's own folder, which the engine reads."""
    plot: str | None = None
    """Draw the result to this .png, .svg or .html; needs matplotlib."""
    dry_run: bool = False
    """Print shapes and candidates without measuring; needs no GPU."""
    again: bool = False
    """Measure also the shapes that the table contains. Otherwise a run continues an earlier one."""


@dataclass(frozen=True, kw_only=True)
class KernelBenchSettings:
    """What `minisgl bench kernel` measures."""

    model: str = "llama-3.1-8b"
    """Whose shapes: names of minisgl/benchmark/model_configs.py or folders with config.json, separated by
    commas; "/tp4" behind a name is one of four ranks."""
    device: str = "cuda"
    """Either "cuda" or "cpu"; cpu tries the command out in Triton's interpreter on tiny shapes."""
    kernel: tuple[str, ...] = ()
    """Time a replacement of an op, as op=module:function (docs/kernels.md)."""
    baselines: str = "inductor,flashinfer"
    """Baselines to time, separated by commas: "inductor" (plain torch under torch.compile, which compiles for
    some seconds at every shape) and "flashinfer" (if it is installed); or "none"."""


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Where a command writes its results besides the terminal."""

    out: str | None = None
    """Write the report to this file, as JSON: environment, arguments, metrics, raw samples."""
    plot: str | None = None
    """Draw the report to this .png, .svg or .html; needs matplotlib (minisgl bench plot does it later)."""
    commit: str | None = None
    """The git commit to name in the report. Auto: the commit of the checkout that minisgl runs from, which a
    copy without .git can't tell."""


@dataclass(frozen=True, kw_only=True)
class OfflineBenchSettings:
    """What `minisgl bench offline` runs. The defaults are those of mini-sglang's and nano-vllm's offline
    benchmark, with the same random numbers from the same seed."""

    num_requests: int = 256
    """Number of requests, which all arrive at the start."""
    min_prompt_tokens: int = 100
    """Shortest random prompt."""
    max_prompt_tokens: int = 1024
    """Longest random prompt; lengths in between are equally likely."""
    min_output_tokens: int = 100
    """Shortest output of a random prompt."""
    max_output_tokens: int = 1024
    """Longest output."""
    max_token_id: int = 10000
    """Random prompts consist of token ids from 0 to this."""
    workload_seed: int = 0
    """Seed of lengths, prompts and sampling, so that every run draws the same."""
    prompts: str | None = None
    """A file of real prompts: JSONL with "turns" (the first is used), "prompt" or "messages" in each line, or
    a text with one prompt per line. The model's chat template is applied if there is one. Prompts repeat
    if --num-requests is larger than their number. Outputs have up to --max-output-tokens."""
    ignore_eos: bool | None = None
    """Generate the full length even if the model would end earlier. Auto: on, but off with --prompts."""
    temperature: float = 0.6
    """As in SamplingParams; 0 is greedy."""
    streamed: bool = False
    """Treat outputs as streamed, as in a server: --mixed-step-tokens bounds the pauses between tokens. Off:
    as in LLM.generate."""
    rounds: int = 1
    """Number of runs, each with an empty prefix cache. A sound comparison needs several."""


@dataclass(frozen=True, kw_only=True)
class StepBenchSettings:
    """What `minisgl bench step` measures. Lists are separated by commas. Points that do not fit into the
    engine's context or pool are left out."""

    batches: str | None = None
    """Decode batch sizes. Auto: 1,8,64,256 on cuda, 1,4 on cpu."""
    contexts: str | None = None
    """Context tokens of each decoding row. Auto: 128,1024,4096 on cuda, 32,256 on cpu."""
    prefills: str | None = None
    """New tokens of a prefill step, all of one prompt. Auto: 16,256,1024,4096 on cuda, 16,128 on cpu."""
    prefixes: str | None = None
    """Cached tokens before those of a prefill step. Auto: 0,4096 on cuda, 0,256 on cpu."""
    mixed: str | None = None
    """New prompt tokens of steps that also decode, for each batch and context. Auto: no such steps."""
    steps: int | None = None
    """Steps to time for each decode point; a prefill point gets a third. Auto: 60 on cuda, 9 on cpu."""


@dataclass(frozen=True, kw_only=True)
class StartupBenchSettings:
    """What `minisgl bench startup` measures."""

    rounds: int = 3
    """Number of rounds: a cold and a warm start, each in its own process."""
    cold: bool = True
    """Begin each round with a cold start, whose caches of compiled code are empty."""


@dataclass(frozen=True, kw_only=True)
class SimulateSettings:
    """What `minisgl bench simulate` replays. Engine settings may be lists separated by commas; the command
    compares all combinations. Settings without a value come from the --against run, else from the defaults
    on cuda."""

    step_report: str | None = None
    """Report of minisgl bench step, to which the cost of a step is fitted. Auto: invented costs, which only
    serve to compare policies with each other."""
    against: str | None = None
    """Report of a real run. The command simulates its workload and prints the difference from it. A report of
    minisgl bench offline also provides the engine's settings. A report of minisgl bench serve must have used
    a trace, which is read again from its path (or from --trace); --time-scale selects the point."""
    trace: str | None = None
    """Arrivals from a trace file (Mooncake, Qwen-Bailian, Azure, BurstGPT). Auto: the workload of --against,
    else that of minisgl bench offline."""
    trace_format: str | None = None
    """The trace's format. Auto: detected from its content."""
    num_requests: int | None = None
    """Use only this many requests from the start of the trace."""
    length_scale: str = "1"
    """Multiplies the trace's lengths: a fraction as 1/8."""
    time_scale: float = 1.0
    """Multiplies the trace's arrival times: 0.5 is twice the request rate."""
    num_pages: str | None = None
    """KV pages in the pool (32768)."""
    page_size: str | None = None
    """Tokens per page (16)."""
    max_running_requests: str | None = None
    """Requests that decode together (256)."""
    max_step_tokens: str | None = None
    """New tokens per step (8192)."""
    chunk_tokens: str | None = None
    """Longest part of one prompt per step (max_step_tokens)."""
    mixed_step_tokens: str | None = None
    """New tokens in a step that also decodes a streamed request (2048)."""
    output_reserve_tokens: str | None = None
    """Room an admission leaves for the output of each running request (64)."""
    prefix_cache: str | None = None
    """Reuse equal prefixes: on, off, or both as "on,off" (on)."""
    join_decodes: str | None = None
    """Run decodes together with a step's prompts where that is faster: on, off or both (on)."""
    overlap: str | None = None
    """Plan a step while the one before it runs: on, off or both (on)."""
    streamed: str | None = None
    """Treat outputs as streamed, as in a server: on, off or both. Auto: on for a trace, else off."""


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """How `minisgl bench compare` judges."""

    threshold: str = "5%"
    """If a metric is worse by more than this, and significantly, the exit code is 1."""
    confidence: float = 0.95
    """Confidence level of the intervals."""
    resamples: int = 2000
    """Bootstrap resamples per metric."""
    metrics: str | None = None
    """Compare only these metrics, separated by commas. None: all metrics with raw samples in both reports."""
    seed: int = 0
    """Seed of the bootstrap."""


@dataclass(frozen=True, kw_only=True)
class ServeBenchSettings:
    """What `minisgl bench serve` sends to a server, and how."""

    url: str = "http://127.0.0.1:8000"
    """URL of an OpenAI-compatible server, without a path."""
    api: str = "completions"
    """The endpoint: "completions" or "chat"."""
    served_model_name: str | None = None
    """The model's name on the server. Auto: the first in /v1/models."""
    api_key: str | None = None
    """Sent as the bearer token; the report does not contain it."""
    dataset: str = "random"
    """The requests: "random", "shared-prefix" or "multi-turn" (synthetic), or a file: a trace (Mooncake,
    Qwen-Bailian, Azure, BurstGPT), ShareGPT's JSON, MT-bench's JSON lines. The content tells the format."""
    num_requests: int | None = None
    """Number of requests; a conversation counts as one. Auto: 256 synthetic ones, all of a file."""
    min_prompt_tokens: int = 100
    """Shortest synthetic prompt, or turn of a conversation."""
    max_prompt_tokens: int = 1024
    """Longest prompt or turn; lengths in between are equally likely."""
    min_output_tokens: int = 100
    """Shortest answer, for datasets without recorded lengths."""
    max_output_tokens: int = 1024
    """Longest answer; lengths in between are equally likely."""
    prefix_groups: int = 8
    """For shared-prefix: number of different prefixes."""
    prefix_tokens: int = 512
    """For shared-prefix: length of the prefix that a group's prompts share."""
    turns: int | None = None
    """Turns of a conversation. Auto: 3 for multi-turn, all of a file's."""
    think_time_s: float = 0.0
    """Seconds between an answer and the next turn of its conversation."""
    prompt_form: str | None = None
    """Either "tokens" (token ids, so that lengths are exact) or "text". Auto: tokens for synthetic prompts
    of one turn with the completions API, otherwise text."""
    vocab_size: int = 30000
    """Token ids of synthetic prompts are below this; it must not exceed the model's vocabulary size."""
    tokenizer: str | None = None
    """A model folder or built-in model. Its tokenizer counts the tokens of a ShareGPT file's answers, and
    new answers get the same lengths. Auto: lengths are random."""
    length_scale: str = "1"
    """Multiplies a trace's lengths by a fraction such as 1/8. Shared prefixes stay shared."""
    time_scale: str = "1"
    """Multiplies a trace's arrival times: 0.5 is twice the request rate. Several values, separated by commas,
    run one after the other."""
    arrival: str | None = None
    """When requests are sent: "poisson" or "constant" at --request-rate, "trace" as recorded, "closed" with
    --concurrency. Auto: chosen by the other flags, else poisson."""
    request_rate: str | None = None
    """Requests per second, independent of the answers; inf: all at once. Several values, separated by commas,
    run one after the other. Auto: inf."""
    concurrency: str | None = None
    """Closed loop: number of open requests; each answer triggers the next request. Several values, separated
    by commas, run one after the other."""
    warmup: int = 4
    """Number of warm-up requests, which are sent at once and have other prompts."""
    ignore_eos: bool = True
    """Ask the server to ignore end-of-sequence, so that answers have exact lengths (most engines can)."""
    temperature: float = 0.0
    """Temperature of every request; 0 is greedy."""
    tokens_from: str = "usage"
    """The source of token counts. "usage": the server's usage; a server without it is refused. "asked": the
    synthetic prompt tokens and the requested output tokens, for which --ignore-eos must be on."""
    extra_body: str | None = None
    """A JSON object with further fields for every request."""
    slo: str | None = None
    """Goodput counts the requests within these limits in milliseconds: "ttft:500,tpot:50" (ttft, tpot,
    e2e, stall)."""
    timeout_s: float = 1800.0
    """The client cancels a request after this long without data, and counts it as client_timeout."""
    workload_seed: int = 0
    """Seed of lengths and arrivals."""
    prompt_seed: int | None = None
    """Seed of the tokens of synthetic prompts. Auto: a new seed for every run, so that the server's prefix
    cache has no prompt from an earlier run; the report contains it."""
