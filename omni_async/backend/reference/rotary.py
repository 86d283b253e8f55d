"""Rotates queries and keys by their positions and writes keys and values to the cache."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from omni_async.backend.ops import HeadNorm, LayerCache, Rotary
from omni_async.backend.reference.cache import write


def rotate(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the first `rotary_dim` of each head of `[T, heads, D]` by positions `[T]` or `[A, T]`, in float32.

    Element i is paired with element i + rotary_dim / 2, as `transformers` lays the weights out
    (https://arxiv.org/abs/2104.09864, section 3.4.2, with the pairs regrouped).
    """
    half = rotary.rotary_dim // 2
    cos, sin = (_of_positions(table, positions, rotary.axes) for table in (rotary.cos, rotary.sin))
    cos, sin = cos[:, None, None], sin[:, None]
    pairs = x[..., : rotary.rotary_dim].float().view(*x.shape[:2], 2, half)
    turned = pairs * cos
    turned[:, :, 0].addcmul_(pairs[:, :, 1], sin, value=-1)
    turned[:, :, 1].addcmul_(pairs[:, :, 0], sin)
    if rotary.rotary_dim == x.shape[-1]:
        return turned.flatten(-2).to(x.dtype)
    out = x.clone()
    out[..., : rotary.rotary_dim] = turned.flatten(-2)
    return out


def _of_positions(table: Tensor, positions: Tensor, axes: Tensor | None) -> Tensor:
    """Each token's entry for each pair, `[T, rotary_dim / 2]`."""
    if positions.dim() == 1:
        return table.index_select(0, positions)
    if axes is None:
        raise ValueError("positions of several axes need axes")
    return table.gather(0, positions.index_select(0, axes).t())


def rotate_and_cache(
    qkv: Tensor,
    positions: Tensor,
    rotary: Rotary,
    norm: HeadNorm | None,
    cache: LayerCache,
    slot_mapping: Tensor,
    num_heads: int,
) -> Tensor:
    """Split `[T, (Hq + 2 Hk) D]`, norm and rotate queries and keys, write keys and values at `slot_mapping [T]`.

    A slot of -1 writes nothing. Returns the queries `[T, Hq, D]`.
    """
    num_kv_heads, head_size = cache[0].shape[2:]
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_size)
    if norm is None:
        rotated = rotate(heads[:, :-num_kv_heads], positions, rotary)
        queries, keys = rotated[:, :num_heads], rotated[:, num_heads:]
    else:
        queries = F.rms_norm(heads[:, :num_heads], (head_size,), norm.query, norm.eps)
        keys = F.rms_norm(heads[:, num_heads:-num_kv_heads], (head_size,), norm.key, norm.eps)
        queries, keys = (rotate(part, positions, rotary) for part in (queries, keys))
    values = heads[:, -num_kv_heads:]
    if int(slot_mapping.amin()) < 0:
        written = (slot_mapping >= 0).nonzero().flatten()
        slot_mapping, keys, values = slot_mapping[written], keys[written], values[written]
    write(cache[0], slot_mapping, keys)
    write(cache[1], slot_mapping, values)
    return queries
