"""The offline driver on an engine that follows a script: what reaches whom, and what is left behind."""

import gc
import signal
import threading
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.ipc.messages import AddRequest
from minisgl.offline import OfflineDriver, Reply, check_prompt, interrupts_deferred
from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.text.reply import ReplyText
from minisgl.text.stop import StopStrings
from minisgl.text.tokenizer import Tokenizer

MAX_CONTEXT = 64


class ScriptedEngine:
    """Gives every request the tokens of its script, one per step, like a real engine in order of arrival.

    An aborted request stays until the next step, as it does when a launched step still holds its row.
    """

    max_context_tokens = MAX_CONTEXT

    def __init__(
        self, script: dict[int, list[int]] | None = None, refused: frozenset[int] = frozenset()
    ) -> None:
        self._script = script or {}
        self._refused = refused
        self.running: dict[int, list[int]] = {}
        self.seeds: list[int | None] = []
        self.aborted: list[int] = []
        self.num_steps = 0
        self.closed = False
        self.on_step = lambda: None

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: AddRequest) -> None:
        assert request.params.max_tokens is not None
        self.seeds += request.seeds or (request.params.seed,)
        tokens = self._script.get(request.request_id, [])
        self.running[request.request_id] = list(tokens[: request.params.max_tokens])

    def abort(self, request_id: int) -> None:
        if request_id in self.running:
            self.aborted.append(request_id)

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        self.on_step()
        outputs = []
        for request_id in list(self.running):
            if request_id in self.aborted:
                del self.running[request_id]
            elif request_id in self._refused:
                del self.running[request_id]
                outputs.append(
                    RequestOutput(request_id, [], FinishReason.ERROR, 0, 429, "queue_full", "too many")
                )
            else:
                tokens = self.running[request_id]
                token = tokens.pop(0)
                reason = None if tokens else FinishReason.LENGTH
                outputs.append(RequestOutput(request_id, [token], reason, 3))
                if reason is not None:
                    del self.running[request_id]
        return outputs

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocabulary = {char: index for index, char in enumerate(sorted(ByteLevel.alphabet()))}
    fast = FastTokenizer(BPE(vocabulary, []))
    fast.pre_tokenizer = ByteLevel(add_prefix_space=False)
    fast.decoder = ByteLevelDecoder()
    return Tokenizer(fast, {})


def driver_for(tokenizer: Tokenizer, engine: ScriptedEngine, seed: int | None = None) -> OfflineDriver:
    return OfflineDriver(
        engine,
        lambda ids, params, kept: ReplyText(tokenizer, ids, params, StopStrings(params.stop), kept),
        seed,
    )


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def submit(driver: OfflineDriver, *, stop: tuple[str, ...] = ()) -> Reply:
    return driver.submit([1, 2], SamplingParams(max_tokens=50, stop=stop))


def deltas(driver: OfflineDriver, reply: Reply) -> Iterator[str]:
    while reply.is_readable or not reply.ended:
        driver.wait([reply])
        for delta in reply.read():
            yield delta.text


