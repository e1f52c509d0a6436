"""Launches step plans on the device and collects their tokens.

Promise: `launch` never waits for the device; `collect` waits for its own step only. Steps run in the
order of their launch, on one stream, so a step sees all that earlier ones wrote.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.engine.compiled import CompiledDecode
from minisgl.engine.inputs import HostPageTable, Stager, build_prefill, pack_row_inits
from minisgl.engine.rows import Rows
from minisgl.engine.steps import DecodeStep, prefill_step
from minisgl.models.decoder import Decoder
from minisgl.scheduler.plan import StepPlan


@dataclass
class LaunchedStep:
    """A step on its way: where its tokens will be on the host, and the event that says they are."""

    plan: StepPlan
    tokens: list[Tensor]  # int32 on the host, in the order of plan.sampled_rows
    done: torch.cuda.Event | None


class ModelRunner:
    """Executes plans; owns the device tables and their copy on the host."""

    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        page_size: int,
        device: torch.device,
        compiled: CompiledDecode | None,
    ) -> None:
        self.model = model
        self.rows = rows
        self._device = device
        self.pages = HostPageTable(rows.max_rows, rows.page_table.shape[1], page_size)
        self.stager = Stager(device)
        self._decode = DecodeStep(model, rows)
        self._compiled = compiled

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step: the rows' updates, then decodes, then chunks."""
        if plan.row_inits:
            self.rows.init_rows(self.stager.to_device(pack_row_inits(plan.row_inits)))
        change = self.pages.update(plan)
        if change is not None:
            index, page_ids = self.stager.to_device([change.flat_index, change.page_ids])
            self.rows.page_table.view(-1)[index] = page_ids
        tokens: list[Tensor] = []
        if plan.decode_rows:
            if self._compiled is not None:
                token_ids = self._compiled(plan.decode_rows)[: len(plan.decode_rows)]
            else:
                row_ids = torch.tensor(plan.decode_rows, dtype=torch.int32).to(self._device)
                token_ids = self._decode(row_ids)
            tokens.append(self._to_host(token_ids))
        if plan.chunks:
            batch = build_prefill(plan, self.pages, self.stager)
            token_ids = prefill_step(self.model, self.rows, batch)
            if len(batch.sampling):
                tokens.append(self._to_host(token_ids))
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return LaunchedStep(plan, tokens, done)

    def collect(self, step: LaunchedStep) -> list[int]:
        """Wait for a step; one token id per `plan.sampled_rows`."""
        if step.done is not None:
            step.done.synchronize()
        return [token for tensor in step.tokens for token in tensor.tolist()]

    def _to_host(self, token_ids: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return token_ids
        host = torch.empty(token_ids.shape, dtype=torch.int32, pin_memory=True)
        return host.copy_(token_ids, non_blocking=True)
