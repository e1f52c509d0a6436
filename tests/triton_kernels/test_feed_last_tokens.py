"""Last tokens that come from the device's tables."""

import torch

from triton_kernels.feed_last_tokens import LAST_TOKEN, feed_last_tokens, feed_last_tokens_triton


def test_only_marked_tokens_of_real_rows_are_replaced(device):
    rng = torch.Generator().manual_seed(0)
    for num_entries in (1, 5, 200):
        max_rows = 210
        num_tokens = 3 * num_entries + 2
        token_ids = torch.randint(0, 1000, (num_tokens,), generator=rng).int()
        logit_index = torch.randperm(num_tokens, generator=rng)[:num_entries].int()
        row_ids = torch.randperm(max_rows, generator=rng)[:num_entries].int()
        if num_entries > 1:
            row_ids[-1], logit_index[-1] = max_rows, logit_index[0]  # padding points to somebody's token
        last_token = torch.randint(1000, 2000, (max_rows + 1,), generator=rng).int()
        marked = torch.rand(num_entries, generator=rng) < 0.5
        marked[0] = True
        token_ids[logit_index[marked].long()] = LAST_TOKEN
        expected = token_ids.tolist()
        for row, place in zip(row_ids.tolist(), logit_index.tolist(), strict=True):
            if row < max_rows and expected[place] == LAST_TOKEN:
                expected[place] = int(last_token[row])
        for feed in (feed_last_tokens, feed_last_tokens_triton):
            fed = token_ids.to(device)
            feed(fed, row_ids.to(device), logit_index.to(device), last_token.to(device), max_rows)
            assert fed.tolist() == expected
