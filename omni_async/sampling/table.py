"""The sampling parameters of all slots, resident on the device."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_async.backend.ops import SamplingBatch
from omni_async.sampling.params import RowParams, SamplingNeeds


class SamplingTable:
    """Parameters by slot: written when a sequence takes the slot, gathered in each step that samples it."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, stage: int = 0) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._stage = stage
        # One row for each parameter: a gathered row is contiguous.
        self._floats = torch.zeros((6, num_slots), dtype=torch.float32, device=device)
        self._integers = torch.zeros((4, num_slots), dtype=torch.int64, device=device)
        self._bias_ids = torch.empty((num_slots, 0), dtype=torch.int64, device=device)
        self._bias_until = torch.empty((num_slots, 0), dtype=torch.int64, device=device)
        self._bias_values = torch.empty((num_slots, 0), dtype=torch.float32, device=device)
        self._bias_lens = np.zeros(num_slots, np.int64)
        self._allowed: Tensor | None = None
        """`[slots, V] bool`, made when the first row restricts its tokens."""
        self._restricted = np.zeros(num_slots, np.bool_)

    def write(self, slots: Sequence[int], params: Sequence[RowParams]) -> None:
        """Set the parameters of some slots, with one copy for each kind."""
        if not slots:
            return
        at = torch.tensor(slots, dtype=torch.int64).to(self._device)
        floats = [
            (
                p.temperature,
                p.top_p,
                p.min_p,
                p.repetition_penalty,
                p.presence_penalty,
                p.frequency_penalty,
            )
            for p in params
        ]
        integers = [(p.top_k, p.seed, p.choice, p.prompt_len) for p in params]
        self._floats[:, at] = torch.tensor(floats, dtype=torch.float32).T.to(self._device)
        self._integers[:, at] = torch.tensor(integers, dtype=torch.int64).T.to(self._device)
        self._write_bias(slots, at, params)
        self._write_allowed(slots, params)

    def gather(
        self,
        slots: NDArray[np.int64],
        lengths: NDArray[np.int64],
        tokens: Tensor,
        needs: SamplingNeeds,
        num_logprobs: int,
    ) -> SamplingBatch:
        """The batch of the rows `slots` that hold `lengths` tokens before the one to be drawn.

        `tokens [slots, max_len] int32` is the token pool; `needs` is the union over the rows.
        """
        at = torch.from_numpy(slots).to(self._device)
        temperature, top_p, min_p, repetition, presence, frequency = self._floats[:, at].unbind()
        top_k, seed, choice, prompt_lens = self._integers[:, at].unbind()
        has_bias = SamplingNeeds.BIAS in needs
        width = int(self._bias_lens[slots].max()) if has_bias else 0
        if SamplingNeeds.ALLOWED in needs and self._allowed is not None:
            allowed = self._allowed[at]
        else:
            allowed = torch.empty((len(slots), 0), dtype=torch.bool, device=self._device)
        return SamplingBatch(
            tokens=tokens,
            slots=at,
            prompt_lens=prompt_lens,
            lengths=torch.from_numpy(lengths).to(self._device),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            seed=seed,
            choice=choice,
            bias_ids=self._bias_ids[at, :width],
            bias_values=self._bias_values[at, :width],
            bias_until=self._bias_until[at, :width],
            allowed=allowed,
            has_penalties=SamplingNeeds.PENALTIES in needs,
            has_bias=has_bias,
            has_filters=SamplingNeeds.FILTERS in needs,
            has_random=SamplingNeeds.RANDOM in needs,
            num_logprobs=num_logprobs,
            stage=self._stage,
            max_length=int(lengths.max()),
        )

    def _write_bias(self, slots: Sequence[int], at: Tensor, params: Sequence[RowParams]) -> None:
        self._bias_lens[list(slots)] = [len(p.bias) for p in params]
        self._widen_bias(max(len(p.bias) for p in params))
        width = self._bias_ids.shape[1]
        if not width:
            return
        ids = np.full((len(params), width), -1, np.int64)
        until = np.zeros((len(params), width), np.int64)
        values = np.zeros((len(params), width), np.float32)
        for row, p in enumerate(params):
            if p.bias:
                ids[row, : len(p.bias)], values[row, : len(p.bias)], until[row, : len(p.bias)] = zip(
                    *p.bias, strict=True
                )
        self._bias_ids[at] = torch.from_numpy(ids).to(self._device)
        self._bias_until[at] = torch.from_numpy(until).to(self._device)
        self._bias_values[at] = torch.from_numpy(values).to(self._device)

    def _widen_bias(self, width: int) -> None:
        """Make room for lists of `width` entries; at least doubling, so that it is rarely done."""
        num_slots, old = self._bias_ids.shape
        if width <= old:
            return
        more = (num_slots, max(width, 2 * old) - old)
        self._bias_ids = torch.cat([self._bias_ids, self._bias_ids.new_full(more, -1)], dim=1)
        self._bias_until = torch.cat([self._bias_until, self._bias_until.new_zeros(more)], dim=1)
        self._bias_values = torch.cat([self._bias_values, self._bias_values.new_zeros(more)], dim=1)

    def _write_allowed(self, slots: Sequence[int], params: Sequence[RowParams]) -> None:
        for slot, p in zip(slots, params, strict=True):
            if p.allowed is None:
                if self._restricted[slot] and self._allowed is not None:
                    self._allowed[slot] = True
            else:
                if self._allowed is None:
                    shape = (len(self._restricted), self._vocab_size)
                    self._allowed = torch.ones(shape, dtype=torch.bool, device=self._device)
                self._allowed[slot] = False
                self._allowed[slot, torch.tensor(p.allowed, dtype=torch.int64).to(self._device)] = True
            self._restricted[slot] = p.allowed is not None
