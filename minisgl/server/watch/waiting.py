"""Tells of the requests that wait while the engine is started again, which no engine can tell of."""

import time

from minisgl.lives import Life, Phase
from minisgl.server.engines.served_engine import ServedEngine


def waiting_lives(engine: ServedEngine) -> list[Life]:
    """The open requests of this server process, if the engine is being started again."""
    requests, since_s = engine.waiting()
    now_s, unix_offset_s = time.monotonic(), time.time() - time.monotonic()
    lives: list[Life] = []
    for request in requests:
        message = request.message
        arrived_s = message.arrived_s or since_s
        waited_from_ms = max(since_s - arrived_s, 0.0) * 1e3
        phases: list[Phase] = []
        if waited_from_ms:
            phases.append(Phase("earlier", 0.0, waited_from_ms))
        phases.append(Phase("restart", waited_from_ms))
        lives.append(
            Life(
                number=request.request_id,
                id=message.call_id,
                state="restart",
                arrived_at=round(arrived_s + unix_offset_s, 6),
                total_ms=(now_s - arrived_s) * 1e3,
                first_token_ms=None,
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=0,
                output_tokens=len(request.output),
                priority=message.priority,
                num_preemptions=0,
                ahead=None,
                end=None,
                error_code="",
                phases=phases,
            )
        )
    return lives
