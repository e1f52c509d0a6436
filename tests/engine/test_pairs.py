"""Each two features work together: every request gets what the plain engine gives it alone.

feature_table.py has the features. A sample of the pairs runs with the suite; `pytest --all-pairs` runs all.
"""

import itertools
from collections.abc import Iterator

import pytest
from feature_table import FEATURES, NO_SUCH_MODEL, REFUSED_AT_START, REFUSED_IN_REQUESTS, Feature, Refusal
from joining_engines import always_joining
from pair_runs import EOS, Asked, Engines, Setup, check_answer, mix, started
from tiny_models import VOCAB_SIZE

from minisgl.errors import ConfigError, RequestError
from minisgl.request import SamplingParams
from minisgl.scheduler.request_factory import RequestFactory

SAMPLE_STRIDES = (1, 6)
"""The sample has each feature with the one that is this many rows further down the table."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
        pairs = list(itertools.combinations(FEATURES, 2))
        if not metafunc.config.option.all_pairs:
            pairs = sample()
        pairs = [pair for pair in pairs if {one.name for one in pair} not in map(set, NO_SUCH_MODEL)]
        metafunc.parametrize("pair", pairs, ids=[f"{one.name} + {other.name}" for one, other in pairs])


def sample() -> list[tuple[Feature, Feature]]:
    """Each feature with two others above it and two below."""
    num = len(FEATURES)
    return [
        (FEATURES[place], FEATURES[(place + stride) % num])
        for stride in SAMPLE_STRIDES
        for place in range(num)
    ]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with pytest.MonkeyPatch.context() as patch:
        always_joining(patch)
        engines = Engines(tmp_path_factory.mktemp("models"))
        yield engines
        engines.close()


def has_feature(asked: Asked, place: int) -> bool:
    """Of five requests, two have both features, two have one of them, and one has none."""
    return asked.number % 5 in ((0, 1, 2), (0, 1, 3))[place]


def test_with_two_features_a_request_gets_what_it_gets_alone_without_them(
    pair: tuple[Feature, Feature], engines: Engines
) -> None:
    setup = Setup(**{**pair[0].engine, **pair[1].engine})
    asked = mix()
    for place, feature in enumerate(pair):
        asked = [feature.change(one) if has_feature(one, place) else one for one in asked]
    asked = engines.resolve_turns(setup, asked)
    served = engines.serve(setup, asked)
    for one in asked:
        for index, answer in enumerate(served.answers[one.number]):
            check_answer(answer, engines.alone(setup, one, index), f"choice {index} of {one}")
    for place, feature in enumerate(pair):
        having = [one for one in asked if has_feature(one, place)]
        if feature.seen is not None:
            assert feature.seen(served, [one.number for one in having]), f"{feature.name} did not happen"
        else:
            assert any(
                engines.alone(setup, one).token_ids
                != engines.alone(setup, without(one, pair, place)).token_ids
                for one in having
            ), f"{feature.name} changed nothing"


def named(refusals: tuple[Refusal, ...]) -> list[str]:
    return [" + ".join(refusal.names) for refusal in refusals]


@pytest.mark.parametrize("refusal", REFUSED_AT_START, ids=named(REFUSED_AT_START))
def test_what_an_engine_can_not_do_together_is_refused_by_name_at_the_start(
    refusal: Refusal, engines: Engines
) -> None:
    with pytest.raises(ConfigError) as error:
        started(engines.model_folder(Setup(**refusal.setup)), **refusal.asked)
    assert refusal.message in str(error.value)


@pytest.mark.parametrize("refusal", REFUSED_IN_REQUESTS, ids=named(REFUSED_IN_REQUESTS))
def test_what_a_request_can_not_ask_for_together_is_refused_by_name(refusal: Refusal) -> None:
    factory = RequestFactory(max_context_tokens=64, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    with pytest.raises(RequestError) as error:
        factory.check(SamplingParams(**refusal.asked))
    assert refusal.message in error.value.message
    assert error.value.status == 400


def without(asked: Asked, pair: tuple[Feature, Feature], place: int) -> Asked:
    """The same request, prompt included, without the feature at `place`."""
    (plain,) = (one for one in mix() if one.number == asked.number)
    for other, feature in enumerate(pair):
        if has_feature(asked, other):
            plain = feature.without(plain) if other == place else feature.change(plain)
    return plain._replace(prompt=asked.prompt)
