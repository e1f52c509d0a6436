"""SGLang (https://github.com/sgl-project/sglang): pip install "sglang[all]"."""

from adapter import Generate, Order, run


def start(order: Order) -> Generate:
    """An engine without text: token ids in and out."""
    import sglang  # pyright: ignore[reportMissingImports]  (a peer)

    engine = sglang.Engine(
        model_path=order.model,
        skip_tokenizer_init=True,
        load_format="dummy" if order.dummy_weights else "auto",
        context_length=order.max_context_tokens,
        **order.options,
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [
            {"temperature": order.temperature, "max_new_tokens": wanted, "ignore_eos": True}
            for wanted in max_tokens
        ]
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        return [output["meta_info"]["completion_tokens"] for output in outputs]

    return generate


if __name__ == "__main__":
    run("sglang", start)
