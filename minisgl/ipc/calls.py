"""Makes the messages that start the requests of a call, whole or one request alone.

Promise: a message is small enough that neither process is held for long by it.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from minisgl.ipc.messages import SLICE_BYTES, SLICE_REQUESTS, AddRequest
from minisgl.request import (
    SamplingParams,
    params_for_choice,
    without_prompt_logprobs,
    without_stop_strings,
)
from minisgl.seeds import request_seed


def add_requests(
    request_ids: range,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    base_seed: int,
    priority: int = 0,
    streamed: bool = True,
    cache_salt: str = "",
    call_id: str = "",
    arrived_s: float = 0.0,
    user: str = "",
) -> Iterator[AddRequest]:
    """The messages that start the requests of a call, in the order of their ids.

    Args:
        request_ids: the same number for each prompt; the ids of its choices follow each other.
        base_seed: see `seeds.request_seed`; used if `params` has no seed.
    """
    n = len(request_ids) // len(prompts)
    params = without_stop_strings(params)
    start = 0
    while start < len(prompts):
        data = [np.asarray(prompts[start], "<i4").tobytes()]
        num_bytes = len(data[0])
        for prompt in prompts[start + 1 : start + max(1, SLICE_REQUESTS // n)]:
            num_bytes += 4 * len(prompt)
            if num_bytes > SLICE_BYTES:
                break
            data.append(np.asarray(prompt, "<i4").tobytes())
        own = request_ids[start * n : (start + len(data)) * n]
        seeds = tuple([request_seed(base_seed, one) for one in own]) if params.seed is None else ()
        yield AddRequest(
            own[0],
            data[0],
            params,
            priority,
            streamed,
            num_choices=n,
            more_prompts=tuple(data[1:]),
            seeds=seeds,
            cache_salt=cache_salt,
            call_id=call_id,
            arrived_s=arrived_s,
            user=user,
        )
        start += len(data)


def one_request(
    message: AddRequest, index: int, output: Sequence[int], waiting_since_s: float = 0.0
) -> AddRequest:
    """The message that starts one request of `message` alone, behind what it has generated.

    Args:
        index: of the request, in the order of their ids.
        output: what it has generated in an engine that has ended, token ids.
        waiting_since_s: see `AddRequest`.
    """
    prompt, choice = divmod(index, message.num_choices)
    params = params_for_choice(message.params, choice)
    return msgspec.structs.replace(
        message,
        request_id=message.request_id + index,
        prompt_ids=(message.prompt_ids, *message.more_prompts)[prompt],
        params=without_prompt_logprobs(params) if output else params,
        num_choices=1,
        more_prompts=(),
        seeds=message.seeds[index : index + 1],
        outputs=(np.asarray(output, "<i4").tobytes(),) if output else (),
        waiting_since_s=waiting_since_s,
    )
