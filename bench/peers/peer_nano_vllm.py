"""nano-vllm (https://github.com/GeeeekExplorer/nano-vllm): pip install from its repository. Qwen3 only; the
model's folder needs a tokenizer.
"""

from adapter import Generate, Order, run


def start(order: Order) -> Generate:
    """Its engine, with CUDA graphs."""
    from nanovllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]  (a peer)

    llm = LLM(order.model, enforce_eager=False, max_model_len=order.max_context_tokens, **order.options)
    if order.dummy_weights:  # it loads what files there are, here none, and leaves memory as it was
        for parameter in llm.model_runner.model.parameters():
            parameter.data.normal_(0, 0.02)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [
            SamplingParams(temperature=order.temperature, ignore_eos=True, max_tokens=wanted)
            for wanted in max_tokens
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output["token_ids"]) for output in outputs]

    return generate


if __name__ == "__main__":
    run("nano-vllm", start)
