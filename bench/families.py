"""Is every family right on this GPU? Real shapes cut to a few layers, random weights, against transformers.

    python bench/families.py --out families.json               # all, 2 layers each
    python bench/families.py qwen3-30b-a3b gemma-3-1b --compile
    python bench/families.py --small                           # tiny ones in float32, on a CPU

For each model: logits of a prompt fed whole, then of tokens decoded one by one through a CUDA graph, against
transformers in float32 on the same bfloat16 weights; transformers' own bfloat16 error beside it. Then the
same prompt through the `torch` attention backend. Bar: a relative error under 2e-2, or under transformers'
own in bfloat16, where many layers add their roundings. All of it twice, with the
weights of --dummy-weights (matrices N(0, 0.02), norms 1, biases 0) and with norms and biases that vary, where
one in another's place would show. Gemma 4 does not divide the scores of attention: its norms of queries are
weighted as if it did, because scores of random weights would else choose one key, by a rounding.

With experts, a rounding may decide which of them a token gets, in transformers as in ours, and other experts
are another result. So this is checked in two parts. transformers gets the experts that ours chose, in both
its runs: the errors are of the arithmetic alone. And the choice itself must be float32's up to a rounding:
`regret` is how far below the last that float32 would choose an expert lies that was chosen, in standard
deviations of the token's router logits. Bar: under 0.1 for any token. The largest of many is mostly chance,
so else: on average under that of what transformers itself chooses in bfloat16, and the largest under twice
theirs. Exit code 1 where a bar is missed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from minisgl.attention.backends import select
from minisgl.attention.interface import AttentionInputs
from minisgl.benchmark.model_configs import MODEL_CONFIGS
from minisgl.engine.graphs.decode_graphs import compiled_block
from minisgl.layers.moe import MoeMLP
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.decoder import Decoder, RunBlock, call_block
from minisgl.models.registry import build_model
from minisgl.weights.dummy import STANDARD_DEVIATION
from minisgl.weights.fitting import FUSED
from triton_kernels.moe_route import top_k_reference
from triton_kernels.registry import KERNELS

FULL, WINDOW = "full_attention", "sliding_attention"
E2B = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "use_double_wide_mlp": True,
}
"""Of Gemma 4; it was not compared with the model's own file."""
SHAPES: dict[str, dict[str, Any]] = MODEL_CONFIGS | {"gemma-4-e2b": MODEL_CONFIGS["gemma-4-31b"] | E2B}
CASES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {},
    "mistral-7b": {"sliding_window": 100},
    "qwen2.5-7b": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "qwen3-14b": {},
    "qwen3-30b-a3b": {},
    "mixtral-8x7b": {},
    "phi-3-mini-4k": {
        "sliding_window": 100,
        "original_max_position_embeddings": 256,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [1.0 + 0.5 * i for i in range(48)],
        },
    },
    "gemma-3-1b": {"layer_types": [WINDOW, FULL], "sliding_window": 100},
    "glm-4.5-air": {},
    "gpt-oss-20b": {"quantization_config": None, "layer_types": [WINDOW, FULL], "sliding_window": 100},
    "gemma-4-26b-a4b": {"layer_types": [WINDOW, FULL], "sliding_window": 100},
    "gemma-4-31b": {"layer_types": [WINDOW, FULL], "sliding_window": 100},
    "gemma-4-e2b": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": [WINDOW, FULL, WINDOW, FULL],
        "sliding_window": 100,
    },
    "qwen3.5-9b": {"model_type": "qwen3_5_text", "num_hidden_layers": 4},
    "qwen3.5-35b-a3b": {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 4},
}
"""What of each model's config is changed, so that a short prompt meets all it has."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 199,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 199,
    "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""With --small, sizes in place of a model's own."""
WEIGHTS = ("dummy", "varied")
PAGE_SIZE = 16
PROMPT_TOKENS = 300
DECODED_TOKENS = 32
BAR = 2e-2
REGRET_BAR = 0.1


class Errors(NamedTuple):
    """Relative, by norm over all tokens; regrets apart."""

    prefill: float
    decode: float
    torch_backend: float
    """Of the prompt's logits from what they are by the other backend."""
    theirs: float
    regret: float
    """The largest of a token in a layer."""
    mean_regret: float
    their_regret: float
    """Of transformers in bfloat16."""
    their_mean_regret: float

    def good(self) -> bool:
        """Whether every bar is kept."""
        ours = max(self.prefill, self.decode, self.torch_backend)
        like_theirs = self.mean_regret < self.their_mean_regret and self.regret < 2 * self.their_regret
        return ours < max(BAR, self.theirs) and (self.regret < REGRET_BAR or like_theirs)


def relative_error(got: Tensor, reference: Tensor) -> float:
    return float((got.double() - reference.double()).norm() / reference.double().norm())


