"""Runs step plans on a model: prepare on the host, compute on the lane. No policy."""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_async.backend.ops import Logprobs, Ops, Sampled, SamplingBatch, StepContext, StepRows
from omni_async.models.protocol import StageModel
from omni_async.runner.device_state import DeviceState
from omni_async.runner.lane import Lane
from omni_async.sampling.logprobs import HostLogprobs
from omni_async.sampling.table import SamplingTable
from omni_async.scheduler.plan import Row, StepOutput, StepPlan

SCORED_ROWS = 128
"""Prompt positions whose logits are made at once, so that a long prompt's never fill the memory."""


@dataclass(frozen=True, slots=True)
class HostRows:
    """A plan's rows as arrays."""

    slots: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sampled: NDArray[np.int64]
    """Indices of the rows that draw."""

    @classmethod
    def of(cls, rows: tuple[Row, ...]) -> "HostRows":
        """Turn row tuples into arrays, in one pass each."""
        return cls(
            slots=np.array([row.slot for row in rows], np.int64),
            starts=np.array([row.start for row in rows], np.int64),
            lengths=np.array([row.length for row in rows], np.int64),
            sampled=np.array([i for i, row in enumerate(rows) if row.samples], np.int64),
        )


class Runner:
    """The runner of one stage.

    `launch` may be called again before the last step has ended: the lane keeps the order, and inputs come from
    the device-resident state.
    """

    def __init__(self, model: StageModel, ops: Ops, state: DeviceState, sampling: SamplingTable, lane: Lane) -> None:
        self._model = model
        self._ops = ops
        self._state = state
        self._sampling = sampling
        self._lane = lane

    async def __aenter__(self) -> Self:
        self._lane.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._lane.stop()

    def launch(self, plan: StepPlan) -> asyncio.Future[StepOutput]:
        """Queue a step; a failure of any kind comes back as the output's `error`."""
        rows = HostRows.of(plan.rows)

        def step() -> StepOutput:
            try:
                with torch.inference_mode():
                    return self._execute(plan, rows)
            except BaseException as error:  # ends the requests of this plan, chained
                return StepOutput(plan, [], [], error=error)

        return self._lane.run(step)

    def _execute(self, plan: StepPlan, rows: HostRows) -> StepOutput:
        state = self._state
        state.admit(plan.admissions)
        if plan.admissions:
            written = [(a.slot, a.sequence.params) for a in plan.admissions if a.sequence.params is not None]
            self._sampling.write([slot for slot, _ in written], [params for _, params in written])
        state.extend(plan.new_blocks)
        inputs = self._ops.prepare(self._step_rows(plan, rows), state.tokens, state.block_tables, state.block_size)
        batch = self._sampling_batch(plan, rows)
        step = StepContext(self._ops, inputs, state.caches, batch)
        hidden = self._model.forward(self._model.embed(step), step)
        prompt_logprobs = self._score_prompts(plan, hidden, step)
        if batch is None:
            return StepOutput(plan, [], [], prompt_logprobs=prompt_logprobs)
        drawn = self._model.sample(hidden[self._last_tokens(rows)], step)
        state.write_drawn(batch.slots, batch.lengths, drawn.token_ids)
        return _to_host(plan, drawn, prompt_logprobs)

    def _step_rows(self, plan: StepPlan, rows: HostRows) -> StepRows:
        device = self._state.device
        return StepRows(
            slots=torch.from_numpy(rows.slots).to(device),
            starts=torch.from_numpy(rows.starts).to(device),
            lengths=torch.from_numpy(rows.lengths).to(device),
            num_tokens=plan.num_tokens,
            max_length=int(rows.lengths.max()),
            max_context=int((rows.starts + rows.lengths).max()),
        )

    def _last_tokens(self, rows: HostRows) -> Tensor:
        """Where the last token of each sampled row lies in the step."""
        return torch.from_numpy(rows.lengths.cumsum()[rows.sampled] - 1).to(self._state.device)

    def _sampling_batch(self, plan: StepPlan, rows: HostRows) -> SamplingBatch | None:
        if not len(rows.sampled):
            return None
        slots = rows.slots[rows.sampled]
        lengths = rows.starts[rows.sampled] + rows.lengths[rows.sampled]
        return self._sampling.gather(slots, lengths, self._state.tokens, plan.needs, plan.num_logprobs)

    def _score_prompts(self, plan: StepPlan, hidden: Tensor, step: StepContext) -> dict[int, HostLogprobs]:
        """Log-probabilities of the prompt's tokens, for the rows whose requests asked."""
        scored: dict[int, HostLogprobs] = {}
        first = 0
        for index, row in enumerate(plan.rows):
            num_top = row.sequence.num_prompt_logprobs
            # The token at position p + 1 is scored by the hidden row of position p.
            count = min(row.start + row.length, row.sequence.prompt_len - 1) - row.start
            if num_top >= 0 and count > 0:
                targets = self._state.tokens[row.slot, row.start + 1 : row.start + 1 + count].long()
                parts: list[HostLogprobs] = []
                for at in range(0, count, SCORED_ROWS):
                    end = min(at + SCORED_ROWS, count)
                    logits = self._model.logits(hidden[first + at : first + end], step)
                    parts.append(_host_logprobs(self._ops.logprobs(logits, targets[at:end], num_top)))
                scored[index] = _join(parts)
            first += row.length
        return scored


def _host_logprobs(values: Logprobs) -> HostLogprobs:
    return HostLogprobs(
        chosen=values.chosen.float().cpu().numpy(),
        rank=values.rank.cpu().numpy(),
        top_ids=values.top_ids.cpu().numpy(),
        top=values.top.float().cpu().numpy(),
    )


def _join(parts: list[HostLogprobs]) -> HostLogprobs:
    return HostLogprobs(
        chosen=np.concatenate([p.chosen for p in parts]),
        rank=np.concatenate([p.rank for p in parts]),
        top_ids=np.concatenate([p.top_ids for p in parts]),
        top=np.concatenate([p.top for p in parts]),
    )


def _to_host(plan: StepPlan, drawn: Sampled, prompt_logprobs: dict[int, HostLogprobs]) -> StepOutput:
    return StepOutput(
        plan,
        token_ids=drawn.token_ids.tolist(),
        finite=drawn.finite.tolist(),
        logprobs=None if drawn.logprobs is None else _host_logprobs(drawn.logprobs),
        prompt_logprobs=prompt_logprobs,
    )
