"""What a stage keeps on the device from step to step: tables by slot, and the paged cache."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from omni_async.backend.ops import LayerCache
from omni_async.models.protocol import ModelSpec
from omni_async.runner.memory import CachePlan, zeros
from omni_async.scheduler.plan import Admission, NewBlocks


class DeviceState:
    """Tokens and block tables by slot, and the key/value cache by block.

    Steps read their inputs from here and write the tokens that they draw back, so a step can start before the
    host knows what the last one drew. Only work on the stage's lane touches it.
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

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Write the known tokens of newcomers to their slots."""
        for admission in admissions:
            tokens = torch.from_numpy(np.asarray(admission.tokens, dtype=np.int32))
            self.tokens[admission.slot, : len(tokens)] = tokens.to(self.device)

    def extend(self, gained: Sequence[NewBlocks]) -> None:
        """Enter new blocks into the block tables."""
        for slot, first, blocks in gained:
            ids = torch.tensor(blocks, dtype=torch.int32)
            self.block_tables[slot, first : first + len(blocks)] = ids.to(self.device)

    def write_drawn(self, slots: Tensor, lengths: Tensor, token_ids: Tensor) -> None:
        """Append drawn tokens `[S]` to the rows `slots` that hold `lengths` tokens."""
        self.tokens[slots, lengths] = token_ids.to(torch.int32)
