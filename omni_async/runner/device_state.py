"""What a stage keeps on the device from step to step: tables by slot, and the paged cache."""

from collections.abc import Sequence

import torch

from omni_async.backend.ops import LayerCache
from omni_async.backend.slot_tables import Entry, SlotTables
from omni_async.models.protocol import ModelSpec
from omni_async.runner.memory import CachePlan, zeros
from omni_async.sampling.table import SamplingTable
from omni_async.scheduler.plan import Admission, NewBlocks

TOKENS, BLOCKS = 0, 1
"""The first tables by slot; those of sampling follow."""


class DeviceState:
    """Tokens and block tables by slot, and the key/value cache by block.

    Steps read their inputs from here and write the tokens that they draw back, so a step can start before the
    host knows what the last one drew. Only work on the stage's lane touches the tables.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: CachePlan,
        num_slots: int,
        block_size: int,
        cache_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self.block_size = block_size
        widths = [plan.max_model_len + 1, -(-plan.max_model_len // block_size)]
        self.slots = SlotTables(num_slots, [*widths, *SamplingTable.widths(spec.vocab_size)], device)
        self.tokens = self.slots.tables[TOKENS]
        """`[slots, max_model_len + 1]`: known tokens, then those drawn on the device."""
        self.block_tables = self.slots.tables[BLOCKS]
        self.sampling = SamplingTable(self.slots, len(widths), spec.vocab_size)
        cache = spec.cache
        shape = (plan.num_blocks + 1, block_size, cache.num_kv_heads, cache.head_size)
        self.caches: Sequence[LayerCache] = [
            (zeros(shape, cache_dtype, device), zeros(shape, cache_dtype, device)) for _ in range(cache.num_layers)
        ]

    def entries(self, admissions: Sequence[Admission], gained: Sequence[NewBlocks]) -> list[Entry]:
        """What newcomers and slots that gained blocks bring to the tables."""
        newcomers = [(a.slot, a.sequence.params) for a in admissions if a.sequence.params is not None]
        return [
            *[Entry(TOKENS, admission.slot, 0, admission.tokens) for admission in admissions],
            *[Entry(BLOCKS, *new) for new in gained],
            *self.sampling.entries(newcomers),
        ]

    def disown(self, slots: Sequence[int]) -> None:
        """Let these slots own no block until new ones are entered: steps that name them write nothing to the cache."""
        self.block_tables[torch.tensor(slots, device=self.device)] = 0
