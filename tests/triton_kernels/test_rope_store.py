"""RoPE and KV store: the reference against complex multiplication, the kernel against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_kernels.rms_norm import rms_norm
from triton_kernels.rope_store import rope_store, rope_store_reference, rope_store_triton


def table(max_position: int, head_dim: int) -> torch.Tensor:
    angles = torch.arange(max_position)[:, None] * 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def test_reference_rotates_like_complex_numbers_and_stores_by_slot():
    heads, kv_heads, head_dim, page_size = 5, 2, 12, 4
    positions, slots = torch.tensor([3, 0, 17, 9]).int(), torch.tensor([6, 27, -1, 0]).int()
    qkv = torch.randn(4, (heads + 2 * kv_heads) * head_dim)
    k_cache, v_cache = torch.full((2, 7, page_size, kv_heads, head_dim), float("nan"))
    q = rope_store(qkv, table(20, head_dim), positions, slots, k_cache, v_cache)
    x = qkv.view(4, -1, head_dim)
    turn = torch.polar(
        torch.ones(4, head_dim // 2),
        positions[:, None] * 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim),
    )
    turn[2] = 1  # a padding token is not rotated
    rotated = torch.complex(*x.chunk(2, dim=-1)) * turn[:, None]
    rotated = torch.cat((rotated.real, rotated.imag), dim=-1)
    torch.testing.assert_close(q, rotated[:, :heads])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(
                k_cache[slot // page_size, slot % page_size], rotated[token, heads : heads + kv_heads]
            )
            assert torch.equal(v_cache[slot // page_size, slot % page_size], x[token, heads + kv_heads :])
    assert k_cache.isnan().any(-1).any(-1).sum() == 7 * page_size - 3


@settings(max_examples=25)
@given(
    tokens=st.integers(1, 19),
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([16, 64, 80, 96]),
    page_size=st.sampled_from([1, 4, 16]),
    half=st.booleans(),
    norms=st.sampled_from([(False, False), (True, True), (True, False), (False, True)]),
    values=st.sampled_from([None, "values", "keys"]),
    seed=st.integers(0, 100),
)
def test_kernel_equals_the_reference(tokens, heads, kv_heads, head_dim, page_size, half, norms, values, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if half else torch.float32
    rng = torch.Generator().manual_seed(seed)
    width = (heads + kv_heads * (1 if values == "keys" else 2)) * head_dim
    qkv = torch.randn((tokens, width + 16), generator=rng).to(device, dtype)[:, :width]
    positions = torch.randint(0, 50, (tokens,), generator=rng).int().to(device)
    slots = (torch.randperm(20 * page_size, generator=rng)[:tokens].int() - 1).to(device)
    q_weight, k_weight = (
        torch.randn(head_dim, generator=rng).to(device, dtype) if norm else None for norm in norms
    )
    pools = []
    outs = []
    for store in (rope_store_reference, rope_store_triton):
        # Both pools are views of one tensor, layer 1 of 2.
        both = torch.full((20, page_size, 2, 2, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
        outs.append(
            store(
                qkv,
                table(50, head_dim).to(device),
                positions,
                slots,
                both[:, :, 1, 0],
                both[:, :, 1, 1],
                q_weight,
                k_weight,
                1e-5,
                None,
                values,
            )
        )
        pools.append(both)
    tolerance = (4e-3 if any(norms) or values else 1e-3) if half else 1e-5
    torch.testing.assert_close(outs[1], outs[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pools[1], pools[0], atol=tolerance, rtol=tolerance)


def test_norms_are_those_of_rms_norm_before_the_rotation(device):
    heads, kv_heads, head_dim, tokens = 6, 2, 32, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device)
    q_weight, k_weight = torch.randn(2, head_dim, device=device)
    by_head = qkv.view(-1, heads + 2 * kv_heads, head_dim).clone()
    by_head[:, :heads] = rms_norm(by_head[:, :heads].reshape(-1, head_dim), q_weight, 0.1).view(
        tokens, heads, head_dim
    )
    by_head[:, heads:-kv_heads] = rms_norm(
        by_head[:, heads:-kv_heads].reshape(-1, head_dim), k_weight, 0.1
    ).view(tokens, kv_heads, head_dim)
    places = torch.arange(tokens, dtype=torch.int32, device=device)
    plain, fused = torch.zeros(2, 2, 2, 4, kv_heads, head_dim, device=device)
    cos_sin = table(9, head_dim).to(device)
    expected = rope_store(by_head.flatten(1), cos_sin, places, places, plain[0], plain[1])
    for store in (rope_store, rope_store_triton):
        q = store(qkv, cos_sin, places, places, fused[0], fused[1], q_weight, k_weight, 0.1)
        torch.testing.assert_close(q, expected)
        torch.testing.assert_close(fused, plain)
        fused.zero_()


@pytest.mark.parametrize("source", ["values", "keys"])
def test_normalised_values_have_a_mean_square_of_one(source, device):
    heads, kv_heads, head_dim, tokens = 3, 2, 32, 5
    given_heads = heads + kv_heads * (1 if source == "keys" else 2)
    qkv = 3 * torch.randn(tokens, given_heads * head_dim, device=device)
    k_weight = torch.randn(head_dim, device=device)
    x = qkv.view(tokens, given_heads, head_dim)[:, -kv_heads:].double()
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()
    places = torch.arange(tokens, dtype=torch.int32, device=device)
    for store in (rope_store, rope_store_triton, rope_store_reference):
        pools = torch.zeros(2, 2, 4, kv_heads, head_dim, device=device)
        norms = (None, k_weight, 0.1, None, source)
        q = store(qkv, table(9, head_dim).to(device), places, places, pools[0], pools[1], *norms)
        assert q.shape == (tokens, heads, head_dim)
        torch.testing.assert_close(pools[1].flatten(0, 1)[:tokens], expected.float())


@pytest.mark.parametrize("position", [-1, 10**6])
def test_a_padding_token_position_is_not_trusted(position, device):
    qkv = torch.randn(1, 4 * 16, device=device)
    pools = torch.full((2, 2, 4, 1, 16), 7.0, device=device)
    for store in (rope_store, rope_store_triton):
        q = store(
            qkv,
            table(8, 16).to(device),
            torch.tensor([position], dtype=torch.int32, device=device),
            torch.tensor([-1], dtype=torch.int32, device=device),
            pools[0],
            pools[1],
        )
        torch.testing.assert_close(q.flatten(), qkv[0, :32])
        assert (pools == 7.0).all()
