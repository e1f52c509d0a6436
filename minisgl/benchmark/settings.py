"""The flags of the commands that measure; torch-free, so that the command line can be built from them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What `minisgl tune` measures and where the table goes."""

    model: str = "llama-3.1-8b"
    """Whose shapes: names of minisgl/benchmark/model_configs.py or folders with config.json, separated by
    commas; "/tp4" behind a name is one of four ranks; "all" is every model that tables are shipped for."""
    ops: str | None = None
    """Only these ops, separated by commas. Auto: all that have a configuration."""
    device: str = "cuda"
    """Either "cuda" or "cpu"; cpu tries the command out in Triton's interpreter and needs --out."""
    gpu: int = 0
    """Which GPU, by index."""
    out: str | None = None
    """Folder of the table. Auto: the installed package's own, where lookups find it."""
    plot: str | None = None
    """Draw the result to this .png, .svg or .html; needs matplotlib."""
    dry_run: bool = False
    """Show shapes and candidates, measure nothing; needs no GPU."""
    again: bool = False
    """Measure shapes that the table already has (otherwise a run goes on where an earlier one ended)."""


@dataclass(frozen=True, kw_only=True)
class KernelBenchSettings:
    """What `minisgl bench kernel` measures."""

    model: str = "llama-3.1-8b"
    """Whose shapes: names of minisgl/benchmark/model_configs.py or folders with config.json, separated by
    commas; "/tp4" behind a name is one of four ranks."""
    device: str = "cuda"
    """Either "cuda" or "cpu"; cpu tries the command out in Triton's interpreter on tiny shapes."""
    kernel: tuple[str, ...] = ()
    """Time op=module:function in the op's place (docs/kernels.md)."""
    baselines: str = "inductor,flashinfer"
    """What to time beside ours, separated by commas: "inductor" (plain torch under torch.compile, which
    compiles for some seconds at every shape) and "flashinfer" (where it is installed); "none"."""


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Where a measurement goes besides the terminal."""

    out: str | None = None
    """Write the report to this file, as JSON: environment, arguments, figures, raw samples."""
    plot: str | None = None
    """Draw the report to this .png, .svg or .html; needs matplotlib (minisgl bench plot does it later)."""
    commit: str | None = None
    """The git commit that is measured, for the report. Auto: that of the checkout minisgl runs from; a copy
    without .git has none to find."""


@dataclass(frozen=True, kw_only=True)
class OfflineBenchSettings:
    """What `minisgl bench offline` runs. The defaults are mini-sglang's and nano-vllm's offline benchmark,
    the same numbers from the same seed."""

    num_requests: int = 256
    """Requests, all there at the start."""
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
    """Seeds lengths and prompts (--seed is the engine's, for sampling and dummy weights)."""
    prompts: str | None = None
    """Real prompts instead: a JSONL file with "turns" (the first is taken), "prompt" or "messages" in each
    line, or a text file with one prompt per line. They go through the chat template if the model has one,
    again from the start if --num-requests asks for more, and get up to --max-output-tokens."""
    ignore_eos: bool | None = None
    """Go on to the wanted length where the model would end. Auto: on, but off with --prompts."""
    temperature: float = 0.6
    """As in SamplingParams; 0 is greedy."""
    streamed: bool = False
    """As if somebody read the tokens as they come: --mixed-step-tokens bounds the pauses between them, as in
    a server. Without, as in LLM.generate."""
    rounds: int = 1
    """How often the workload runs, each time with an empty prefix cache. Several make a comparison sound."""


@dataclass(frozen=True, kw_only=True)
class StepBenchSettings:
    """What `minisgl bench step` measures. Lists are separated by commas; points that do not fit the engine's
    context or pool are left out."""

    batches: str | None = None
    """Decode batch sizes. Auto: 1,8,64,256 on cuda, 1,4 on cpu."""
    contexts: str | None = None
    """Tokens that each decoding row has. Auto: 128,1024,4096 on cuda, 32,256 on cpu."""
    prefills: str | None = None
    """New tokens of a prefill step, all of one prompt. Auto: 16,256,1024,4096 on cuda, 16,128 on cpu."""
    prefixes: str | None = None
    """Tokens that are there before those of a prefill step. Auto: 0,4096 on cuda, 0,256 on cpu."""
    mixed: str | None = None
    """New tokens of a prompt that steps feed beside the decodes of each batch and context. Auto: none."""
    steps: int | None = None
    """Steps timed for each decode point; prefill gets a third of them. Auto: 60 on cuda, 9 on cpu."""


@dataclass(frozen=True, kw_only=True)
class StartupBenchSettings:
    """What `minisgl bench startup` measures."""

    rounds: int = 3
    """Pairs of a cold and a warm start, each in a process of its own."""
    cold: bool = True
    """Begin each round with empty caches of compiled code."""


@dataclass(frozen=True, kw_only=True)
class SimulateSettings:
    """What `minisgl bench simulate` replays. Settings of the engine may be lists separated by commas: all
    combinations are compared; without a value they are those of the --against run, else as on cuda."""

    step_report: str | None = None
    """Report of minisgl bench step to fit the cost of a step to. Without one costs are made up: for comparing
    policies with each other only."""
    against: str | None = None
    """Report of a real run: prints how far the simulation is from it, and takes over its workload. Of minisgl
    bench offline, whose settings of the engine are taken over too; or of minisgl bench serve with a trace,
    which is read again from where it was (or from --trace), at the --time-scale that is to be compared."""
    trace: str | None = None
    """Arrivals from a trace file (Mooncake, Qwen-Bailian, Azure, BurstGPT). Auto: the workload of --against;
    without one that of minisgl bench offline."""
    trace_format: str | None = None
    """The trace's format. Auto: by its content."""
    num_requests: int | None = None
    """Only the first so many requests of the trace."""
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
    """Reuse of equal prefixes: on, off, or both as "on,off" (on)."""
    join_decodes: str | None = None
    """Decodes go through the model with a step's prompts where that is faster: on, off or both (on)."""
    overlap: str | None = None
    """Plan a step while the one before it runs: on, off or both (on)."""
    streamed: str | None = None
    """Requests are read as they come, as a server's: on, off or both. Auto: on for a trace, else off."""


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """How `minisgl bench compare` judges."""

    threshold: str = "5%"
    """A metric that is worse by more than this, and significantly so, makes the exit code 1."""
    confidence: float = 0.95
    """Of the intervals."""
    resamples: int = 2000
    """Bootstrap resamples per metric."""
    metrics: str | None = None
    """Only these metrics, separated by commas. None: all with raw samples in both reports."""
    seed: int = 0
    """Of the bootstrap."""


@dataclass(frozen=True, kw_only=True)
class ServeBenchSettings:
    """What `minisgl bench serve` sends to a server, and how."""

    url: str = "http://127.0.0.1:8000"
    """Of an OpenAI-compatible server, without a path."""
    api: str = "completions"
    """Either "completions" or "chat": which of the two endpoints."""
    served_model_name: str | None = None
    """The model's name on the server. Auto: the first in /v1/models."""
    api_key: str | None = None
    """Sent as the bearer token; kept out of the report."""
    dataset: str = "random"
    """What is asked: "random", "shared-prefix" or "multi-turn" (made up), or a file: a trace (Mooncake,
    Qwen-Bailian, Azure, BurstGPT), ShareGPT's JSON, MT-bench's JSON lines; recognised by its content."""
    num_requests: int | None = None
    """How many; conversations count as one. Auto: 256 made up, all of a file."""
    min_prompt_tokens: int = 100
    """Shortest made-up prompt, or turn of a conversation."""
    max_prompt_tokens: int = 1024
    """Longest; lengths in between are equally likely."""
    min_output_tokens: int = 100
    """Shortest answer, where the dataset does not say."""
    max_output_tokens: int = 1024
    """Longest answer; lengths in between are equally likely."""
    prefix_groups: int = 8
    """For shared-prefix: how many different prefixes there are."""
    prefix_tokens: int = 512
    """For shared-prefix: what a group's prompts begin with, before their own part."""
    turns: int | None = None
    """Turns of a conversation. Auto: 3 for multi-turn, all of a file's."""
    think_time_s: float = 0.0
    """Between an answer and the next turn of its conversation."""
    prompt_form: str | None = None
    """Either "tokens" (token ids, so that lengths are exact) or "text". Auto: tokens for made-up prompts of
    one turn with the completions API, otherwise text."""
    vocab_size: int = 30000
    """Token ids of made-up prompts are below this, which must not be above the model's own."""
    tokenizer: str | None = None
    """A model folder or built-in model whose tokenizer counts the recorded answers of a ShareGPT file, so
    that the new ones get as long. Auto: lengths are drawn."""
    length_scale: str = "1"
    """Multiplies a trace's lengths: a fraction as 1/8. Its blocks shrink with it, shared prefixes stay."""
    time_scale: str = "1"
    """Multiplies a trace's arrival times: 0.5 is twice the request rate. Several values separated by commas
    are run one after the other."""
    arrival: str | None = None
    """When requests are sent: "poisson" or "constant" at --request-rate, "trace" as recorded, "closed" with
    --concurrency. Auto: what the other flags fit, poisson otherwise."""
    request_rate: str | None = None
    """Requests per second, whether or not answers come; inf: all at once. Several values separated by commas
    are run one after the other. Auto: inf."""
    concurrency: str | None = None
    """Closed loop: so many requests are open, each answer brings the next request. Several values separated
    by commas are run one after the other."""
    warmup: int = 4
    """Requests before the measured ones, all at once, with prompts of their own."""
    ignore_eos: bool = True
    """Ask for exactly as many tokens as wanted (an extension that most engines have)."""
    temperature: float = 0.0
    """Of every request; 0 is greedy."""
    tokens_from: str = "usage"
    """Where counts come from: "usage", and a server that sends none is refused; or "asked", and its answers
    count as the tokens asked for, which --ignore-eos must make true, its prompts as the tokens made up."""
    extra_body: str | None = None
    """A JSON object: more fields for every request."""
    slo: str | None = None
    """Goodput counts the requests within these limits in milliseconds: "ttft:500,tpot:50" (ttft, tpot, e2e,
    stall)."""
    timeout_s: float = 1800.0
    """A request is given up when nothing came for so long; counted as client_timeout."""
    workload_seed: int = 0
    """Seeds lengths and arrivals."""
    prompt_seed: int | None = None
    """Seeds the tokens of made-up prompts. Auto: another one each time, so that no prompt is in the server's
    prefix cache from an earlier run; the report has it."""
