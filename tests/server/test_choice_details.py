"""What the choices of an answer say of their prompt is made once."""

from pathlib import Path

import msgspec
import numpy as np
from small_model import make_folder

from minisgl.request import PackedLogprobs
from minisgl.server.choice_details import ChoiceDetails, PromptDetails, RequestedDetails
from minisgl.text.tokenizer import Tokenizer


def test_an_echoed_prompts_likeliest_tokens_are_encoded_once_for_all_choices(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path))
    prompt_ids, wanted = [1, 2, 3], RequestedDetails(echo=True, logprobs=1)
    line = np.array([0, 0, 7, 0], "<i4")  # log probability 0.0, rank 1; likeliest 7, 0.0
    packed = PackedLogprobs(np.array(prompt_ids[1:], "<i4").tobytes(), np.tile(line, 2).tobytes())
    prompt = PromptDetails(tokenizer, wanted, prompt_ids, "abc")
    first, second = (
        ChoiceDetails(tokenizer, wanted, prompt, is_first).take([], [], packed)[1].choice["logprobs"]
        for is_first in (True, False)
    )
    # One large piece of JSON would be encoded without a chance for another thread, the event loop's included.
    assert all(isinstance(entry, msgspec.Raw) for entry in first["top_logprobs"][1:])
    assert all(one is other for one, other in zip(first["top_logprobs"], second["top_logprobs"], strict=True))
    written = msgspec.json.decode(msgspec.json.encode(first["top_logprobs"]))
    assert written[0] is None
    assert [list(entry.values()) for entry in written[1:]] == [[0.0, 0.0], [0.0, 0.0]]
