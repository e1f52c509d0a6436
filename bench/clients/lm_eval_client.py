# pyright: reportMissingImports=false
"""lm-eval's local-completions: loglikelihoods of token ids by echo and logprobs, against transformers'.

EXPECTED is a JSON file of [context, continuation, log probability, whether greedy decoding gives it, the
smallest lead of a likeliest token]; TOKENIZER the model's folder.
"""

import json
import os
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

BATCH = 8
TOLERANCE = 5e-3  # of a sum of log probabilities in float32

model = LocalCompletionsAPI(
    base_url=os.environ["BASE_URL"] + "/completions",
    model=os.environ["MODEL"],
    tokenizer=os.environ["TOKENIZER"],
    tokenizer_backend="huggingface",
    batch_size=BATCH,
)
expected = json.loads(Path(os.environ["EXPECTED"]).read_text())
items = [Instance("loglikelihood", {}, tuple(item[:2]), index) for index, item in enumerate(expected)]
worst = 0.0
for (logprob, greedy), item in zip(model.loglikelihood(items, disable_tqdm=True), expected, strict=True):
    worst = max(worst, abs(logprob - item[2]))
    assert greedy == item[3] or item[4] < TOLERANCE, item
assert worst < TOLERANCE, worst
print(f"ok: {len(items)} loglikelihoods, at most {worst:.1e} from transformers'")

ask = ("One, two, three, four,", {"until": ["\n"], "max_gen_toks": 12, "temperature": 0})
assert model.generate_until([Instance("generate_until", {}, ask, 0)], disable_tqdm=True)[0]
print("ok: generate_until")
