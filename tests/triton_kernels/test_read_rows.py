"""The gather at the beginning of a step."""

import random

import torch

from triton_kernels.read_rows import read_rows, read_rows_triton


def test_every_entry_is_its_rows_and_the_slot_lies_on_the_rows_page_unless_that_is_nobodys(device):
    rng = random.Random(0)
    for num_entries, num_lines, num_columns, page_size in ((1, 3, 1, 1), (5, 4, 7, 16), (200, 90, 3, 4)):
        ints = [[rng.randrange(1 << 20) for _ in range(num_lines)] for _ in range(2)]
        floats = [[rng.random() for _ in range(num_lines)] for _ in range(3)]
        seeds = [rng.randrange(-(1 << 63), 1 << 63) for _ in range(num_lines)]
        lengths = [rng.randrange(num_columns * page_size + 1) for _ in range(num_lines)]
        pages = [[rng.randrange(4) << 17 for _ in range(num_columns)] for _ in range(num_lines)]
        row_ids = rng.choices(range(num_lines), k=num_entries)
        last_token, top_k = (torch.tensor(values, dtype=torch.int32, device=device) for values in ints)
        temperature, top_p, min_p = (torch.tensor(values, device=device) for values in floats)
        for read in (read_rows, read_rows_triton):
            state = read(
                torch.tensor(row_ids, dtype=torch.int32, device=device),
                last_token,
                torch.tensor(lengths, dtype=torch.int32, device=device),
                torch.tensor(pages, dtype=torch.int32, device=device),
                temperature,
                top_k,
                top_p,
                min_p,
                torch.tensor(seeds, device=device),
                page_size,
            )
            assert [tensor.dtype for tensor in state] == [
                *(torch.int32,) * 4,
                torch.float32,
                torch.int32,
                *(torch.float32,) * 2,
                torch.int64,
            ]
            assert state.positions.tolist() == [lengths[row] for row in row_ids]
            assert torch.equal(state.context_len, state.positions + 1)
            assert state.slot_mapping.tolist() == [
                pages[row][lengths[row] // page_size] * page_size + lengths[row] % page_size
                if lengths[row] < num_columns * page_size and pages[row][lengths[row] // page_size]
                else -1
                for row in row_ids
            ]
            for got, table in (
                (state.token_ids, last_token),
                (state.temperature, temperature),
                (state.top_k, top_k),
                (state.top_p, top_p),
                (state.min_p, min_p),
            ):
                assert torch.equal(got, table[row_ids])
            assert state.seed.tolist() == [seeds[row] for row in row_ids]
