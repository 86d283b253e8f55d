"""Runs step plans on a model: rows and updates go up, the step is launched, what it drew comes back. No policy."""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from omni_async.backend.ops import Logprobs, Ops, StepContext
from omni_async.models.protocol import StageModel
from omni_async.runner.device_state import DeviceState
from omni_async.runner.graphs import MAX_LOGPROBS, Drawn, StepGraphs
from omni_async.runner.lane import HostArrays, Lane
from omni_async.runner.step_shape import StepShape
from omni_async.sampling.logprobs import HostLogprobs
from omni_async.sampling.params import SamplingNeeds
from omni_async.scheduler.plan import NewBlocks, Phase, StepOutput, StepPlan

SCORED_ROWS = 128
"""Prompt positions whose logits are made at once, so that a long prompt's never fill the memory."""

Scores = dict[int, list[Callable[[], HostArrays]]]
"""Log-probabilities of prompts by row, in parts that are on their way to the host."""

EVERYTHING = SamplingNeeds(sum(SamplingNeeds))
"""A graph serves every batch, so its rows may make use of all that the sampler has."""


class Runner:
    """The runner of one stage.

    `launch` may be called again before the last step has ended: the lane keeps the order, and inputs come from
    the device-resident state.
    """

    def __init__(
        self,
        model: StageModel,
        ops: Ops,
        state: DeviceState,
        lane: Lane,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._model = model
        self._ops = ops
        self._state = state
        self._lane = lane
        self._graphs = graphs

    async def __aenter__(self) -> Self:
        self._lane.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._lane.stop()

    def launch(self, plan: StepPlan) -> asyncio.Future[StepOutput]:
        """Start a step; its failure comes back as the output's `error`, that of the device as the future's."""

        def step() -> Callable[[], StepOutput]:
            try:
                with torch.inference_mode():
                    return self._launch(plan)
            except torch.AcceleratorError:  # the device itself failed, and nothing on it works any more
                raise
            except BaseException as error:  # ends the requests of this plan, chained
                # Steps that are planned already name its slots, whose tables may still be those of earlier owners.
                self._state.disown([*(row.slot for row in plan.rows), *(a.slot for a in plan.admissions)])
                failed = StepOutput(plan, [], [], error=error)
                return lambda: failed

        return self._lane.run(step)

    def capture(self, *, progress: bool) -> None:
        """Capture the graphs, if there are to be any; before the first launch.

        Raises:
            CaptureError: a step cannot be captured.
        """
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.capture(self._draw_anything, progress=progress)

    def compile(self, shapes: Iterable[StepShape]) -> None:
        """Compile the kernels of these steps, all at once."""
        with self._ops.compiling():
            for shape in shapes:
                self.rehearse(shape)

    def rehearse(self, shape: StepShape) -> None:
        """Run a step of padding."""
        with torch.inference_mode():
            self._draw_anything(shape, torch.from_numpy(shape.pack(())).to(self._state.device))

    def _launch(self, plan: StepPlan) -> Callable[[], StepOutput]:
        scored = [
            i for i, row in enumerate(plan.rows) if row.phase is Phase.PREFILL and row.sequence.num_prompt_logprobs >= 0
        ]
        num_sampled = sum([row.samples for row in plan.rows])
        found = None
        if self._graphs is not None and not scored and plan.num_logprobs <= MAX_LOGPROBS:
            found = self._graphs.find(plan.num_tokens, len(plan.rows), num_sampled)
        if found is not None:
            shape, graph = found
            with self._lane.span("replay"):
                self._update(plan, shape, into=graph.rows)
                graph.graph.replay()
            return self._collect(plan, graph.take(num_sampled, plan.num_logprobs), {})
        shape = StepShape(plan.num_tokens, len(plan.rows), num_sampled, single=plan.num_tokens == len(plan.rows))
        with self._lane.span("eager"):
            rows = self._update(plan, shape, into=None)
            hidden, step = self._forward(shape, rows, plan.needs, plan.num_logprobs)
            scores = self._score(plan, scored, hidden, step)
            drawn = self._draw(hidden, step)
        return self._collect(plan, drawn, scores)

    def _update(self, plan: StepPlan, shape: StepShape, into: Tensor | None) -> Tensor:
        """Bring the packed rows to the device, and enter there what newcomers and slots gained."""
        gained, rest = split_gained(plan)
        if plan.admissions or rest:
            packed = self._state.slots.pack(self._state.entries(plan.admissions, rest))
            with self._lane.aside():
                self._state.slots.write(self._lane.send(packed))
        return self._lane.send(shape.pack(plan.rows, gained), into)

    def _forward(
        self, shape: StepShape, packed: Tensor, needs: SamplingNeeds, num_logprobs: int
    ) -> tuple[Tensor, StepContext]:
        """The hidden rows `[T, H]`, and the step's context for what follows."""
        state = self._state
        inputs = self._ops.prepare(shape.unpack(packed), state.tokens, state.block_tables, state.block_size)
        batch = state.sampling.batch(inputs, state.tokens, needs, num_logprobs) if shape.num_sampled else None
        step = StepContext(self._ops, inputs, state.caches, batch)
        return self._model.forward(self._model.embed(step), step), step

    def _draw(self, hidden: Tensor, step: StepContext) -> Drawn | None:
        """Draw for the sampled rows, and append the tokens to the pool."""
        if step.sampling is None:
            return None
        drawn = self._model.sample(self._ops.embedding(step.inputs.sampled_tokens, hidden), step)
        return Drawn(self._ops.append(drawn, step.sampling), drawn.logprobs)

    def _draw_anything(self, shape: StepShape, packed: Tensor) -> Drawn | None:
        """A step whose rows may make use of everything."""
        return self._draw(*self._forward(shape, packed, EVERYTHING, MAX_LOGPROBS))

    def _score(self, plan: StepPlan, scored: list[int], hidden: Tensor, step: StepContext) -> Scores:
        """Log-probabilities of the prompt's tokens, by index of the rows whose requests asked.

        Each part is brought to the host as it is made, so that the device holds one at a time.
        """
        scores: Scores = {}
        firsts = np.cumsum([0, *[row.length for row in plan.rows]])
        for index in scored:
            row = plan.rows[index]
            first = int(firsts[index])
            # The token at position p + 1 is scored by the hidden row of position p.
            count = min(row.start + row.length, row.sequence.prompt_len - 1) - row.start
            if count <= 0:
                continue
            targets = self._state.tokens[row.slot, row.start + 1 : row.start + 1 + count].long()
            parts = scores[index] = []
            for at in range(0, count, SCORED_ROWS):
                end = min(at + SCORED_ROWS, count)
                logits = self._model.logits(hidden[first + at : first + end], step)
                values = self._ops.logprobs(logits, targets[at:end], row.sequence.num_prompt_logprobs)
                parts.append(self._lane.download(_columns(values)))
        return scores

    def _collect(self, plan: StepPlan, drawn: Drawn | None, scores: Scores) -> Callable[[], StepOutput]:
        """Start bringing results to the host; the closure makes the step's output of them."""
        wanted: list[Tensor] = []
        asked = drawn is not None and drawn.logprobs is not None and plan.num_logprobs >= 0
        if drawn is not None:
            wanted.append(drawn.token_ids)
            if drawn.logprobs is not None and asked:
                wanted += _columns(drawn.logprobs)
        fetch = self._lane.download(wanted)

        def finish() -> StepOutput:
            ids, *columns = fetch() if drawn is not None else (np.empty(0, np.int32),)
            return StepOutput(
                plan,
                token_ids=ids.tolist(),
                finite=(ids >= 0).tolist(),
                logprobs=HostLogprobs(*[column.copy() for column in columns]) if asked else None,
                prompt_logprobs={index: _join(parts) for index, parts in scores.items()},
            )

        return finish


def split_gained(plan: StepPlan) -> tuple[dict[int, tuple[int, int]], list[NewBlocks]]:
    """The new blocks that travel with the rows, one for a slot as decoding needs them; and the others."""
    if not plan.new_blocks:
        return {}, []
    admitted = {admission.slot for admission in plan.admissions}
    gained: dict[int, tuple[int, int]] = {}
    rest: list[NewBlocks] = []
    for new in plan.new_blocks:
        if len(new.blocks) == 1 and new.slot not in admitted:
            gained[new.slot] = (new.first, new.blocks[0])
        else:
            rest.append(new)
    return gained, rest


def _columns(values: Logprobs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return values.chosen, values.rank, values.top_ids, values.top


def _join(parts: list[Callable[[], HostArrays]]) -> HostLogprobs:
    return HostLogprobs(*[np.concatenate(columns) for columns in zip(*[part() for part in parts], strict=True)])
