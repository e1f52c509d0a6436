"""Is every family right on this GPU? Real shapes cut to a few layers, random weights, against transformers.

    python bench/families.py --out families.json               # all, 2 layers each
    python bench/families.py qwen3-30b-a3b gemma-3-1b --compile

For each model: logits of a prompt fed whole, then of tokens decoded one by one through a CUDA graph, against
transformers in float32 on the same bfloat16 weights; transformers' own bfloat16 error beside it. Then the
same prompt through the `torch` attention backend. Bar: a relative error under 2e-2.

With experts, a rounding may decide which of them a token gets, in transformers as in ours, and another expert
is another result. The bar then holds for the quarter of the tokens that float32 routes most clearly (by the
distance between the last router logit that is chosen and the first that is not); over all tokens the error
may be 1.25 times transformers' own. Exit code 1 where a bar is missed.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from minisgl.attention.backends import select
from minisgl.attention.interface import AttentionInputs
from minisgl.benchmark.model_configs import MODEL_CONFIGS
from minisgl.engine.compiled import compiled_block
from minisgl.layers.norm import RMSNorm
from minisgl.model_config import read_model_config
from minisgl.models.decoder import Decoder, RunBlock, call_block
from minisgl.models.registry import build_model
from minisgl.weights.loader import FUSED

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
    "gemma-3-1b": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100},
}
"""What of each model's config is changed, so that a short prompt meets all it has."""
PAGE_SIZE = 16
PROMPT_TOKENS = 300
DECODED_TOKENS = 32
BAR = 2e-2
NEXT_TO_THEIRS = 1.25
CLEAR_SHARE = 0.25


class Errors(NamedTuple):
    """Relative errors, by norm over all tokens, or over those that are routed clearly."""

    prefill: float
    decode: float
    clear_prefill: float
    clear_decode: float
    torch_backend: float
    theirs: float

    def bar(self) -> float:
        """Of the errors over all tokens."""
        routed = self.clear_prefill != self.prefill
        return max(BAR, NEXT_TO_THEIRS * self.theirs) if routed else BAR

    def good(self) -> bool:
        """Whether every bar is kept."""
        clear = max(self.clear_prefill, self.clear_decode)
        return clear < BAR and max(self.prefill, self.decode, self.torch_backend) < self.bar()


def relative_error(got: Tensor, reference: Tensor) -> float:
    return float((got.double() - reference.double()).norm() / reference.double().norm())


