"""Writes tests/data/smollm2_more_golden.json: greedy answers of transformers to our own prompts.

Run again only when the built-in model changes: `python bench/make_golden.py` (minutes on a CPU).
Everything is float32 on the CPU. The script refuses a case whose two best tokens are ever closer than
MIN_MARGIN, because rounding could then choose the token.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers

from minisgl.weights.sources import resolve_model_folder

MIN_MARGIN = 1e-3
MAX_NEW_TOKENS = 40
OUT = Path(__file__).resolve().parent.parent / "tests" / "data" / "smollm2_more_golden.json"

LONG_TEXT = (
    "The harbour town had two lighthouses, an old one of stone and a new one of steel. "
    "Every evening the keeper of the old one climbed one hundred and twelve steps to light a lamp that no "
    "ship needed any more, and every morning he climbed them again to put it out. "
)
CHATS: list[list[tuple[str, str]]] = [
    [("user", "Name the planets of the solar system in order.")],
    [("user", "Translate 'good morning' into French, German and Spanish.")],
    [("user", "What is 17 times 23? Think step by step.")],
    [("user", "Write a haiku about rain.")],
    [("user", "Explain recursion to a ten-year-old.")],
    [("user", "日本の首都はどこですか?")],
    [("user", "Schreibe einen Satz über Käse und Brötchen. 🧀")],
    [("user", "Give me a Python function that reverses a string.")],
    [("system", "Answer with one word only."), ("user", "What colour is the sky on a clear day?")],
    [("system", "You are a helpful cook."), ("user", "How long do I boil pasta?")],
    [("user", "Remember the number 42."), ("assistant", "I will."), ("user", "Which number was it?")],
    [("user", LONG_TEXT * 4 + "Who is this story about?")],
    [("user", LONG_TEXT * 4 + "How many steps are there?")],
    [("user", LONG_TEXT * 9 + "Summarise the text in one sentence.")],
    [("user", "   \n\tspaces   and\ttabs\n\n\nmatter  ")],
    [("user", "List five animals, one per line.")],
    [("user", "What is the capital of Japan?")],  # the line that a server prints
]
TEXTS = ["Once upon a time", "import numpy as np\n\ndef softmax(x):\n", "1, 2, 3, 5, 8, 13,", "The", "Ω≈ç√∫ "]


def greedy(model: transformers.PreTrainedModel, prompt_ids: list[int]) -> tuple[list[int], float]:
    """Token ids up to the end of sequence, and the smallest gap between the best two on the way."""
    with torch.inference_mode():
        result = model.generate(  # pyright: ignore[reportCallIssue]  (mixed in by transformers at run time)
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(result.logits).float().topk(2).values
    return result.sequences[0, len(prompt_ids) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    folder = resolve_model_folder(args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts: list[tuple[list[dict[str, str]] | None, str]] = []
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append((messages, text))
    prompts += [(None, text) for text in TEXTS]
    cases = []
    for messages, text in prompts:
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, margin = greedy(model, prompt_ids)
        print(f"{len(prompt_ids):5d} tokens, margin {margin:.4f}: {tokenizer.decode(ids)[:70]!r}", flush=True)
        if margin < MIN_MARGIN:
            print("      left out: too close a call")
            continue
        cases.append(
            {
                "messages": messages,
                "prompt_text": text,
                "prompt_ids": prompt_ids,
                "ids": ids,
                "text": tokenizer.decode(ids, skip_special_tokens=True),
                "min_margin": round(margin, 5),
            }
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    header = {"how": (__doc__ or "").splitlines()[0], **versions, "max_new_tokens": MAX_NEW_TOKENS}
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    args.out.write_text(json.dumps(header)[:-1] + ',\n"cases": [\n' + lines + "\n]}\n", encoding="utf-8")
    print(len(cases), "cases in", args.out)


if __name__ == "__main__":
    main()
