"""The scatter at the end of a step."""

import torch

from triton_kernels.advance_rows import advance_rows, advance_rows_triton


def test_real_rows_advance_and_padding_rows_change_nothing(device):
    rng = torch.Generator().manual_seed(0)
    for num_entries in (1, 5, 200):
        max_rows = 210
        row_ids = torch.randperm(max_rows + 3, generator=rng)[:num_entries].int()
        row_ids[0] = max_rows
        tokens = torch.randint(0, 1000, (num_entries,), generator=rng).int()
        lengths = torch.randint(0, 1000, (num_entries,), generator=rng).int()
        expected_token, expected_length = torch.full((2, max_rows + 3), -7, dtype=torch.int32)
        for row, token, length in zip(row_ids.tolist(), tokens.tolist(), lengths.tolist(), strict=True):
            if row < max_rows:
                expected_token[row], expected_length[row] = token, length
        for advance in (advance_rows, advance_rows_triton):
            last_token, context_len = torch.full((2, max_rows + 3), -7, dtype=torch.int32, device=device)
            advance(
                row_ids.to(device), tokens.to(device), lengths.to(device), last_token, context_len, max_rows
            )
            assert torch.equal(last_token.cpu(), expected_token)
            assert torch.equal(context_len.cpu(), expected_length)


def test_where_no_token_was_sampled_the_next_step_finds_one_that_exists(device):
    row_ids, tokens, lengths = torch.tensor([[0, 2, 5], [-1, 7, -1], [4, 5, 6]], dtype=torch.int32)
    for advance in (advance_rows, advance_rows_triton):
        last_token, context_len = torch.full((2, 4), 9, dtype=torch.int32, device=device)
        advance(row_ids.to(device), tokens.to(device), lengths.to(device), last_token, context_len, 3)
        assert last_token.tolist() == [0, 9, 7, 9]
        assert context_len.tolist() == [4, 9, 5, 9]
