"""The engine's settings, as given and as resolved, and what the engine's machine offers."""

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs. `None` means "auto", which `resolve_engine_config` decides."""

    model: str = "smollm2-135m"
    """What to serve: a built-in name (`minisgl pull --list`), a local folder, a GGUF file, or a hub name:
    org/name on the Hugging Face hub, modelscope:org/name on ModelScope."""
    revision: str | None = None
    """Branch, tag or commit of a hub name. Auto: the main branch."""
    tokenizer: str | None = None
    """A folder or hub name whose tokenizer and chat template replace the model's own; a GGUF file may need
    it. Auto: the model's."""
    dummy_weights: bool = False
    """Use random weights N(0, 0.02) instead of the checkpoint's, for benchmarks; needs only config.json."""
    quantization: str | None = None
    """Quantize the weights of an unquantized checkpoint while they load: "fp8" (a scale for each output
    feature and for each row of activations), "fp8-block" (for 128 x 128 weights, and for 128 activations) or
    "int4" (4-bit weights with a scale for 128 inputs, or 64 or 32 where widths need it; activations stay).
    Head and embedding stay as they are. Auto: the weights are used as the checkpoint has them."""
    device: str | None = None
    """Either "cuda" or "cpu". Auto: cuda if the machine has a CUDA GPU, else cpu."""
    dtype: str | None = None
    """One of "bfloat16", "float16", "float32". Auto: the checkpoint's on cuda; on cpu bfloat16 if the
    processor has instructions for it (half the time per token), else float32."""
    kv_dtype: str | None = None
    """Store keys and values as "fp8" (e4m3): half of bfloat16's memory, so twice the tokens fit. The scales
    are the checkpoint's, or 1 if it has none. On cuda from compute capability 8.9 on. Auto: as dtype."""
    max_context_tokens: int | None = None
    """Longest prompt + output of a request, in tokens. Auto: the model's own limit."""
    max_running_requests: int | None = None
    """Requests that decode together (rows of the device tables). Auto: 256 on cuda, or 64
    for models with linear attention, whose states take 60 to 150 MB each; 32 on cpu."""
    max_step_tokens: int | None = None
    """Most new tokens of one step, prompt chunks and decodes together. Auto: 8192 on cuda, 512 on cpu."""
    chunk_tokens: int | None = None
    """Most tokens of one prompt in one step. Auto: max_step_tokens. Smaller values make decoding smoother."""
    mixed_step_tokens: int | None = None
    """Most new tokens of a step that also decodes a streamed request; it bounds the pause between two of its
    tokens. Prompts get the tokens that the decodes leave, and at least half of this limit. A server's
    requests and those of LLM.stream count as streamed; beside others (LLM.generate, chat) prompts may fill
    the step. Auto: on cuda 1024, or 2048 without join_decodes, where each such step reads the weights twice;
    128 on cpu (at most max_step_tokens)."""
    page_size: int = 16
    """Tokens per KV page, a power of two from 1 to 256."""
    num_pages: int | None = None
    """KV pages in the pool. Auto: as many as fit in memory_fraction of the device's memory."""
    keep_window_pages: bool = False
    """Layers with a sliding window keep the pages of all tokens, as other layers do, instead of giving them
    back as the window moves on. Always so with flashinfer's and TensorRT-LLM's attention, and with
    kv_events_endpoint."""
    state_cache_memory: float | None = None
    """GiB for snapshots of the states of linear attention, from which prefix hits go on; 0 = no hits. Only
    for models that have such layers (Qwen3.5). Auto: 30 % of what is free for the KV pool, and at most
    eight snapshots for each of max_running_requests."""
    join_decodes: bool = True
    """Run decodes and prompts of a step as one batch, if times measured at start-up show that this is faster
    than one after the other. Only if both have CUDA graphs, with the attention backend triton."""
    output_reserve_tokens: int = 64
    """Tokens that an admission reserves for the output of each running request. When outputs are longer and
    the pool is full, the youngest request is preempted and computed again later."""
    memory_fraction: float = 0.9
    """Share of the device's free memory that the engine may use, 0.1 to 0.98. On cpu an auto-sized pool
    stays under 1 GiB."""
    prefix_cache: bool = True
    """Keep the K/V of finished requests in a radix tree and reuse them for equal prefixes."""
    overlap: bool | None = None
    """Plan and launch step k+1 before reading the result of step k. Auto: True on cuda, False on cpu, where
    nothing can overlap."""
    compile_mode: str | None = None
    """The part of the decode step that torch.compile compiles: "layers" (one block, shared by all layers),
    "full" (the whole step, mode="reduce-overhead"; starts far slower) or "off". Auto: layers on cuda; if
    compiling fails, the engine warns and runs without it."""
    compile_on_cpu: bool = True
    """On a CPU, compile the decode steps of common models in the background, after the first few hundred of
    them, and use that code from then on, or from the next start. Needs g++; not with --tp. Also, soon
    after a start, keep float32 weights as float16 where that loses nothing but elements close to zero; with
    --tp, too. Neither is done with --kernel."""
    max_graph_batch: int | None = None
    """Largest decode batch with a recorded CUDA graph; larger ones run uncaptured; 0 = no graphs. Auto:
    max_running_requests on cuda, unless torch is decode's attention backend, else 0."""
    max_graph_tokens: int | None = None
    """Most prompt tokens of a step with a recorded CUDA graph. Steps with more run uncaptured, and so do
    steps whose GPU time far exceeds their launch time. 0 = no such graphs. Auto: 0 if decode has no graphs,
    else a limit by the model's size (8192 for Qwen3-0.6B, 1024 for Llama-3.1-8B), at most max_step_tokens."""
    attention_backend: str | None = None
    """One of "triton", "flashinfer" (fa3 for prompts on Hopper GPUs, else fa2), "flashinfer-fa2",
    "flashinfer-fa3", "trtllm" (Blackwell GPUs) and "torch" (the plain reference, also for CPUs), or two as
    prefill,decode: "triton,flashinfer". Auto: on cuda the first of these that can run; on cpu torch."""
    seed: int | None = None
    """Base seed of requests without a seed: after every start, the same requests in the same order get the
    same random numbers from each server process. Auto: a fresh seed at every start."""
    strict_compile: bool = False
    """Make a recompilation or a missing graph after warm-up an error instead of a counter."""
    compile_cache: str | None = None
    """Folder that keeps compiled code between starts. Auto: "compiled" in the cache directory. Torch
    and Triton use their own folders instead if this is an empty text, if TORCHINDUCTOR_CACHE_DIR or
    TRITON_CACHE_DIR is set, or with --kernel."""
    kv_events_endpoint: str | None = None
    """ZMQ address where the engine publishes which prefixes are cached, in vLLM's schema, for routers:
    tcp://*:5557 or ipc://path. An address without wildcard is connected to. The events hold the prompts'
    token ids, so use a trusted network (docs/scaling.md). Auto: no events."""
    kv_events_replay_endpoint: str | None = None
    """ZMQ address where routers ask for events that they missed, for example tcp://*:5558. Auto: none."""
    kv_events_topic: str = ""
    """Topic of the events."""
    kv_events_buffer_steps: int = 10_000
    """Batches of events (at most one a step) that are kept for replay, at most 256 MiB; also the most that
    wait for a slow router."""
    profile_dir: str | None = None
    """Folder for the torch profiler traces that POST /debug/profile starts. Auto: no traces."""
    tp: int = 1
    """Ranks that share each layer of the model (tensor parallelism). Each rank is a process, with its own GPU
    on cuda or a share of the threads on cpu. Must divide the model's attention heads and MLP width."""
    cpu_threads: int | None = None
    """Torch's threads on cpu, of each rank. Auto: torch's default (the physical cores), shared out."""
    kernel: tuple[str, ...] = ()
    """Replace an op for an experiment: op=module:function, for example rms_norm=my_module:my_norm; the
    module may lie in the current directory (docs/kernels.md)."""


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """An `EngineConfig` with every "auto" decided; `None` now means "none". It has the docstrings."""

    model: str
    revision: str | None
    tokenizer: str | None
    dummy_weights: bool
    quantization: str | None
    device: str
    dtype: str
    kv_dtype: str | None
    """None = dtype."""
    max_context_tokens: int
    max_running_requests: int
    max_step_tokens: int
    chunk_tokens: int
    mixed_step_tokens: int
    page_size: int
    num_pages: int | None
    """None = as many as fit, found by a memory profile."""
    keep_window_pages: bool
    state_cache_memory: float | None
    """GiB; None = a share of what a memory profile finds."""
    join_decodes: bool
    output_reserve_tokens: int
    memory_fraction: float
    prefix_cache: bool
    overlap: bool
    compile_mode: str
    compile_on_cpu: bool
    max_graph_batch: int
    max_graph_tokens: int
    attention_backend: str
    seed: int | None
    """None = each maker of requests (server process, `LLM`) draws a fresh one."""
    strict_compile: bool
    compile_cache: str | None
    kv_events_endpoint: str | None
    kv_events_replay_endpoint: str | None
    kv_events_topic: str
    kv_events_buffer_steps: int
    profile_dir: str | None
    tp: int
    cpu_threads: int | None
    kernel: tuple[str, ...]
    must_compile: bool
    """A failed compilation ends the start, because the user asked for compiling."""
    ranks_per_host: int
    """Ranks of --tp on each host; torchrun may spread them over several."""


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Facts about the engine's machine. The engine finds them, so that resolving stays a pure function."""

    has_cuda: bool
    cuda_name: str = ""
    num_gpus: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    """The GPU's compute capability, for example (9, 0); (0, 0) = no GPU, or unknown."""
    flashinfer: str = ""
    """Version of the installed flashinfer-python; empty = not installed."""
    cpu_has_bf16: bool = False
    """The processor has bfloat16 instructions (AVX512-BF16 or AMX)."""


def with_cache_dir(config: EngineConfig, cache_dir: Path) -> EngineConfig:
    """The same config with an "auto" compile cache put into minisgl's cache directory."""
    if config.compile_cache is not None:
        return config
    return replace(config, compile_cache=str(cache_dir / "compiled"))
