# pyright: reportMissingImports=false
"""guidellm: a concurrent and a Poisson load of made-up prompts; every request must be answered in full.

TOKENIZER is the model's folder: guidellm makes prompts of so many tokens with it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_REQUESTS = 24
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16
LIMIT_S = 300
PROFILES = ("kind=concurrent,streams=4", "kind=poisson,rate=4")


def load(profile: str, folder: Path) -> dict[str, Any]:
    """guidellm's report of one load."""
    command = [
        *(Path(sys.executable).with_name("guidellm"), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={os.environ['BASE_URL'].removesuffix('/v1')}"),
        *("--profile", profile, "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={os.environ['TOKENIZER']}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={folder / 'report.json'}"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    return json.loads((folder / "report.json").read_text())


for profile in PROFILES:
    with tempfile.TemporaryDirectory() as name:
        (benchmark,) = load(profile, Path(name))["benchmarks"]
    requests = benchmark["requests"]
    problems = [request["info"]["error"] for request in requests["errored"] + requests["incomplete"]]
    assert not problems, problems[0]
    tokens = {request["output_metrics"]["text_tokens"] for request in requests["successful"]}
    assert len(requests["successful"]) == NUM_REQUESTS, len(requests["successful"])
    assert tokens == {OUTPUT_TOKENS}, tokens
    print(f"ok: {NUM_REQUESTS} requests, {profile.partition('kind=')[2].replace(',', ', ')}")
