"""What the choices of a completion say of their prompt is made once."""

from pathlib import Path

import msgspec
import numpy as np
from small_model import make_folder

from minisgl.request import PackedLogprobs, SamplingParams
from minisgl.server.apis.completions import ChoiceWriter, CompletionCall, PromptDetails
from minisgl.server.calls.call import CallOptions
from minisgl.server.open_choices import Delta
from minisgl.text.tokenizer import Tokenizer


def test_an_echoed_prompts_likeliest_tokens_are_encoded_once_for_all_choices(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path))
    prompt_ids = [1, 2, 3]
    call = CompletionCall([prompt_ids], CallOptions(SamplingParams(logprobs=1), n=2), echo=True)
    line = np.array([0, 0, 7, 0], "<i4")  # log probability 0.0, rank 1; likeliest 7, 0.0
    packed = PackedLogprobs(np.array(prompt_ids[1:], "<i4").tobytes(), np.tile(line, 2).tobytes())
    prompt = PromptDetails(tokenizer, call, prompt_ids, "abc")
    first, second = (
        ChoiceWriter(tokenizer, call, prompt).fields(Delta(rank, "", 0, 0, None, [], [], packed))["logprobs"]
        for rank in range(2)
    )
    # One large piece of JSON would be encoded without a chance for another thread, the event loop's included.
    assert all(isinstance(entry, msgspec.Raw) for entry in first.top_logprobs[1:])
    assert all(one is other for one, other in zip(first.top_logprobs, second.top_logprobs, strict=True))
    written = msgspec.json.decode(msgspec.json.encode(first.top_logprobs))
    assert written[0] is None
    assert [list(entry.values()) for entry in written[1:]] == [[0.0, 0.0], [0.0, 0.0]]
