"""Launches step plans on the device and collects their tokens.

Promise: `launch` never waits for the device; `collect` waits for its own step only. Steps run in the
order of their launch, on one stream, so a step sees all that earlier ones wrote.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.engine.compiled import CompiledDecode
from minisgl.engine.inputs import HostPageTable, Stager, build_prefill, pack_row_inits
from minisgl.engine.prefill_graphs import PrefillGraphs
from minisgl.engine.rows import Rows
from minisgl.engine.steps import DecodeStep, prefill_step
from minisgl.models.decoder import Decoder
from minisgl.scheduler.plan import Chunk, StepPlan


class HostTokens(NamedTuple):
    """Tokens that are copied to the host, and which of them count."""

    token_ids: Tensor  # int32
    places: list[int]

    def read(self) -> list[int]:
        """Only after the copy is over."""
        token_ids = self.token_ids.tolist()
        return [token_ids[place] for place in self.places]


@dataclass
class LaunchedStep:
    """A step on its way: where its tokens will be on the host, and the event that says they are."""

    plan: StepPlan
    tokens: list[HostTokens]  # all together in the order of plan.sampled_rows
    done: torch.cuda.Event | None


class ModelRunner:
    """Executes plans; owns the device tables and their copy on the host."""

    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        pages: HostPageTable,
        stager: Stager,
        device: torch.device,
        compiled: CompiledDecode | None,
        prefill_graphs: PrefillGraphs | None,
    ) -> None:
        self.model = model
        self.rows = rows
        self._device = device
        self.pages = pages
        self.stager = stager
        self._decode = DecodeStep(model, rows)
        self._compiled = compiled
        self._prefill_graphs = prefill_graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step: the rows' updates, then decodes, then chunks."""
        if plan.row_inits:
            self.rows.init_rows(self.stager.to_device(pack_row_inits(plan.row_inits)))
        change = self.pages.update(plan)
        if change is not None:
            index, page_ids = self.stager.to_device([change.flat_index, change.page_ids])
            self.rows.page_table.view(-1)[index] = page_ids
        tokens: list[HostTokens] = []
        if plan.decode_rows:
            if self._compiled is not None:
                token_ids = self._compiled(plan.decode_rows)[: len(plan.decode_rows)]
            else:
                row_ids = torch.tensor(plan.decode_rows, dtype=torch.int32).to(self._device)
                token_ids = self._decode(row_ids)
            tokens.append(HostTokens(self._to_host(token_ids), list(range(len(plan.decode_rows)))))
        if plan.chunks:
            token_ids = self._prefill(plan.chunks)
            sampling = [place for place, chunk in enumerate(plan.chunks) if chunk.samples]
            if sampling:
                tokens.append(HostTokens(self._to_host(token_ids), sampling))
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return LaunchedStep(plan, tokens, done)

    def collect(self, step: LaunchedStep) -> list[int]:
        """Wait for a step; one token id per `plan.sampled_rows`."""
        if step.done is not None:
            step.done.synchronize()
        return [token for tokens in step.tokens for token in tokens.read()]

    def _prefill(self, chunks: tuple[Chunk, ...]) -> Tensor:
        """A token for each chunk's row, int32 [at least len(chunks)]."""
        graphs = self._prefill_graphs
        bucket = graphs.bucket_for(chunks) if graphs is not None else None
        if graphs is None or bucket is None:
            return prefill_step(self.model, self.rows, build_prefill(chunks, self.pages, self.stager))
        return graphs.run(chunks, bucket, self.pages)

    def _to_host(self, token_ids: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return token_ids
        host = torch.empty(token_ids.shape, dtype=torch.int32, pin_memory=True)
        return host.copy_(token_ids, non_blocking=True)
