"""Rotates queries and keys by their positions and writes keys and values to the cache."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from omni_async.backend.ops import HeadNorm, LayerCache, Rotary


def rotate(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the first `rotary_dim` of each head of `[T, heads, D]`, in float32.

    Element i is paired with element i + rotary_dim / 2, as `transformers` lays the weights out
    (https://arxiv.org/abs/2104.09864, section 3.4.2, with the pairs regrouped).
    """
    half = rotary.rotary_dim // 2
    cos = rotary.cos.index_select(0, positions)[:, None, None]
    sin = rotary.sin.index_select(0, positions)[:, None]
    pairs = x[..., : rotary.rotary_dim].float().view(*x.shape[:2], 2, half)
    turned = pairs * cos
    turned[:, :, 0].addcmul_(pairs[:, :, 1], sin, value=-1)
    turned[:, :, 1].addcmul_(pairs[:, :, 0], sin)
    if rotary.rotary_dim == x.shape[-1]:
        return turned.flatten(-2).to(x.dtype)
    out = x.clone()
    out[..., : rotary.rotary_dim] = turned.flatten(-2)
    return out


def rotate_and_cache(
    qkv: Tensor,
    positions: Tensor,
    rotary: Rotary,
    norm: HeadNorm | None,
    cache: LayerCache,
    slot_mapping: Tensor,
    num_heads: int,
) -> Tensor:
    """See `Ops.rotate_and_cache`."""
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
    cache[0].flatten(0, 1).index_copy_(0, slot_mapping, keys)
    cache[1].flatten(0, 1).index_copy_(0, slot_mapping, values)
    return queries