@torch.inference_mode()
def check(
    raw: dict[str, Any], device: torch.device, dtype: torch.dtype, backend: str, *, compiled: bool
) -> Errors:
    """Build both, give them the same weights, compare."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "config.json").write_text(json.dumps(raw))
        config = read_model_config(Path(name))
        ours = build_model(config, attention_backend=backend, dtype=dtype, device=device)
        theirs_config = AutoConfig.from_pretrained(name)
    with device:
        theirs = AutoModelForCausalLM.from_config(theirs_config, dtype=dtype).eval()
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if "norm" in name:
            parameter.uniform_(-0.5, 0.5, generator=generator)
            if not config.norms_less_one:
                parameter.add_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    copy_weights(theirs, ours)

    total = PROMPT_TOKENS + DECODED_TOKENS
    token_ids = torch.randint(
        0, config.vocab_size, (total,), generator=generator, device=device, dtype=torch.int32
    )
    ours.allocate_kv(-(-total // PAGE_SIZE) + 1, PAGE_SIZE, dtype, device)
    run_block = compiled_block(max_batch=2) if compiled else call_block
    prefill = prefill_logits(ours, token_ids[:PROMPT_TOKENS])
    decode = decode_logits(ours, token_ids, run_block)
    for attention in ours.attention_layers():
        attention.attend = select("torch")
    other = prefill_logits(ours, token_ids[:PROMPT_TOKENS])
    bf16 = theirs(token_ids[None]).logits[0]
    theirs.float()
    clearness = watch_routers(theirs, total, device)
    exact = theirs(token_ids[None]).logits[0]
    in_prompt, behind = exact[:PROMPT_TOKENS], exact[PROMPT_TOKENS:]
    clear_prompt, clear_behind = clearest(clearness[:PROMPT_TOKENS]), clearest(clearness[PROMPT_TOKENS:])
    return Errors(
        relative_error(prefill, in_prompt),
        relative_error(decode, behind),
        relative_error(prefill[clear_prompt], in_prompt[clear_prompt]),
        relative_error(decode[clear_behind], behind[clear_behind]),
        relative_error(prefill, other),
        relative_error(bf16, exact),
    )


def watch_routers(theirs: nn.Module, num_tokens: int, device: torch.device) -> Tensor:
    """[T], which the next forward pass fills with how clearly each token is routed where it is least so.

    In standard deviations of a token's router logits; infinite without experts.
    """
    clearness = torch.full((num_tokens,), float("inf"), device=device)

    def watch(router: Any, arguments: Any, output: Any) -> None:
        logits, _, chosen = output
        top = logits.float().topk(chosen.shape[-1] + 1).values
        torch.minimum(clearness, (top[:, -2] - top[:, -1]) / logits.float().std(-1), out=clearness)

    for name, module in theirs.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(watch)
    return clearness


def clearest(clearness: Tensor) -> Tensor:
    """Which tokens, bool [T], are a CLEAR_SHARE of the most clearly routed; all, where nothing is routed."""
    return clearness >= clearness.sort(descending=True).values[int(CLEAR_SHARE * clearness.shape[0]) - 1]


def copy_weights(theirs: nn.Module, ours: Decoder) -> None:
    """transformers keeps experts as two tensors, as we do, under names of its own."""
    views = ours.checkpoint_tensors()
    for name, parameter in theirs.named_parameters():
        path, _, kind = name.rpartition(".")
        outer, _, leaf = path.rpartition(".")
        if ".mlp.experts." in name or name.endswith(".mlp.gate.weight"):
            layer = name.removeprefix("model.").partition(".mlp.")[0]
            mixture = ours.get_submodule(f"{layer}.mlp")
            ours_is = {"gate_up_proj": "gate_up", "down_proj": "down", "weight": "router"}[kind]
            mixture.get_parameter(ours_is).copy_(parameter)
        elif leaf in FUSED:
            parts = [views[f"{outer}.{part}.{kind}"] for part in FUSED[leaf]]
            for part, rows in zip(parts, parameter.split([len(part) for part in parts]), strict=True):
                part.copy_(rows)
        else:
            views[name].copy_(parameter)
    for module in ours.modules():
        if isinstance(module, RMSNorm):
            module.add_one()


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


def decode_logits(model: Decoder, token_ids: Tensor, run_block: RunBlock) -> Tensor:
    """[D, V] of the tokens behind the prompt, one by one; on a GPU by replays of one CUDA graph.

    The row comes with a padding row, as a graph's smallest batch has it.
    """
    device = token_ids.device
    position = torch.zeros(2, dtype=torch.int32, device=device)
    token = torch.zeros(2, dtype=torch.int32, device=device)
    slot = torch.full((2,), -1, dtype=torch.int32, device=device)
    context = torch.ones(2, dtype=torch.int32, device=device)
    _, single = inputs_for(1, 1, device)
    inputs = AttentionInputs(
        torch.cat((single.page_table, torch.zeros_like(single.page_table))),
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        context,
        slot,
        torch.arange(3, dtype=torch.int32, device=device),
        1,
    )

    def step() -> Tensor:
        return model(token, position, inputs, run_block=run_block)

    replay = step
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(2):  # while the slot is -1, nothing is written
                step()
            with torch.cuda.graph(graph, stream=stream):
                result = step()
        torch.cuda.current_stream().wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return result

    logits = []
    for place in range(PROMPT_TOKENS, PROMPT_TOKENS + DECODED_TOKENS):
        token[0], position[0], slot[0], context[0] = token_ids[place], place, place + PAGE_SIZE, place + 1
        logits.append(replay()[:1].clone())
    return torch.cat(logits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(CASES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="decode through torch.compile, too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    missed = False
    report: dict[str, Any] = {
        "machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__},
    }
    for name in arguments.models or CASES:
        raw = MODEL_CONFIGS[name] | {"num_hidden_layers": arguments.layers} | CASES[name]
        if "layer_types" in raw:
            raw["layer_types"] = (raw["layer_types"] * arguments.layers)[: arguments.layers]
        began = time.perf_counter()
        errors = check(raw, torch.device("cuda"), torch.bfloat16, "triton", compiled=arguments.compile)
        torch.cuda.empty_cache()
        missed |= not errors.good()
        facts = {"bar": errors.bar(), "good": errors.good(), "s": time.perf_counter() - began}
        report[name] = {key: float(f"{value:.4g}") for key, value in (errors._asdict() | facts).items()}
        print(name, json.dumps(report[name]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
