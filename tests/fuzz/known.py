"""Defects that fuzzing has found and nobody has mended yet; whoever mends one deletes its entry."""

from collections.abc import Callable

from .harness import Case, Known

WINDOW_OF_ONE = {
    "class": "DCFormer, chunked",
    "family": "DCFormer",
    "way": "chunked",
    "fields": {
        "num_attention_heads": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "sliding_window": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "compose_pre": False,
        "compose_post": False,
    },
    "length": 30,
    "batch": 3,
    "cut": 5,
    "seed": 200225,
}


def with_field(*names: str) -> Callable[[Case], bool]:
    """Configurations with one of these fields."""
    return lambda case: bool(set(names) & set(case["fields"]))


def file(damage: str, source: str = "dcformer", destination: str = "out") -> Case:
    return {"class": damage, "source": source, "destination": destination, "seed": 1}


KNOWN: list[Known] = [
    Known(
        "configurations",
        ".",
        {"class": "DCFormer", "fields": {"hidden_act": "no-such"}},
        "activations are not checked (configuration/*: hidden_act, compose_act)",
        with_field("hidden_act", "compose_act"),
    ),
    Known(
        "configurations",
        ".",
        {"class": "DCPythia", "fields": {"rope_parameters": {"rope_type": "yarn"}}},
        "rotary parameters are hardly checked (configuration/composed_config.py: validate_rope_type)",
        with_field("rope_parameters", "rope_theta"),
    ),
    Known(
        "configurations",
        "accepted, then|not refused properly|without naming|hangs|process ends",
        {"class": "RCMHA", "fields": {"hidden_dropout": 1.5}},
        "sizes, dropout, epsilons, scales and layers of 0, negative, NaN or huge are not checked (configuration/*)",
    ),
    Known(
        "models",
        "logits wrong|must match the size",
        WINDOW_OF_ONE,
        "sliding_window=1 with a cache fails or gives other logits (caches/composed_cache.py keeps 0 tokens)",
        lambda case: case["fields"].get("sliding_window") == 1,
    ),
    Known(
        "commands",
        "traceback: ValueError: Seed must be between",
        {"class": "pretrain", "options": {"seed": "-1"}, "yaml": None},
        "pretrain --seed -1 is a traceback (scripts/pretrain/arguments.py)",
    ),
    Known(
        "files",
        "embedded null byte|File name too long",
        file("nothing", destination="a\u0000b"),
        "destinations with NUL or too long a name are a traceback (scripts/*/job.py, publish/arguments.py)",
    ),
    Known(
        "faults",
        "traceback: (SafetensorError|OSError)",
        {"class": "disk is full", "event": 57, "again": None},
        "a full disk is a traceback (scripts/pretrain/outputs/checkpoint.py: save)",
    ),
]
