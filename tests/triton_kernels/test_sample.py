"""Sampling: the reference against sorted Python lists and chi-square, the kernel against the reference."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_kernels.sample import sample, sample_triton
from triton_kernels.sample_reference import NO_TOKEN, sample_reference, support_reference, uniform_reference

INF = float("inf")


def options(
    num_rows: int,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    seed: Any = 0,
    position: Any = 0,
):
    """The six per-row tensors, each from a number or a list."""

    def column(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * num_rows, dtype=dtype)

    return (
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(seed, torch.int64),
        column(position, torch.int32),
    )


def support_by_list(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """The support as the docstring defines it, token by token."""
    largest = max(logits)
    weights = [math.exp((x - largest) / temperature) for x in logits]
    kept = list(range(len(logits)))
    if top_k > 0:
        kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        kept = [i for i in kept if logits[i] >= kth]
    if top_p < 1:
        total = math.fsum(weights[i] for i in kept)
        kept = [
            i
            for i in kept
            if logits[i] == largest
            or math.fsum(weights[j] for j in kept if logits[j] > logits[i]) < top_p * total
        ]
    return {i for i in kept if weights[i] >= min_p or logits[i] == largest}


def test_uniform_is_philox_4x32_10():
    # Known answers of the Random123 distribution; the last has its words 2 and 3 of the counter at 0 as here.
    assert int(uniform_reference(torch.tensor([0]), torch.tensor([0]).int())[0] * 2**24) == 0x6627E8D5 >> 8


def test_uniform_is_uniform_over_seeds_and_over_positions():
    steps = torch.arange(4000)
    for u in (
        uniform_reference(steps, torch.full((4000,), 7).int()),
        uniform_reference(torch.full((4000,), -3), steps.int()),
    ):
        counts = torch.histc(u, bins=20, min=0, max=1)
        assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


@settings(max_examples=60)
@given(
    logits=st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=30),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_reference_support_is_the_defined_one(logits, temperature, top_k, top_p, min_p):
    columns = options(1, temperature, top_k, top_p, min_p)
    _, kept = support_reference(torch.tensor([logits]), *columns[:4])
    assert set(kept[0].nonzero().flatten().tolist()) == support_by_list(
        logits, float(columns[0][0]), top_k, float(columns[2][0]), float(columns[3][0])
    )


def test_draws_follow_the_distribution():
    rows = 6000
    logits = torch.tensor([0.3, -1.0, 2.0, 1.1, 0.0, 1.9, -4.0, 0.7]).repeat(rows, 1)
    columns = options(rows, temperature=0.8, top_p=0.95, seed=11, position=list(range(rows)))
    ids = sample(logits, *columns)
    weights, kept = support_reference(logits[:1], *(column[:1] for column in columns[:4]))
    expected = (weights * kept)[0] / (weights * kept).sum() * rows
    counts = torch.bincount(ids, minlength=8)
    assert (counts[~kept[0]] == 0).all()
    chi_square = ((counts - expected) ** 2 / expected)[kept[0]].sum()
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 7, 300, 4096, 5000]),
    rows=st.integers(1, 3),
    half=st.booleans(),
    coarse=st.booleans(),
    data=st.data(),
)
def test_kernel_equals_the_reference(seed, vocab, rows, half, coarse, data):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn((rows, vocab + 2), generator=rng)[:, 1:-1]
    logits = logits.round() if coarse else logits
    logits = logits.half() if half else logits

    def draw(*values):
        return data.draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows))

    columns = options(
        rows,
        draw(0.0, 0.6, 1.0, 1.5, 1e-6),
        draw(0, -1, 1, 5, 50, 10**6),
        draw(1.0, 0.0, 0.1, 0.8, 0.99),
        draw(0.0, 0.02, 0.3, 1.0),
        draw(0, 1, -5, 2**62),
        draw(0, 3, 100_000),
    )
    got = sample_triton(logits.to(device), *(column.to(device) for column in columns)).cpu()
    assert torch.equal(got, sample_reference(logits, *columns))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.5, 0, 0.9, 0.0),  # few ids stay
        (2.5, 0, 0.9, 0.0),  # most stay
        (2.5, 0, 0.3, 0.01),
        (1.0, 0, 0.999, 0.0),
        (1.0, 300, 0.8, 0.0),
        (1.0, 4000, 1.0, 0.0),
    ],
)
def test_kernel_equals_the_reference_over_a_large_vocabulary(temperature, top_k, top_p, min_p, device):
    rng = torch.Generator().manual_seed(3)
    logits = 2.5 * torch.randn((5, 17_000), generator=rng)
    logits[1, :2000] += 6.0  # likely ids side by side
    logits[2] = logits[2].round()  # many equals
    logits[3] *= 0.01
    logits[4, 10_000:] = -INF
    columns = options(5, temperature, top_k, top_p, min_p, seed=[1, 2, 3, 4, 5])
    got = sample_triton(logits.to(device), *(column.to(device) for column in columns)).cpu()
    assert torch.equal(got, sample_reference(logits, *columns))


@pytest.mark.parametrize("draw", [sample, sample_triton])
def test_greedy_takes_the_lowest_of_equals_whatever_else_is_asked(draw, device):
    logits = torch.randn(4, 9000)
    logits[:, [4500, 17, 8999]] = 50.0
    columns = options(4, [0.0, 1.0, 0.0, 0.7], [0, 3, 2, 0], [0.9, 0.5, 0.1, 0.9], 0.1, seed=5)
    ids = draw(logits.to(device), *(column.to(device) for column in columns))
    assert ids[0] == ids[2] == 17
    assert ids[1].item() in (17, 4500, 8999)
    assert ids.dtype == torch.int32


@pytest.mark.parametrize("draw", [sample, sample_triton])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_ids_stay_in_the_vocabulary_for_any_logits(draw, device):
    vocab = 4100
    logits = torch.stack(
        [
            torch.full((vocab,), INF),
            torch.full((vocab,), 3.4e38),
            torch.full((vocab,), -3.4e38),
            torch.zeros(vocab),
        ]
    )
    logits[2, 4099] = INF
    logits[3, 77] = float("nan")
    for temperature in (0.0, 1.0, 1e-30):
        for top_k, top_p, min_p in ((0, 1.0, 0.0), (2, 0.5, 0.5), (0, float("nan"), float("nan"))):
            columns = options(4, temperature, top_k, top_p, min_p, seed=[1, 2, 3, 4])
            ids = draw(logits.to(device), *(column.to(device) for column in columns))
            assert ((ids >= 0) & (ids < vocab)).all()
            assert ids[2] == 4099
            assert ids[3] != 77


@pytest.mark.parametrize("draw", [sample, sample_triton])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_row_without_any_logit_above_minus_infinity_has_no_token(draw, device):
    vocab = 4100
    logits = torch.full((10, vocab), float("nan"), dtype=torch.bfloat16)
    logits[5:8] = -INF
    logits[:, ::2] = -INF
    logits[8, vocab - 1] = -3.0e38  # one is enough
    logits[9] = torch.arange(vocab) / vocab
    columns = options(
        10,
        [0.0, 0.8, 1e-30, 0.8, 0.8, 0.0, 0.8, 1.0, 0.9, 0.9],
        [0, 0, 2, 0, 0, 0, 0, 50, 0, 0],
        [1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.9, 0.9, 0.9],
        [0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.1, 0.0, 0.0],
        seed=5,
    )
    got = draw(logits.to(device), *(column.to(device) for column in columns)).cpu()
    assert got[:8].tolist() == [NO_TOKEN] * 8
    assert got[8] == vocab - 1
    assert torch.equal(got[9:], sample_reference(logits[9:], *(column[9:] for column in columns)))


@pytest.mark.parametrize("draw", [sample, sample_triton])
@pytest.mark.parametrize("scale", [64, 600])  # whole groups; so many equals that it takes the long way
@pytest.mark.parametrize(("top_p", "stay"), [(0.75, False), (0.7500001, True)])
def test_what_reaches_top_p_exactly_leaves_nothing_of_the_next_logit(draw, scale, top_p, stay, device):
    # Logits so close that all weights are exactly 1; three quarters of them belong to the larger one.
    logits = torch.full((1, 4100), -INF)
    logits[:, : 4 * scale] = 1e-30
    logits[:, :scale] = 0.0
    position = 2
    assert uniform_reference(torch.tensor([0]), torch.tensor([position])) < 0.25  # the first quarter's turn
    (token,) = draw(
        logits.to(device), *(column.to(device) for column in options(1, top_p=top_p, position=position))
    ).tolist()
    assert token < 4 * scale
    assert (token < scale) == stay


def test_a_draw_does_not_depend_on_the_rest_of_the_batch(device):
    logits = torch.randn(3, 500, device=device)
    columns = [
        column.to(device)
        for column in options(3, [1.0, 0.0, 0.7], [0, 0, 9], [0.9, 1.0, 1.0], 0.0, [7, 8, 9], [1, 2, 3])
    ]
    for draw in (sample, sample_triton):
        together = draw(logits, *columns)
        for r in range(3):
            assert draw(logits[r : r + 1], *(column[r : r + 1] for column in columns))[0] == together[r]
