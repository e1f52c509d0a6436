"""How fast does the loader read weights from the page cache, and how much host memory does it use?

    python bench/load_weights.py --model llama-3.1-8b --folder /dev/shm/checkpoint

If the folder has no checkpoint, the script writes one of random weights, in shards as on the hub. It then
loads the checkpoint in its own process, so that the peak memory is that of loading.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from minisgl.benchmark.model_configs import MODEL_CONFIGS
from minisgl.engine.start.device import peak_host_bytes
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.decoder import Decoder
from minisgl.models.registry import build_model
from minisgl.weights.dummy import fill_dummy
from minisgl.weights.loader import load_weights


def build(folder: Path, device: torch.device) -> Decoder:
    """The model of the folder's config.json, in bfloat16, empty."""
    config = read_model_config(folder)
    return build_model(config, attention_backend="torch", dtype=torch.bfloat16, device=device)


def write(folder: Path, name: str, device: torch.device, shard_bytes: int) -> None:
    """config.json and as many shards as it takes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIGS[name]))
    model = build(folder, device)
    fill_dummy(model, seed=0)
    shard: dict[str, torch.Tensor] = {}
    count = 0
    for tensor_name, tensor in model.checkpoint_tensors().items():
        shard[tensor_name] = tensor.cpu().clone()
        if sum(part.nbytes for part in shard.values()) >= shard_bytes:
            save_file(shard, folder / f"part-{count:04}.safetensors")
            shard, count = {}, count + 1
    if shard:
        save_file(shard, folder / f"part-{count:04}.safetensors")


def load(folder: Path, device: torch.device) -> None:
    """Print what loading took."""
    model = build(folder, device)
    before = peak_host_bytes()
    began = time.perf_counter()
    config = read_model_config(folder)
    num_bytes = load_weights(model, folder, config, dtype=torch.bfloat16, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    figures = {
        "gb": num_bytes / 1e9,
        "s": seconds,
        "gb_per_s": num_bytes / 1e9 / seconds,
        "largest_file_gb": max(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9,
        "peak_host_gb_before": before / 1e9,
        "peak_host_gb": peak_host_bytes() / 1e9,
    }
    print(json.dumps({key: round(value, 3) for key, value in figures.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=MODEL_CONFIGS, metavar="MODEL")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shard-gb", type=float, default=4.0)
    parser.add_argument("--only-load", action="store_true", help="the folder is there; what the child does")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.only_load:
        load(arguments.folder, device)
        return
    if not any(arguments.folder.glob("*.safetensors")):
        write(arguments.folder, arguments.model, device, int(arguments.shard_gb * 1e9))
    subprocess.run([sys.executable, *sys.argv, "--only-load"], check=True)


if __name__ == "__main__":
    main()
