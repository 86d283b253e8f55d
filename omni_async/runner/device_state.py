"""What a stage keeps on the device from step to step: tables by slot, and the paged cache."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_async.backend.ops import LayerCache
from omni_async.models.protocol import ModelSpec
from omni_async.runner.memory import CachePlan, zeros
from omni_async.scheduler.plan import Admission, NewBlocks


class DeviceState:
    """Tokens and block tables by slot, and the key/value cache by block.

    Steps read their inputs from here and write the tokens that they draw back, so a step can start before the
    host knows what the last one drew. Writing is in two parts: `pack` makes the arrays on the host, `apply` writes
    them once they are on the device. Only work on the stage's lane touches the tables.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: CachePlan,
        num_slots: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self.block_size = block_size
        max_blocks = -(-plan.max_model_len // block_size)
        self.tokens = torch.zeros((num_slots, plan.max_model_len + 1), dtype=torch.int32, device=device)
        """`[slots, max_model_len + 1]`: known tokens, then those drawn on the device."""
        self.block_tables = torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device)
        cache = spec.cache
        shape = (plan.num_blocks + 1, block_size, cache.num_kv_heads, cache.head_size)
        self.caches: Sequence[LayerCache] = [
            (zeros(shape, dtype, device), zeros(shape, dtype, device)) for _ in range(cache.num_layers)
        ]

    @staticmethod
    def pack(admissions: Sequence[Admission], gained: Sequence[NewBlocks]) -> list[NDArray[np.int32]]:
        """The known tokens of newcomers and blocks that slots gained: `[3, n]` each: slots, places, values."""
        tokens = [(a.slot, 0, a.tokens) for a in admissions]
        return [_entries(tokens), _entries(gained)]

    def apply(self, tokens: Tensor, blocks: Tensor) -> None:
        """Write what `pack` made."""
        for table, entries in ((self.tokens, tokens), (self.block_tables, blocks)):
            if entries.shape[1]:
                slots, places, values = entries
                table[slots, places] = values

    def disown(self, slots: Sequence[int]) -> None:
        """Let these slots own no block until new ones are entered: steps that name them write nothing to the cache."""
        self.block_tables[torch.tensor(slots, device=self.device)] = 0


def _entries(parts: Sequence[tuple[int, int, Sequence[int]]]) -> NDArray[np.int32]:
    """Table entries from `(slot, first place, values)`."""
    counts = [len(values) for _, _, values in parts]
    entries = np.empty((3, sum(counts)), np.int32)
    at = 0
    for (slot, first, values), count in zip(parts, counts, strict=True):
        entries[0, at : at + count] = slot
        entries[1, at : at + count] = np.arange(first, first + count)
        entries[2, at : at + count] = values
        at += count
    return entries
