"""Whatever happens to requests, the page events tell a router exactly which prefixes are cached."""

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import build, prompt_of
from vllm_events import Router, cached_prefixes

from minisgl.engine.page_events import PageEventEncoder
from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import NO_LOGITS

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
SALTS = st.sampled_from(["", "", "a"])
EVENTS = st.one_of(
    st.tuples(st.just("add"), PROMPTS, st.integers(1, 40), SALTS),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("break"), st.integers(0, 7)),
    st.tuples(st.just("flush")),
)


@settings(max_examples=150, deadline=None)
@given(
    events=st.lists(EVENTS, min_size=5, max_size=60),
    page_size=st.sampled_from([1, 2, 4]),
    overlap=st.booleans(),
)
def test_a_router_that_reads_the_events_knows_the_cached_prefixes(
    events: list[tuple], page_size: int, overlap: bool
) -> None:
    scheduler, executor, cache = build(
        num_pages=72 // page_size + 1,
        page_size=page_size,
        max_rows=5,
        output_reserve_tokens=0,
        vocab_size=4,
        notes_changes=True,
    )
    encoder, router, launched = PageEventEncoder(page_size), Router(), []
    num_requests, broken_row = 0, -1

    def step() -> None:
        plan = scheduler.plan()
        if plan is not None:
            launched.append((plan, executor.execute(plan)))
        while len(launched) > (1 if overlap and plan is not None else 0):
            done, tokens = launched.pop(0)
            rows = done.sampled_rows
            scheduler.apply(
                done, [NO_LOGITS if row == broken_row else t for row, t in zip(rows, tokens, strict=True)]
            )
        scheduler.take_outputs()

    assert isinstance(cache, KVCacheManager)

    def compare() -> None:
        router.read(encoder.encode(cache.take_changes()))
        assert router.prefixes == cached_prefixes(cache)

    for name, *values in events:
        match name:
            case "add":
                prompt, max_tokens, salt = values
                params = SamplingParams(max_tokens=max_tokens, seed=num_requests)
                scheduler.add_call(num_requests, [prompt_of(*prompt)], params, 1, 0, True, cache_salt=salt)
                num_requests += 1
            case "step":
                for _ in range(values[0]):
                    if scheduler.has_work:
                        step()
                        compare()
                broken_row = -1
            case "abort":
                scheduler.abort(values[0])
            case "break":  # the rows' tokens of the next steps show a NaN
                broken_row = values[0]
            case "flush":
                cache.flush()
        compare()
    while scheduler.has_work:
        step()
        compare()
    cache.flush()
    compare()
    assert router.prefixes == set()
