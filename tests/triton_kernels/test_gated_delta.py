"""Linear attention: the reference against transformers, kernels and CPU code against the reference."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from delta_layer import NAN, DeltaLayer, clone, int32
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNormGated,
    torch_recurrent_gated_delta_rule,
)

from triton_kernels import gated_delta_decode_hopper as hopper
from triton_kernels.gated_delta import (
    DeltaSaves,
    DeltaStates,
    DeltaWeights,
    gated_delta_decode_cpu,
    gated_delta_prefill_cpu,
    gated_delta_reference,
)
from triton_kernels.gated_delta_decode import _decode, gated_delta_decode_triton
from triton_kernels.gated_delta_prefill import DeltaPrefillConfig, gated_delta_prefill_triton

EPS = 1e-6
SMALL = DeltaLayer(key_heads=1, value_heads=2, key_dim=16, value_dim=16)
UNEVEN = DeltaLayer(key_heads=2, value_heads=6, key_dim=16, value_dim=32)
PREFILLS = {"triton": gated_delta_prefill_triton, "cpu": gated_delta_prefill_cpu}
DECODES = {"triton": gated_delta_decode_triton, "cpu": gated_delta_decode_cpu}


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def test_the_reference_equals_the_formulas_of_transformers() -> None:
    layer, count = UNEVEN, 21
    weights = layer.weights(torch.float32, "cpu")
    states = layer.states(3, torch.float32, "cpu")
    qkvz, ba = layer.inputs(count, torch.float32, "cpu")
    x, z = qkvz.split((layer.channels, layer.value_heads * layer.value_dim), dim=1)
    y = F.silu(F.conv1d(F.pad(x.T, (3, 0))[None], weights.conv[:, None], groups=layer.channels))[0].T
    key_size = layer.key_heads * layer.key_dim
    q, k, v = y.split((key_size, key_size, layer.value_heads * layer.value_dim), dim=1)
    q, k = (one.reshape(1, count, layer.key_heads, layer.key_dim) for one in (q, k))
    group = layer.value_heads // layer.key_heads  # transformers before 5.20 wants as many heads of keys
    b, a = ba.chunk(2, dim=1)
    o, state = torch_recurrent_gated_delta_rule(
        *(one.repeat_interleave(group, dim=2) for one in (q, k)),
        v.reshape(1, count, layer.value_heads, layer.value_dim),
        g=(-weights.a_log.exp() * F.softplus(a + weights.dt_bias))[None],
        beta=b.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = Qwen3_5RMSNormGated(layer.value_dim, eps=EPS)
    norm.weight.data = weights.norm
    expected = norm(o.reshape(-1, layer.value_dim), z.reshape(-1, layer.value_dim)).view(count, -1)
    rows = (int32([1], "cpu"), int32([count], "cpu"), int32([0, count], "cpu"))
    close(gated_delta_reference(qkvz, ba, weights, states, *rows, EPS), expected.detach())
    assert state is not None
    close(states.recurrent[1], state[0])


@pytest.mark.parametrize("runs", ["triton", "cpu"])
@pytest.mark.parametrize(
    ("layer", "lengths"),
    [(UNEVEN, [[70, 1, 0, 3]]), (SMALL, [[5, 130], [1, 64], [2, 3]]), (SMALL, [[64, 1], [1, 0], [66, 2]])],
)
def test_prefill_equals_the_reference_over_several_chunks(
    runs: str, layer: DeltaLayer, lengths: list[list[int]], device: str
) -> None:
    """Rows go on where their last chunk ended; each step has tokens of nobody at both ends."""
    weights = layer.weights(torch.float32, device)
    states = layer.states(6, torch.float32, device)
    expected_states = clone(states)
    done = [0] * len(lengths[0])
    line_of = [3, 0, 4, 1][: len(done)]
    for step, counts in enumerate(lengths):
        starts = [2]
        for count in counts:
            starts.append(starts[-1] + count)
        done = [a + b for a, b in zip(done, counts, strict=True)]
        qkvz, ba = layer.inputs(starts[-1] + 3, torch.float32, device, step)
        rows = (int32(line_of, device), int32(done, device), int32(starts, device))
        expected = gated_delta_reference(qkvz, ba, weights, expected_states, *rows, EPS)
        qkvz[:2], qkvz[starts[-1] :] = float("nan"), float("nan")
        close(PREFILLS[runs](qkvz, ba, weights, states, *rows, EPS), expected)
        close(states.recurrent, expected_states.recurrent)
        close(states.conv, expected_states.conv, 0)


@pytest.mark.parametrize("runs", ["triton", "cpu"])
def test_prefill_saves_states_in_the_middle_of_rows(runs: str, device: str) -> None:
    """Places within a chunk, at its end, and behind fewer tokens than the convolution sees; rows go on."""
    layer = DeltaLayer(key_heads=1, value_heads=2, key_dim=16, value_dim=32)
    weights = layer.weights(torch.float32, device)
    states, saved = layer.states(7, torch.float32, device), layer.states(6, torch.float32, device)
    expected_states, expected_saved = clone(states), clone(saved)
    line_of, done = [3, 0, 4, 1, 5], [0] * 5
    for step, (counts, befores, slots) in enumerate(
        [
            ([70, 3, 0, 150, 66], [69, 2, 0, 64, 66], [4, 1, -1, 0, -1]),
            ([2, 5, 9, 140, 1], [1, 3, 9, 100, 1], [2, 5, -1, 3, -1]),
        ]
    ):
        starts, parts = [2], [2]
        for count, before in zip(counts, befores, strict=True):
            starts.append(starts[-1] + count)
            parts += [starts[-2] + before, starts[-1]]
        done = [a + b for a, b in zip(done, counts, strict=True)]
        qkvz, ba = layer.inputs(starts[-1] + 3, torch.float32, device, step)
        rows = (int32(line_of, device), int32(done, device), int32(starts, device))
        where = (int32(parts, device), int32(slots, device))
        expected = gated_delta_reference(
            qkvz, ba, weights, expected_states, *rows, EPS, DeltaSaves(*where, expected_saved)
        )
        qkvz[:2], qkvz[starts[-1] :] = float("nan"), float("nan")
        found = PREFILLS[runs](qkvz, ba, weights, states, *rows, EPS, saves=DeltaSaves(*where, saved))
        close(found, expected)
        close(states.recurrent, expected_states.recurrent)
        close(states.conv, expected_states.conv, 0)
        close(saved.recurrent, expected_saved.recurrent)
        for slot, length, count, before in zip(slots, done, counts, befores, strict=True):
            # Entries of tokens that there are not, and the oldest one, which nobody reads, may be anything.
            for position in range(max(length - count + before - 3, 0), length - count + before):
                if slot >= 0:
                    close(saved.conv[slot, position % 4], expected_saved.conv[slot, position % 4], 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_saved_in_its_middle_gets_the_bits_of_two_prefills(dtype: torch.dtype, device: str) -> None:
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter has no bfloat16 products")
    layer = DeltaLayer(2, 4, 128, 128) if device == "cuda" else SMALL
    config = None if device == "cuda" else DeltaPrefillConfig(4, 16, 32, 4, 2)
    weights = layer.weights(dtype, device)
    once, twice, saved = (layer.states(2, dtype, device) for _ in range(3))
    qkvz, ba = layer.inputs(147, dtype, device)
    where = (int32([0], device), int32([147], device), int32([0, 147], device))
    saves = DeltaSaves(int32([0, 112, 147], device), int32([1], device), saved)
    found = gated_delta_prefill_triton(qkvz, ba, weights, once, *where, EPS, config, saves)
    parts = []
    for begin, end in ((0, 112), (112, 147)):
        where = (int32([0], device), int32([end], device), int32([0, end - begin], device))
        part = (qkvz[begin:end], ba[begin:end], weights, twice, *where, EPS, config)
        parts.append(gated_delta_prefill_triton(*part))
        if end == 112:
            assert torch.equal(saved.recurrent[1], twice.recurrent[0])
            assert torch.equal(saved.conv[1], twice.conv[0])
    assert torch.equal(found, torch.cat(parts))
    assert torch.equal(once.recurrent[0], twice.recurrent[0])
    assert torch.equal(once.conv[0], twice.conv[0])


@pytest.mark.parametrize("runs", ["triton", "cpu"])
@pytest.mark.parametrize("layer", [UNEVEN, SMALL])
def test_decode_equals_the_reference_and_padding_touches_nothing(
    runs: str, layer: DeltaLayer, device: str
) -> None:
    weights = layer.weights(torch.float32, device)
    states = layer.states(5, torch.float32, device)
    expected_states = clone(states)
    lines, padding = [2, 0, 4, 4], 4
    begin = {2: 1, 0: 3}
    starts = int32([0, 1, 2, 2, 2], device)
    for step in range(6):
        qkvz, ba = layer.inputs(4, torch.float32, device, step)
        lengths = int32([begin.get(line, 0) + step for line in lines], device)
        if step == 0:  # prompts first
            lengths = int32([1, 3, 1, 1], device)
            qkvz, ba = layer.inputs(4, torch.float32, device, 17)
            rows = (int32(lines[:2], device), lengths[:2], int32([0, 1, 4], device))
            gated_delta_reference(qkvz, ba, weights, expected_states, *rows, EPS)
            gated_delta_reference(qkvz, ba, weights, states, *rows, EPS)
            continue
        ids = int32(lines, device)
        expected = gated_delta_reference(qkvz, ba, weights, expected_states, ids, lengths, starts, EPS)
        qkvz[2:] = float("nan")
        found = DECODES[runs](qkvz, ba, weights, states, ids, lengths, EPS)
        close(found, expected)
        assert not found[2:].any()
        close(states.recurrent, expected_states.recurrent)
        close(states.conv, expected_states.conv, 0)
        assert states.recurrent[padding].isnan().all()
        assert states.conv[padding].isnan().all()


@pytest.mark.parametrize("decode", DECODES.values())
def test_a_row_whose_first_token_is_a_decode_starts_from_zeros(decode, device: str) -> None:
    layer = SMALL
    weights, states = layer.weights(torch.float32, device), layer.states(3, torch.float32, device)
    qkvz, ba = layer.inputs(1, torch.float32, device)
    expected_states = clone(states)
    ids, lengths = int32([1], device), int32([1], device)
    rows = (ids, lengths, int32([0, 1], device))
    expected = gated_delta_reference(qkvz, ba, weights, expected_states, *rows, EPS)
    close(decode(qkvz, ba, weights, states, ids, lengths, EPS), expected)
    close(states.recurrent, expected_states.recurrent)


@pytest.mark.parametrize("prefill", PREFILLS.values())
def test_equal_tokens_that_overwrite_each_other_keep_their_precision(prefill, device: str) -> None:
    """Equal keys, betas of 1 and no decay: a series of powers would cancel by 18 digits."""
    layer = SMALL
    weights = layer.weights(torch.float32, device)._replace(
        a_log=torch.full((2,), -20.0, device=device), dt_bias=torch.zeros(2, device=device)
    )
    states = layer.states(2, torch.float32, device)
    expected_states = clone(states)
    qkvz, ba = layer.inputs(128, torch.float32, device)
    qkvz[:] = qkvz[:1]
    ba[:, :2] = 20.0
    ba[:, 2:] = 0.0
    rows = (int32([0], device), int32([128], device), int32([0, 128], device))
    expected = gated_delta_reference(
        qkvz.double(), ba.double(), _doubled(weights), _doubled(expected_states), *rows, EPS
    )
    close(prefill(qkvz, ba, weights, states, *rows, EPS), expected.float(), 1e-4)


@pytest.mark.parametrize("prefill", PREFILLS.values())
@pytest.mark.parametrize("share", [0.03, 0.5, 1.0])
@pytest.mark.parametrize("most", [-30.0, -1000.0, float("-inf")])
def test_tokens_that_forget_everything_leave_the_decays_of_others_exact(
    prefill, share: float, most: float, device: str
) -> None:
    """Differences of sums with such a decay would lose the small ones, and of two infinite sums be NaN."""
    layer = SMALL
    weights = layer.weights(torch.float32, device)._replace(
        a_log=torch.zeros(2, device=device), dt_bias=torch.zeros(2, device=device)
    )
    states = layer.states(3, torch.float32, device)
    expected_states = _doubled(states)
    for step, end in enumerate((130, 194)):
        count = end - 130 * step
        qkvz, ba = layer.inputs(count, torch.float32, device, step)
        forgets = torch.rand(count, 2, generator=torch.Generator().manual_seed(step)) < share
        ba[:, :2] = 0.5
        ba[:, 2:] = torch.where(forgets, -most, -6.0)
        rows = (int32([1], device), int32([end], device), int32([0, count], device))
        expected = gated_delta_reference(
            qkvz.double(), ba.double(), _doubled(weights), expected_states, *rows, EPS
        )
        close(prefill(qkvz, ba, weights, states, *rows, EPS), expected.float(), 2e-4)
        close(states.recurrent, expected_states.recurrent.float(), 1e-4)


@pytest.mark.parametrize("runs", ["triton", "cpu"])
@pytest.mark.parametrize("a", [-5.0, -10.0, -14.0, -18.0])
def test_a_decay_near_zero_keeps_its_digits(runs: str, a: float, device: str) -> None:
    """It acts on tens of thousands of tokens, so softplus must be right to its last digits."""
    layer = SMALL
    weights = layer.weights(torch.float32, device)._replace(
        a_log=torch.full((2,), -5.0 - a, device=device), dt_bias=torch.zeros(2, device=device)
    )
    states = layer.states(2, torch.float32, device)
    expected_states = _doubled(states)
    qkvz, ba = layer.inputs(66, torch.float32, device)
    ba[:, :2] = -200.0
    ba[0, :2] = 200.0  # only the first token writes, the others let it fade
    ba[:, 2:] = a
    rows = (int32([0], device), int32([64], device), int32([0, 64], device))
    exact = (_doubled(weights), expected_states)
    gated_delta_reference(qkvz[:64].double(), ba[:64].double(), *exact, *rows, EPS)
    PREFILLS[runs](qkvz[:64], ba[:64], weights, states, *rows, EPS)
    for at in (64, 65):
        one = (int32([0], device), int32([at + 1], device))
        span = slice(at, at + 1)
        gated_delta_reference(
            qkvz[span].double(), ba[span].double(), *exact, *one, int32([0, 1], device), EPS
        )
        DECODES[runs](qkvz[span], ba[span], weights, states, *one, EPS)
    expected = expected_states.recurrent[0]
    assert (states.recurrent[0] - expected).abs().max() < 1e-5 * expected.abs().max()


def _doubled(tensors):
    return type(tensors)(*(one.double() for one in tensors))


def test_chunks_that_end_at_multiples_of_64_change_no_bit(device: str) -> None:
    layer = SMALL
    weights = layer.weights(torch.float32, device)
    qkvz, ba = layer.inputs(150, torch.float32, device)
    whole, parts = (layer.states(2, torch.float32, device) for _ in range(2))
    ids = int32([0], device)
    expected = gated_delta_prefill_triton(
        qkvz, ba, weights, whole, ids, int32([150], device), int32([0, 150], device), EPS
    )
    found = []
    for first, end in ((0, 64), (64, 128), (128, 150)):
        rows = (ids, int32([end], device), int32([0, end - first], device))
        found.append(gated_delta_prefill_triton(qkvz[first:end], ba[first:end], weights, parts, *rows, EPS))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(parts.recurrent[0], whole.recurrent[0])


@pytest.mark.parametrize("block_e", [16, 32])
def test_the_configuration_of_prefill_changes_rounding_only(block_e: int, device: str) -> None:
    layer = DeltaLayer(key_heads=1, value_heads=1, key_dim=32, value_dim=32)
    weights = layer.weights(torch.float16, device)
    states = layer.states(2, torch.float16, device)
    qkvz, ba = layer.inputs(70, torch.float16, device)
    exact = DeltaStates(states.conv.double(), states.recurrent.double())
    rows = (int32([0], device), int32([70], device), int32([0, 70], device))
    doubled = DeltaWeights(*(one.double() for one in weights))
    expected = gated_delta_reference(qkvz.double(), ba.double(), doubled, exact, *rows, EPS)
    config = DeltaPrefillConfig(4, block_e, block_e, 4, 2)
    found = gated_delta_prefill_triton(qkvz, ba, weights, states, *rows, EPS, config)
    assert (found.double() - expected).abs().max() < 0.02 * expected.abs().max()


def test_a_prompt_among_others_has_the_bits_that_it_has_alone(device: str) -> None:
    # Alone it has few programs of few columns, among others fewer programs of more columns.
    on_gpu = device == "cuda"
    layer = DeltaLayer(16, 32, 128, 128) if on_gpu else DeltaLayer(1, 1, 32, 32)
    dtype = torch.bfloat16 if on_gpu else torch.float16
    config = None if on_gpu else DeltaPrefillConfig(4, 16, 32, 4, 2)
    ends = (70, 75, 150)
    weights = layer.weights(dtype, device)
    together, alone = (layer.states(4, dtype, device) for _ in range(2))
    qkvz, ba = layer.inputs(ends[-1], dtype, device)
    lengths = int32([end - begin for begin, end in itertools.pairwise((0, *ends))], device)
    rows = (int32([0, 1, 2], device), lengths, int32([0, *ends], device))
    expected = gated_delta_prefill_triton(qkvz, ba, weights, together, *rows, EPS, config)
    for line, (begin, end) in enumerate(itertools.pairwise((0, *ends))):
        row = (int32([line], device), int32([end - begin], device), int32([0, end - begin], device))
        found = gated_delta_prefill_triton(qkvz[begin:end], ba[begin:end], weights, alone, *row, EPS, config)
        assert torch.equal(found, expected[begin:end])
    assert torch.equal(alone.recurrent[:3], together.recurrent[:3])


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.mark.parametrize("kernel", ["portable", pytest.param("hopper", marks=on_hopper)])
def test_a_row_decodes_as_it_does_alone(kernel: str, device: str) -> None:
    # On a GPU so many that the portable kernel has fewer registers, and Hopper's programs have several heads.
    layer, count = (DeltaLayer(16, 32, 128, 128), 70) if device == "cuda" else (SMALL, 5)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weights = layer.weights(dtype, device)
    states = layer.states(count + 1, dtype, device)
    qkvz, ba = layer.inputs(count, dtype, device)
    if kernel == "hopper":
        qkvz, ba = qkvz.contiguous(), ba.contiguous()
    assert hopper.takes(qkvz, weights, states) == (kernel == "hopper")
    torch.manual_seed(0)
    for one in states:
        one.normal_(0.0, 0.1)
    alone = clone(states)
    ids, lengths = int32([*range(count)], device), int32([5 + r for r in range(count)], device)
    together = gated_delta_decode_triton(qkvz, ba, weights, states, ids, lengths, EPS)
    for r in (0, count // 2, count - 1):
        one = slice(r, r + 1)
        found = gated_delta_decode_triton(qkvz[one], ba[one], weights, alone, ids[one], lengths[one], EPS)
        assert torch.equal(found[0], together[r])
        assert torch.equal(alone.recurrent[r], states.recurrent[r])


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "count"), [(2, 6, 1), (1, 1, 7), (16, 32, 4), (16, 32, 5), (16, 48, 40)]
)
def test_hopper_decode_equals_the_reference(
    key_heads: int, value_heads: int, count: int, dtype: torch.dtype
) -> None:
    """Programs with one tile (the first three) and with several; rows of 1 to 6 tokens and padding."""
    layer = DeltaLayer(key_heads, value_heads, hopper.HEAD_DIM, hopper.HEAD_DIM)
    weights = layer.weights(dtype, "cuda")
    states = layer.states(count + 4, dtype, "cuda")
    doubled = DeltaWeights(*(one.double() for one in weights))
    torch.manual_seed(count)
    lines = torch.randperm(count + 3)[:count].tolist()
    padding = count + 3
    begin = [1 + i % 3 for i in range(count)]
    for line, length in zip(lines, begin, strict=True):  # what older tokens left behind
        for position in range(length - 1):
            states.conv[line, position].normal_()
        if length > 1:
            states.recurrent[line].normal_(0.0, 0.1)
    expected = DeltaStates(*(one.double() for one in states))
    for step in range(4):
        qkvz, ba = (one.contiguous() for one in layer.inputs(2 * count, dtype, "cuda", step))
        qkvz[1::2], ba[1::2] = NAN, NAN
        ids = int32([line for one in lines for line in (one, padding)], "cuda")
        lengths = int32([n for one in begin for n in (one + step, 1)], "cuda")
        assert hopper.takes(qkvz, weights, states)
        found = hopper.gated_delta_decode_hopper(qkvz, ba, weights, states, ids, lengths, EPS)
        real = (ids[::2].contiguous(), lengths[::2].contiguous(), int32([*range(count + 1)], "cuda"))
        wanted = gated_delta_reference(qkvz[::2].double(), ba[::2].double(), doubled, expected, *real, EPS)
        assert not found[1::2].any()
        tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3
        torch.testing.assert_close(found[::2].double(), wanted, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(
            states.recurrent.double(), expected.recurrent, atol=1e-5, rtol=1e-5, equal_nan=True
        )
        torch.testing.assert_close(states.conv.double(), expected.conv, atol=0, rtol=0, equal_nan=True)


def test_torch_compile_is_told_what_decode_writes(device: str) -> None:
    layer = SMALL
    weights = layer.weights(torch.float32, device)
    states = layer.states(4, torch.float32, device)
    qkvz, ba = layer.inputs(3, torch.float32, device)
    rows = (int32([0, 1, 2], device), int32([1, 1, 1], device))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(_decode, (qkvz, ba, *weights, *states, *rows, EPS), test_utils=checks)
