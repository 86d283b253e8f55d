"""How many cache blocks fit, and how long a sequence may therefore be."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from omni_async.errors import OptionError
from omni_async.models.protocol import ModelSpec
from omni_async.options import EngineOptions


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The sizes of a stage's cache."""

    num_blocks: int
    max_model_len: int


def cache_dtype(options: EngineOptions, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are kept in when a model runs in `dtype`."""
    return torch.float8_e4m3fn if options.cache_dtype == "float8_e4m3" else dtype


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of all layers, of the cache's dtype."""
    cache = spec.cache
    return 2 * cache.num_layers * block_size * cache.num_kv_heads * cache.head_size * dtype.itemsize


def plan_cache(
    spec: ModelSpec, options: EngineOptions, dtype: torch.dtype, free_memory: int, default_memory: int
) -> CachePlan:
    """Size the cache, which holds keys and values in `dtype`, for a model that is loaded already.

    `free_memory` is what it may have at most, `default_memory` what it has if the options say nothing; both in bytes.

    Raises:
        OptionError: `max_model_len` is above the model's positions, or does not fit the cache.
    """
    wanted_len = options.max_model_len or spec.max_positions
    if wanted_len > spec.max_positions:
        raise OptionError(f"max_model_len ({wanted_len}) is above the model's {spec.max_positions} positions")
    size = options.block_size
    per_block = block_bytes(spec, size, dtype)
    useful = options.max_slots * -(-wanted_len // size)
    if options.num_blocks is not None:
        num_blocks = options.num_blocks
    else:
        memory = default_memory if options.cache_memory is None else options.cache_memory
        num_blocks = min(memory // per_block, useful)
    if num_blocks * per_block > free_memory:
        raise OptionError(
            f"a cache of {num_blocks} blocks needs {num_blocks * per_block / 2**20:.0f} MiB; "
            f"{free_memory / 2**20:.0f} MiB are free for it"
        )
    capacity = num_blocks * size
    if options.max_model_len is not None and wanted_len > capacity:
        raise OptionError(
            f"max_model_len ({wanted_len}) does not fit the cache: {num_blocks} blocks of {size} tokens "
            f"({per_block / 2**10:.0f} KiB each) hold {capacity}"
        )
    if capacity < 2:
        raise OptionError(
            f"num_blocks or cache_memory is too small: {num_blocks} blocks hold {capacity} tokens, "
            f"and one of {size} tokens needs {per_block / 2**10:.0f} KiB"
        )
    return CachePlan(num_blocks, min(wanted_len, capacity))


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # no figure for what is free: count on half of what is there
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def measure_peak(work: Callable[[], None], device: torch.device) -> int:
    """Bytes of a CUDA device that `work` needs at most beside what is allocated already."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory on the CPU until they are written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy allocates by calloc, whose pages appear when touched; torch fills them at once.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
