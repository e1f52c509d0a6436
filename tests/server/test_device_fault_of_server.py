"""`minisgl serve` and `LLM` with real engines that meet a simulated GPU fault."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from faulty_kernel import NUM_TOKENS
from small_model import make_folder
from tiny_models import random_model

from minisgl import LLM, DeviceFaultError, SamplingParams
from minisgl.ipc.child_process import module_command
from minisgl.text.tokenizer import Tokenizer

LIMIT_S = 20.0
FAULTY_TOKENS = 23
FLAGS = ("--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--num-pages", "64")
KERNEL = "silu_mul=faulty_kernel:silu_mul"
ENVIRONMENT = {
    **os.environ,
    "FAULTY_TOKENS": str(FAULTY_TOKENS),
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("model"))
    random_model(vocab_size=401, num_attention_heads=4, num_key_value_heads=2).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("tp", "who"), [(1, ""), (2, "rank 1 of --tp: ")])
def test_a_fault_of_any_rank_is_named_and_ends_the_server_with_code_74(
    folder: Path, tmp_path: Path, tp: int, who: str
) -> None:
    process = subprocess.Popen(
        module_command(
            "minisgl",
            "serve",
            "--model",
            str(folder),
            "--port",
            "0",
            "--engine-restarts",
            "0",
            "--tp",
            str(tp),
            "--kernel",
            KERNEL,
            *FLAGS,
        ),
        stdout=subprocess.PIPE,
        stderr=(log := (tmp_path / "log").open("w+")),
        text=True,
        env={**ENVIRONMENT, "FAULTY_RANK": str(tp - 1)},
    )
    assert process.stdout is not None
    try:
        url = next(line.split("/v1/")[0][5:] for line in process.stdout if line.startswith("curl "))
        ask = {"prompt": [5] * FAULTY_TOKENS, "max_tokens": 4}
        sound = {**ask, "prompt": [6] * (FAULTY_TOKENS - 1)}
        with urllib.request.urlopen(f"{url}/v1/completions", json.dumps(sound).encode(), LIMIT_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/v1/completions", json.dumps(ask).encode(), LIMIT_S)
        with caught.value as answer:
            error = json.load(answer)["error"]
        assert process.wait(LIMIT_S) == 74
    finally:
        process.kill()
        process.communicate()
        log.seek(0)
        text = log.read()
        log.close()
    assert error["code"] == "engine_dead"
    assert f"{who}GPU fault: the GPU's memory lost data (CUDA error 214" in error["message"], text
    assert "terminate called" not in text


def test_a_command_with_its_own_engine_ends_with_code_74(folder: Path) -> None:
    prompt = "the quick brown fox jumps over the lazy dog"
    tokens = Tokenizer.from_folder(folder).encode(prompt, add_special_tokens=True)
    done = subprocess.run(
        module_command("minisgl", "generate", prompt, "--model", str(folder), "--kernel", KERNEL, *FLAGS),
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "FAULTY_TOKENS": str(len(tokens))},
    )
    assert done.returncode == 74, done.stderr
    assert "minisgl: error: GPU fault: the GPU's memory lost data" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_llm_raises_an_exception_of_its_own_and_can_be_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NUM_TOKENS == 0
    monkeypatch.setattr("faulty_kernel.NUM_TOKENS", FAULTY_TOKENS)
    settings = {"device": "cpu", "dtype": "float32", "num_pages": 64, "kernel": (KERNEL,)}
    params = SamplingParams(max_tokens=4, temperature=0.0)
    with LLM(str(folder), **settings) as llm:
        assert llm.generate([[6, 7]], params)
        other = llm.stream([7] * 9, params)
        next(other)
        with pytest.raises(DeviceFaultError, match="GPU fault: the GPU's memory lost data"):
            llm.generate([[5] * FAULTY_TOKENS], params)
        with pytest.raises(DeviceFaultError, match="GPU fault"):
            next(other)
        with pytest.raises(DeviceFaultError, match="make a new LLM in a new process"):
            llm.generate([[6, 7]], params)


def test_nothing_that_uses_the_gpu_is_freed_after_a_fault(folder: Path) -> None:
    """Freeing page-locked memory after a fault aborts the process, in the middle or at its end."""
    script = (
        "import gc, os, sys; from minisgl import LLM, DeviceFaultError\n"
        "class PageLocked:\n    def __del__(self, abort=os._exit): abort(134)\n"
        "import faulty_kernel; faulty_kernel.in_use = PageLocked\n"
        f"llm = LLM(sys.argv[1], device='cpu', dtype='float32', num_pages=64, kernel=({KERNEL!r},))\n"
        "llm._driver._engine.runner.buffer = PageLocked()\n"
        f"try: llm.generate([[5] * {FAULTY_TOKENS}])\n"
        "except DeviceFaultError: print('caught')\n"
        "llm.close(); del llm; gc.collect(); print('over')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert (done.returncode, done.stdout.split()) == (0, ["caught", "over"]), done.stderr