def test_two_replies_read_in_turns_lose_nothing(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({0: ids(tokenizer, "first answer"), 1: ids(tokenizer, "second")})
    driver = driver_for(tokenizer, engine)
    first, second = deltas(driver, submit(driver)), deltas(driver, submit(driver))
    texts = [next(first), next(second), next(first)]
    assert texts == ["f", "s", "i"]
    assert "".join(second) == "econd"
    assert "".join(first) == "rst answer"
    assert not engine.has_work


def test_a_reply_that_ended_while_another_was_read_costs_no_step(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({0: ids(tokenizer, "long answer"), 1: ids(tokenizer, "ab")})
    driver = driver_for(tokenizer, engine)
    long, short = submit(driver), submit(driver)
    assert "".join(deltas(driver, long)) == "long answer"
    steps = engine.num_steps
    assert "".join(deltas(driver, short)) == "ab"
    assert engine.num_steps == steps


def test_a_stop_string_ends_the_reply_and_aborts_the_engines_request(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({0: ids(tokenizer, "abc\n\ndef")})
    driver = driver_for(tokenizer, engine)
    reply = submit(driver, stop=("\n\n",))
    found = []
    while not reply.ended:
        driver.wait([reply])
        found += reply.read()
    assert "".join(delta.text for delta in found) == "abc"
    assert found[-1].finish_reason is FinishReason.STOP
    assert sum(len(delta.token_ids) for delta in found) == 5
    assert found[-1].num_cached_tokens == 3
    assert engine.aborted == [0]


def test_abandoning_aborts_once_and_lets_the_engine_free_everything(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({0: ids(tokenizer, "never read to the end")})
    driver = driver_for(tokenizer, engine)
    reply = submit(driver)
    driver.wait([reply])
    driver.abandon(reply)
    driver.abandon(reply)
    assert engine.aborted == [0]
    assert not engine.has_work


def test_abandoning_one_reply_leaves_the_others_alone(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({0: ids(tokenizer, "unwanted text"), 1: ids(tokenizer, "wanted")})
    driver = driver_for(tokenizer, engine)
    unwanted, wanted = submit(driver), submit(driver)
    driver.abandon(unwanted)
    assert "".join(deltas(driver, wanted)) == "wanted"
    assert engine.aborted == [0]
    assert not engine.has_work


def test_a_reply_collected_in_the_middle_of_a_step_is_aborted_after_it(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({0: ids(tokenizer, "collected"), 1: ids(tokenizer, "kept")})
    driver = driver_for(tokenizer, engine)
    collected, kept = submit(driver), submit(driver)
    engine.on_step = lambda: driver.abandon(collected)  # as a generator's finalizer would
    assert "".join(deltas(driver, kept)) == "kept"
    assert engine.aborted == [0]


def test_a_refusal_reaches_its_own_reply_only(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({1: ids(tokenizer, "fine")}, refused=frozenset({0}))
    driver = driver_for(tokenizer, engine)
    refused, fine = submit(driver), submit(driver)
    assert "".join(deltas(driver, fine)) == "fine"
    with pytest.raises(RequestError, match="too many") as caught:
        refused.read()
    assert (caught.value.status, caught.value.code) == (429, "queue_full")


def test_an_engine_that_breaks_ends_every_reply_and_refuses_new_ones(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({0: ids(tokenizer, "ab"), 1: ids(tokenizer, "cd")})
    driver = driver_for(tokenizer, engine)
    first, second = submit(driver), submit(driver)

    def fail() -> None:
        raise RuntimeError("out of memory")

    engine.on_step = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        driver.wait([first])
    with pytest.raises(EngineDeadError, match="out of memory"):
        second.read()
    with pytest.raises(EngineDeadError, match="make a new LLM"):
        submit(driver)


def test_an_engine_that_loses_a_request_is_an_error_and_no_endless_loop(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({0: ids(tokenizer, "ab")})
    driver = driver_for(tokenizer, engine)
    reply = submit(driver)
    engine.running.clear()
    with pytest.raises(EngineDeadError, match="reply is missing"):
        driver.wait([reply])


def test_close_ends_open_replies_with_an_error_and_may_be_called_twice(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({0: ids(tokenizer, "abc")})
    driver = driver_for(tokenizer, engine)
    reply = submit(driver)
    driver.close()
    driver.close()
    assert engine.closed
    with pytest.raises(MinisglError, match="closed"):
        reply.read()
    with pytest.raises(MinisglError, match="closed"):
        submit(driver)
    driver.abandon(reply)


def test_threads_share_one_engine_and_each_gets_its_own_text(tokenizer: Tokenizer) -> None:
    wanted = {index: f"the answer of thread {index} " * 2 for index in range(8)}
    engine = ScriptedEngine({index: ids(tokenizer, text) for index, text in wanted.items()})
    driver = driver_for(tokenizer, engine)
    replies = [driver.submit([1], SamplingParams(max_tokens=60)) for _ in wanted]
    got: dict[int, str] = {}

    def read(reply: Reply) -> None:
        got[reply.request_id] = "".join(deltas(driver, reply))

    threads = [threading.Thread(target=read, args=(reply,)) for reply in replies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert got == wanted


def test_an_interrupt_waits_for_the_end_of_the_step(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({0: ids(tokenizer, "abc")})
    driver = driver_for(tokenizer, engine)
    reply = submit(driver)
    engine.on_step = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        driver.wait([reply])
    engine.on_step = lambda: None
    assert "".join(deltas(driver, reply)) == "abc"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait() -> None:
    reached = []

    def press_twice() -> None:
        with interrupts_deferred():
            for press in (1, 2):
                signal.raise_signal(signal.SIGINT)
                reached.append(press)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert reached == [1]


@pytest.mark.parametrize(("seed", "is_same"), [(None, False), (3, True)])
def test_seeds_are_fresh_in_every_process_unless_one_is_given(
    tokenizer: Tokenizer, seed: int | None, is_same: bool
) -> None:
    drawn = []
    for _ in range(2):
        engine = ScriptedEngine()
        driver = driver_for(tokenizer, engine, seed)
        submit(driver)
        submit(driver)
        driver.submit([1], SamplingParams(max_tokens=1, seed=8))
        assert len(set(engine.seeds)) == 3
        assert engine.seeds[2] == 8
        drawn.append(engine.seeds)
    assert (drawn[0] == drawn[1]) == is_same


def test_an_iterator_that_is_dropped_aborts_its_request(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine({0: ids(tokenizer, "dropped")})
    driver = driver_for(tokenizer, engine)

    def stream() -> Iterator[str]:
        reply = submit(driver)
        try:
            yield from deltas(driver, reply)
        finally:
            driver.abandon(reply)

    iterator = stream()
    assert next(iterator) == "d"
    del iterator
    gc.collect()
    assert not engine.has_work


@pytest.mark.parametrize("prompt", [[], [-1], [2**31], [True], ["text"]])
def test_prompts_that_are_no_tokens_are_refused(prompt: list) -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt(prompt, SamplingParams(), MAX_CONTEXT)
    assert caught.value.status == 400


@pytest.mark.parametrize("length", [MAX_CONTEXT, MAX_CONTEXT + 1, 10 * MAX_CONTEXT])
def test_a_prompt_that_leaves_no_room_is_refused(length: int) -> None:
    with pytest.raises(RequestError, match=str(MAX_CONTEXT)) as caught:
        check_prompt([1] * length, SamplingParams(), MAX_CONTEXT)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("asked", "given"), [(None, MAX_CONTEXT - 10), (1, 1), (53, 53), (54, 54), (55, 54), (10**9, 54)]
)
def test_max_tokens_is_the_room_at_most(asked: int | None, given: int) -> None:
    params = SamplingParams(max_tokens=asked, temperature=0.5, stop=("x",))
    fitted = check_prompt([1] * 10, params, MAX_CONTEXT)
    assert fitted.max_tokens == given
    assert (fitted.temperature, fitted.stop) == (0.5, ("x",))
