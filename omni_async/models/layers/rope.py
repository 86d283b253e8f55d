"""Tables of rotary position embeddings (https://arxiv.org/abs/2104.09864), their scaled kinds and several axes."""

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from omni_async.backend.ops import Rotary
from omni_async.errors import UnsupportedModel

REFUSED_KINDS = ("longrope",)
"""Kinds whose frequencies depend on the length of the prompt."""


def make_rotary(config: PretrainedConfig, head_size: int, device: torch.device) -> Rotary:
    """Tables for all positions of the model, as `config.rope_parameters` describes them.

    The kind "dynamic" rotates position p as `transformers` does when a sequence grows to p + 1 tokens. So it equals
    `transformers` for any prompt of at most `max_position_embeddings` tokens and any continuation of it. A longer
    prompt differs: there `transformers` rotates all of its tokens by the prompt's length, so its result depends on
    how a prompt is cut into steps; a table's does not.

    Raises:
        UnsupportedModel: the kind of scaling is not built in, or the axes do not share out the pairs.
    """
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    rotary_dim = int(head_size * parameters.get("partial_rotary_factor", 1.0))
    positions = torch.arange(max_positions(config), dtype=torch.float32, device=device)
    attention_factor = 1.0
    if kind == "default":
        angles = torch.outer(positions, _frequencies(parameters["rope_theta"], rotary_dim, device))
    elif kind == "dynamic":
        bases = _dynamic_bases(config, rotary_dim, positions)
        angles = positions[:, None] * _frequencies(bases[:, None], rotary_dim, device)
    elif kind in ROPE_INIT_FUNCTIONS and kind not in REFUSED_KINDS:
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, device)
        angles = torch.outer(positions, frequencies)
    else:
        raise UnsupportedModel(f"{config.model_type}: rope_type={kind!r} is not supported")
    return Rotary(
        angles.cos() * attention_factor,
        angles.sin() * attention_factor,
        2 * angles.shape[1],
        make_axes(config, angles.shape[1], device),
    )


def make_axes(config: PretrainedConfig, num_pairs: int, device: torch.device) -> Tensor | None:
    """The axis (time, height, width) whose position turns each pair, `[num_pairs] int32`; `None`: there is but one.

    Sectioned (M-RoPE, https://arxiv.org/abs/2409.12191): `mrope_section` counts the pairs of each axis, one axis behind
    the other. Interleaved (https://arxiv.org/abs/2511.21631): the axes take turns; the pairs of one that has had its
    share go to the first.

    Raises:
        UnsupportedModel: the sections are not as many as there are pairs.
    """
    parameters = config.rope_parameters
    section = parameters.get("mrope_section")
    if section is None:
        return None
    if sum(section) != num_pairs:
        raise UnsupportedModel(f"{config.model_type}: mrope_section={section} does not share out {num_pairs} pairs")
    if not parameters.get("mrope_interleaved", False):
        axes = [axis for axis, count in enumerate(section) for _ in range(count)]
    else:
        turns = [(pair // len(section), pair % len(section)) for pair in range(num_pairs)]
        axes = [axis if turn < section[axis] else 0 for turn, axis in turns]
    return torch.tensor(axes, dtype=torch.int32, device=device)


def max_positions(config: PretrainedConfig) -> int:
    """Positions that the scaled rotation covers; "dynamic" and "yarn" extend those of the training."""
    parameters = config.rope_parameters
    length: int = config.max_position_embeddings
    if parameters["rope_type"] == "dynamic":
        return int(length * parameters["factor"])
    if parameters["rope_type"] == "yarn" and parameters["factor"] is not None:
        return max(length, int(parameters["original_max_position_embeddings"] * parameters["factor"]))
    return length


def _frequencies(base: float | Tensor, rotary_dim: int, device: torch.device) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return 1.0 / (base**exponents)


def _dynamic_bases(config: PretrainedConfig, rotary_dim: int, positions: Tensor) -> Tensor:
    """The base of each position by NTK-aware scaling (https://arxiv.org/abs/2309.00071, appendix B.1)."""
    theta, factor = config.rope_parameters["rope_theta"], config.rope_parameters["factor"]
    lengths = (positions + 1).clamp(min=config.max_position_embeddings)
    stretch: Tensor = factor * lengths / config.max_position_embeddings - (factor - 1)
    bases: Tensor = theta * stretch ** (rotary_dim / (rotary_dim - 2))
    return bases
