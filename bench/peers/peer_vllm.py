"""vLLM (https://github.com/vllm-project/vllm): pip install vllm."""

from adapter import Generate, Order, run


def start(order: Order) -> Generate:
    """An engine without text: token ids in and out."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]  (a peer)

    llm = LLM(
        model=order.model,
        skip_tokenizer_init=True,
        load_format="dummy" if order.dummy_weights else "auto",
        max_model_len=order.max_context_tokens,
        **order.options,
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [
            SamplingParams(
                temperature=order.temperature, max_tokens=wanted, ignore_eos=True, detokenize=False
            )
            for wanted in max_tokens
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    run("vllm", start)
