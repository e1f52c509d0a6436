"""transformers (https://github.com/huggingface/transformers): `generate` in fixed batches.

Prompts are padded on the left. Each batch runs until its longest output is there; only the tokens that were
asked for count. Options: batch (16), dtype ("bfloat16" on a GPU, "float32" on a CPU), device.
"""

from typing import Any

from adapter import Generate, Order, run


def start(order: Order) -> Generate:
    """A model and its own generation loop."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = str(order.options.get("device", "cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, order.options.get("dtype", "bfloat16" if device == "cuda" else "float32"))
    batch = int(order.options.get("batch", 16))
    maker: Any = AutoModelForCausalLM
    if order.dummy_weights:
        with torch.device(device):
            model = maker.from_config(AutoConfig.from_pretrained(order.model), dtype=dtype)
    else:
        model = maker.from_pretrained(order.model, dtype=dtype).to(device)
    model.eval()
    sampling: dict[str, Any] = {"do_sample": False}
    if order.temperature:
        sampling = {"do_sample": True, "temperature": order.temperature}

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        for begin in range(0, len(prompts), batch):
            part = prompts[begin : begin + batch]
            width, wanted = max(map(len, part)), max(max_tokens[begin : begin + batch])
            padding = [width - len(prompt) for prompt in part]
            ids = [[0] * pad + prompt for pad, prompt in zip(padding, part, strict=True)]
            mask = [[0] * pad + [1] * (width - pad) for pad in padding]
            with torch.inference_mode():
                output = model.generate(
                    torch.tensor(ids, device=device),
                    attention_mask=torch.tensor(mask, device=device),
                    max_new_tokens=wanted,
                    min_new_tokens=wanted,
                    pad_token_id=0,
                    **sampling,
                )
            assert output.shape[1] == width + wanted
        if device == "cuda":
            torch.cuda.synchronize()
        return list(max_tokens)

    return generate


if __name__ == "__main__":
    run("transformers", start)
