"""The ranges of the options of a run."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...common.number_ranges import check_seed, require
from ...common.option_values import without_none

NOT_NEGATIVE = (
    "freeze_parent_steps",
    "warmup_steps",
    "weight_decay",
    "dataloader_workers",
    "keep_checkpoints",
    "skip_sequences",
    "tokenizer_workers",
    "max_bad_updates",
    "z_loss",
    "length_warmup_steps",
)
# Smaller numbers are zero, or nearly, in float32, and AdamW divides by epsilon alone where a gradient is zero.
SMALLEST_EPSILON = 1e-37
# AdamW divides rates by less than one in the first updates, and larger ones overflow float32.
LARGEST_RATE = 1e30
FRACTIONS = ("min_learning_rate_ratio", "decay_share", "adam_beta1", "adam_beta2", "muon_momentum", "ema_decay")
# A moving average with a decay of 1 never changes.
BELOW_ONE = ("adam_beta1", "adam_beta2", "muon_momentum", "ema_decay")
# All other numbers are positive.
OTHERWISE_LIMITED = (*NOT_NEGATIVE, *FRACTIONS, "seed", "validation_share", "sequence_length")
# A norm of infinity clips nothing.
MAY_BE_INFINITE = ("max_grad_norm",)
# What must hold for the values of options that are not None, and how a message says it.
RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (NOT_NEGATIVE, lambda value: value >= 0, "zero or more"),
    (FRACTIONS, lambda value: 0 <= value <= 1, "between 0 and 1"),
    (BELOW_ONE, lambda value: value < 1, "below 1"),
    (("adam_epsilon",), lambda value: value >= SMALLEST_EPSILON, f"{SMALLEST_EPSILON} or more"),
    (("learning_rate", "composition_learning_rate"), lambda value: value <= LARGEST_RATE, f"at most {LARGEST_RATE:g}"),
    (("validation_share",), lambda value: 0 < value < 1, "above 0 and below 1"),
    (("sequence_length",), lambda value: value >= 2, "2 or more"),
    (("dataloader_workers", "tokenizer_workers", "sweep_workers"), lambda value: value <= 1024, "at most 1024"),
)
LARGEST_INTEGER = 2**31 - 1


def check_ranges(options: Any) -> None:
    """Refuses values of the options of a run, which are a dataclass, that no run can have.

    Raises:
        UserError: an option has such a value; the message names the option, the value and its limit.
    """
    _check_limits(options)
    kinds = {name: without_none(name, hint) for name, hint in get_type_hints(type(options)).items()}
    positive = tuple(name for name, kind in kinds.items() if kind in (int, float) and name not in OTHERWISE_LIMITED)
    for names, holds, limit in ((positive, lambda value: value > 0, "positive"), *RANGES):
        for name in names:
            value = getattr(options, name)
            require(value is None or holds(value), name, value, limit)
    for name, kind in kinds.items():
        value = getattr(options, name)
        if get_origin(kind) is Literal and value is not None:
            require(value in get_args(kind), name, value, f"one of {get_args(kind)}")


def _check_limits(options: Any) -> None:
    """Refuses missing values, and numbers too large for any computation."""
    for argument in fields(options):
        name, value = argument.name, getattr(options, argument.name)
        require(value is not None or argument.default is None, name, value, "given, or left out")
        if isinstance(value, float) and name not in MAY_BE_INFINITE:
            require(not math.isinf(value), name, value, "finite")
        if isinstance(value, int) and name != "seed":
            require(value <= LARGEST_INTEGER, name, value, f"at most {LARGEST_INTEGER}")
    check_seed("seed", options.seed)
    output = str(options.output)
    # Libraries written in Rust need paths in UTF-8.
    is_writable = "\0" not in output and output == output.encode("utf-8", "replace").decode()
    require(is_writable, "output", repr(output), "a path in UTF-8 without null bytes")