@torch.inference_mode()
def check(
    raw: dict[str, Any], device: torch.device, dtype: torch.dtype, backend: str, *, compiled: bool
) -> dict[str, Errors]:
    """Build both, give them the same weights of each kind, compare; by kind."""
    torch.compiler.reset()  # a process compiles few models' blocks before torch refuses
    with tempfile.TemporaryDirectory() as name:
        Path(name, "config.json").write_text(json.dumps(raw))
        config = read_model_config(Path(name))
        ours = build_model(config, attention_backend=backend, dtype=dtype, device=device)
        theirs_config = AutoConfig.from_pretrained(name)
    with device:
        theirs = AutoModelForCausalLM.from_config(theirs_config, dtype=dtype).eval()
    total = PROMPT_TOKENS + DECODED_TOKENS
    generator = torch.Generator(device).manual_seed(0)
    token_ids = torch.randint(
        0, config.vocab_size, (total,), generator=generator, device=device, dtype=torch.int32
    )
    ours.allocate_kv(-(-total // PAGE_SIZE) + 1, PAGE_SIZE, dtype, device)
    ours.allocate_states(1, 0, dtype, device)
    run_block = compiled_block(max_batch=2) if compiled else call_block
    errors = {}
    for kind in WEIGHTS:
        for parameter in theirs.parameters():  # not the buffers: RoPE's frequencies stay in float32
            parameter.data = parameter.data.to(dtype)
        fill_weights(theirs, kind, generator, norm_weights_minus_one=config.norm_weights_minus_one)
        copy_weights(theirs, ours)
        errors[kind] = compare(ours, theirs, token_ids, run_block, backend)
    return errors


def fill_weights(
    theirs: nn.Module, kind: str, generator: torch.Generator, *, norm_weights_minus_one: bool
) -> None:
    """Matrices get N(0, 0.02). Norms and biases are as in minisgl/weights/dummy.py, or vary."""
    gemma_4 = type(theirs).__name__.startswith("Gemma4")
    for name, buffer in theirs.named_buffers():
        if kind == "varied" and name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.1, generator=generator)
        if kind == "varied" and name.endswith("layer_scalar"):
            buffer.uniform_(0.7, 1.3, generator=generator)
    for name, parameter in theirs.named_parameters():
        is_norm = "norm" in name or name.endswith(("router.scale", "per_expert_scale"))
        if kind == "varied" and is_norm:
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif kind == "varied" or parameter.dim() > 1:
            parameter.normal_(0.0, STANDARD_DEVIATION, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        if is_norm and gemma_4 and name.endswith("q_norm.weight"):
            parameter.mul_(parameter.shape[0] ** -0.5)
        if is_norm and norm_weights_minus_one and not name.endswith("linear_attn.norm.weight"):
            parameter.sub_(1.0)


def compare(
    ours: Decoder,
    theirs: nn.Module,
    token_ids: Tensor,
    run_block: RunBlock,
    backend: str,
) -> Errors:
    """Of two models with the same weights; `theirs` is in float32 afterwards."""
    prompt = token_ids[:PROMPT_TOKENS]
    with noted_routes(ours) as routes:
        prefill = prefill_logits(ours, prompt)
        decode = decode_logits(ours, token_ids, run_block, routes)
    set_attention(ours, "torch")
    with noted_routes(ours) as other_routes:
        other = prefill_logits(ours, prompt)
    set_attention(ours, backend)
    chosen, chosen_by_other = all_steps(routes), all_steps(other_routes)
    with imposed_routes(theirs, ours, chosen):
        bf16 = theirs(token_ids[None]).logits[0]
    with noted_choices(theirs) as their_choices:
        theirs(token_ids[None])
    theirs.float()
    with imposed_routes(theirs, ours, their_choices) as their_regret:
        theirs(token_ids[None])
    with imposed_routes(theirs, ours, chosen) as regret:
        exact = theirs(token_ids[None]).logits[0]
    with imposed_routes(theirs, ours, chosen_by_other):
        other_exact = theirs(prompt[None]).logits[0]
    other_routes_apart = other_exact - exact[:PROMPT_TOKENS]  # zero without experts
    return Errors(
        relative_error(prefill, exact[:PROMPT_TOKENS]),
        relative_error(decode, exact[PROMPT_TOKENS:]),
        relative_error(prefill + other_routes_apart, other),
        relative_error(bf16, exact),
        *largest_and_mean(regret),
        *largest_and_mean(their_regret),
    )


def largest_and_mean(regrets: list[Tensor]) -> tuple[float, float]:
    """Of all layers' tokens; 0 without experts."""
    if not regrets:
        return 0.0, 0.0
    together = torch.cat(regrets)
    return float(together.max()), float(together.mean())


def set_attention(ours: Decoder, backend: str) -> None:
    for attention in ours.attention_layers():
        attention.attend = select(backend)


class Routes:
    """Which experts of a layer the tokens go to."""

    def __init__(self, top_k: int, device: torch.device) -> None:
        self.steps: list[Tensor] = []  # int64 [T, k] each, rows without a slot left out
        self.decoded = torch.zeros((1, top_k), dtype=torch.int64, device=device)
        """Of the first row of the last step in a CUDA graph, which can write to one place only."""


@contextmanager
def noted_routes(ours: Decoder) -> Iterator[list[Routes]]:
    """For each layer with experts, where its tokens go meanwhile."""
    mixtures: list[Any] = [mixture.experts for mixture in ours.expert_layers()]
    device = ours.embed_tokens.weight.device
    routes = [Routes(mixture.config.experts_per_token, device) for mixture in ours.expert_layers()]

    def noting(of_layer: Routes) -> Callable[..., Tensor]:
        def fused_moe(x: Tensor, logits: Tensor, *arguments: Any, **options: Any) -> Tensor:
            num_experts = len(arguments[1]) - options.get("shared", False)
            chosen, _ = top_k_reference(logits[:, :num_experts], arguments[2], renormalize=False)
            if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
                of_layer.decoded.copy_(chosen[:1])
            else:
                of_layer.steps.append(chosen[chosen[:, 0] < num_experts].long())
            return KERNELS.fused_moe(x, logits, *arguments, **options)

        return fused_moe

    for mixture, of_layer in zip(mixtures, routes, strict=True):
        mixture.kernels = KERNELS._replace(fused_moe=noting(of_layer))
    yield routes
    for mixture in mixtures:
        mixture.kernels = KERNELS


def all_steps(routes: list[Routes]) -> list[Tensor]:
    """Of each layer with experts, those of all tokens, int64 [T, k]."""
    return [torch.cat(of_layer.steps) for of_layer in routes]


def routers(theirs: nn.Module) -> list[nn.Module]:
    """transformers' modules that choose experts, layer by layer."""
    return [module for name, module in theirs.named_modules() if name.endswith((".mlp.gate", ".router"))]


@contextmanager
def noted_choices(theirs: nn.Module) -> Iterator[list[Tensor]]:
    """For each of transformers' layers with experts, where its tokens go meanwhile: int64 [T, k]."""
    choices: list[Tensor] = []
    handles = [
        router.register_forward_hook(lambda _module, _inputs, output: choices.append(output[2].long()))
        for router in routers(theirs)
    ]
    yield choices
    for handle in handles:
        handle.remove()


@contextmanager
def imposed_routes(theirs: nn.Module, ours: Decoder, choices: list[Tensor]) -> Iterator[list[Tensor]]:
    """transformers' tokens go to these experts, of each layer int64 [T, k], meanwhile; yields each layer's
    regrets, float32 [T], once it has run."""
    regrets: list[Tensor] = []
    handles = []

    def impose(
        mixture: MoeMLP, chosen: Tensor, router: Any, arguments: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> Any:
        config = mixture.config
        # Gemma 4's router gives probabilities.
        logits = output[0].float().log() if config.router_scale else output[0].float()
        scores = logits.sigmoid() if config.sigmoid_scores else logits.softmax(-1)
        weights = scores.gather(1, chosen)
        if config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * config.weight_factor
        if mixture.expert_scale is not None:
            weights = weights * mixture.expert_scale.float()[chosen]
        rank = logits if mixture.choice_bias is None else scores + mixture.choice_bias
        last = rank.topk(chosen.shape[1]).values[:, -1]
        regret = (last - rank.gather(1, chosen).amin(-1)) / rank.std(-1)
        regrets.append(regret.clamp(min=0.0))
        return output[0], weights.to(output[1].dtype), chosen.to(output[2].dtype)

    for router, mixture, chosen in zip(routers(theirs), ours.expert_layers(), choices, strict=True):
        handles.append(router.register_forward_hook(partial(impose, mixture, chosen)))
    yield regrets
    for handle in handles:
        handle.remove()


def copy_weights(theirs: nn.Module, ours: Decoder) -> None:
    """transformers keeps experts as two tensors, as we do, under names of its own."""
    views = ours.checkpoint_tensors()
    for name, buffer in theirs.named_buffers():
        if name in views:
            views[name].copy_(buffer)
    for name, parameter in theirs.named_parameters():
        in_checkpoint = name.replace(".mlp.", ".block_sparse_moe.")  # Mixtral's, which transformers renames
        name = in_checkpoint if in_checkpoint in views else name
        path, _, kind = name.rpartition(".")
        outer, _, leaf = path.rpartition(".")
        if name in views:
            views[name].copy_(parameter.view(views[name].shape))
        elif ".mlp.experts." in name:
            layer = name.removeprefix("model.").partition(".mlp.")[0]
            mixture = ours.get_submodule(f"{layer}.mlp")
            ours_is = {"gate_up_proj": "experts.gate_up", "down_proj": "experts.down"}
            mixture.get_parameter(ours_is[kind])[: len(parameter)].copy_(parameter)
        elif leaf in FUSED:
            parts = [views[f"{outer}.{part}.{kind}"] for part in FUSED[leaf]]
            for part, rows in zip(parts, parameter.split([len(part) for part in parts]), strict=True):
                part.copy_(rows)
        else:
            raise KeyError(f"transformers has {name}, which we do not")
    ours.finish_loading()


def inputs_for(length: int, context: int, device: torch.device) -> tuple[Tensor, AttentionInputs]:
    """Positions and inputs of one row's tokens context - length .. context - 1, on pages 1, 2, ..."""
    positions = torch.arange(context - length, context, dtype=torch.int32, device=device)
    num_pages = -(-(PROMPT_TOKENS + DECODED_TOKENS) // PAGE_SIZE)
    pages = torch.arange(1, num_pages + 1, dtype=torch.int32, device=device)[None]

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots = positions + PAGE_SIZE
    return positions, AttentionInputs(pages, ints(0), ints(context), slots, ints(0, length), length)


def prefill_logits(model: Decoder, token_ids: Tensor) -> Tensor:
    """[T, V], fed whole."""
    length = token_ids.shape[0]
    positions, inputs = inputs_for(length, length, token_ids.device)
    return model(token_ids, positions, inputs)


def decode_logits(model: Decoder, token_ids: Tensor, run_block: RunBlock, routes: list[Routes]) -> Tensor:
    """[D, V] of the tokens behind the prompt, one by one; on a GPU by replays of one CUDA graph.

    Their experts are added to `routes`. The row comes with a padding row, as a graph's smallest batch has it.
    """
    device = token_ids.device
    position = torch.zeros(2, dtype=torch.int32, device=device)
    token = torch.zeros(2, dtype=torch.int32, device=device)
    slot = torch.full((2,), -1, dtype=torch.int32, device=device)
    context = torch.ones(2, dtype=torch.int32, device=device)
    row_ids = torch.ones(2, dtype=torch.int32, device=device)
    _, single = inputs_for(1, 1, device)
    inputs = AttentionInputs(
        torch.cat((single.page_table, torch.zeros_like(single.page_table))),
        row_ids,
        context,
        slot,
        torch.arange(3, dtype=torch.int32, device=device),
        max_query_len=1,
        is_decode=True,
    )

    def step() -> Tensor:
        return model(token, position, inputs, run_block=run_block)

    replay = step
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(2):  # of two padding rows, which write nothing but the states of line 1
                step()
            with torch.cuda.graph(graph, stream=stream):
                result = step()
        torch.cuda.current_stream().wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return result

    logits = []
    row_ids[0] = 0
    for place in range(PROMPT_TOKENS, PROMPT_TOKENS + DECODED_TOKENS):
        token[0], position[0], slot[0], context[0] = token_ids[place], place, place + PAGE_SIZE, place + 1
        logits.append(replay()[:1].clone())
        for of_layer in routes if device.type == "cuda" else []:
            of_layer.steps.append(of_layer.decoded.clone())
    return torch.cat(logits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(CASES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="decode through torch.compile, too")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on the CPU, in float32")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    missed = False
    where = "cpu" if arguments.small else torch.cuda.get_device_name()
    report: dict[str, Any] = {"machine": {"gpu": where, "torch": torch.__version__}}
    for name in arguments.models or CASES:
        raw = SHAPES[name] | {"num_hidden_layers": arguments.layers} | CASES[name]
        layers = raw["num_hidden_layers"]
        if "layer_types" in raw:
            raw["layer_types"] = (raw["layer_types"] * layers)[:layers]
        began = time.perf_counter()
        if arguments.small:
            raw |= {key: size for key, size in SMALL.items() if raw.get(key)}
            raw["pad_token_id"] = None
            for key, value in (raw.get("rope_scaling") or {}).items():
                if isinstance(value, list):  # a number for each angle
                    raw["rope_scaling"][key] = value[: SMALL["head_dim"] // 2]
            kinds = check(raw, torch.device("cpu"), torch.float32, "torch", compiled=False)
        else:
            kinds = check(raw, torch.device("cuda"), torch.bfloat16, "triton", compiled=arguments.compile)
            torch.cuda.empty_cache()
        good = all(errors.good() for errors in kinds.values())
        missed |= not good
        figures = {
            kind: {key: float(f"{value:.4g}") for key, value in errors._asdict().items()}
            for kind, errors in kinds.items()
        }
        report[name] = figures | {"good": good, "s": round(time.perf_counter() - began, 1)}
        print(name, json.dumps(report[name]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
