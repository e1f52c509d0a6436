"""mini-sglang (https://github.com/sgl-project/mini-sglang): pip install from a checkout, in an environment
without this project, whose import name is the same. The model's folder needs a tokenizer.
"""

from importlib import import_module
from typing import Any

from adapter import Generate, Order, run


def start(order: Order) -> Generate:
    """Its offline engine, with the settings of its own offline benchmark."""
    # By name: a type checker would take `minisgl` for this project.
    theirs: Any = import_module("minisgl.llm")
    core: Any = import_module("minisgl.core")
    settings = {"max_extend_tokens": 16384, "cuda_graph_max_bs": 256} | order.options
    llm = theirs.LLM(
        order.model,
        max_seq_len_override=order.max_context_tokens,
        use_dummy_weight=order.dummy_weights,
        **settings,
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [
            core.SamplingParams(temperature=order.temperature, ignore_eos=True, max_tokens=wanted)
            for wanted in max_tokens
        ]
        outputs = llm.generate(prompts, params)
        # The last token of each is computed but not among the results.
        return [len(output["token_ids"]) + 1 for output in outputs]

    return generate


if __name__ == "__main__":
    run("minisgl", start)
