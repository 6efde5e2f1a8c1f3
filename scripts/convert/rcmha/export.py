"""Translates our RCMHA configuration to the official one, or says why the official code cannot run such a model."""

from collections.abc import Iterator
from typing import Any

from dynattn import RCMHAConfig

from ...common.errors import UserError
from .config import ACTIVATIONS, KERNEL_SIZE, OURS, OfficialRCMHAConfig


def to_official(config: RCMHAConfig, positions: int, *, from_streaming: bool) -> OfficialRCMHAConfig:
    """Returns the official configuration of the same model.

    Args:
        config: ours.
        positions: half the rows of the official position tables.
        from_streaming: whether streaming memory may become memory by segments.

    Raises:
        UserError: the official code cannot run it; the message names the field.
    """
    for name, value, needed in refusals(config):
        raise UserError(f"{name} is {value!r}, but the official code can only run {needed}")
    check_memory(config, from_streaming)
    if config.is_relative and config.num_relative_positions > positions:
        raise UserError(
            f"the position tables have {config.num_relative_positions} rows, but official ones with "
            f"--official-positions {positions} hold {positions}; unchanged official code has 4096"
        )
    return OfficialRCMHAConfig(P=positions, **{name: getattr(config, ours) for name, ours in OURS.items()})


def refusals(config: RCMHAConfig) -> Iterator[tuple[str, Any, Any]]:
    """Fields that the official code cannot express: name, value, and what it could run."""
    needed: dict[str, Any] = {
        "position_scheme": "none",
        "qk_bias": not config.is_relative,
        "head_dim": config.hidden_size / config.num_attention_heads,
        "layer_norm_eps": 1e-5,
        "lm_head_bias": True,
        "tie_word_embeddings": False,
    }
    if config.convolves:
        needed["conv_kernel_size"] = KERNEL_SIZE
    for name, value in needed.items():
        if getattr(config, name) != value:
            yield name, getattr(config, name), repr(value)
    if config.hidden_act not in ACTIVATIONS:
        yield "hidden_act", config.hidden_act, " or ".join(ACTIVATIONS)


def check_memory(config: RCMHAConfig, from_streaming: bool) -> None:
    """Raises UserError where the official memory differs from ours, and nobody said that it may."""
    if config.mem_len is None:
        raise UserError("mem_len is None, all earlier tokens, but official memory has a length; set one in config.json")
    is_streaming = config.memory_type == "streaming"
    if is_streaming and not from_streaming:
        raise UserError(
            "memory_type is 'streaming', but official memory goes by segments, so the exported model would compute "
            "something else; --from-streaming if that is meant"
        )
    if from_streaming and not is_streaming:
        raise UserError("--from-streaming, but memory_type is 'segment' already; leave it out")
