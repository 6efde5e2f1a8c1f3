"""Defects that fuzzing has found and nobody has mended yet; whoever mends one deletes its entry."""

from collections.abc import Callable
from typing import Any

from .harness import Case, Known

SIZES = {"batch": 2, "heads": 2, "kv_heads": 2, "queries": 5, "keys": 7, "width": 4, "rank": 1}
PLAIN = {
    "class": "chunked",
    "dtype": "float32",
    "groups": 1,
    "is_causal": True,
    "window": None,
    "scaling": None,
    "mask": None,
    "first_keys": None,
    "grad_layout": "plain",
    "leaves": "none",
    "threads": 1,
    "seed": 1,
    "post": ["key_gate"],
}
WRONG = "is wrong by|is not finite"

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


def composed(sizes: dict[str, int], **fields: Any) -> Case:
    """A simple case of the composed op, but for these sizes and fields."""
    layouts = dict.fromkeys(("query", "key", "value", "factors", "static"), "plain")
    return {**PLAIN, "sizes": {**SIZES, **sizes}, "layouts": layouts, **fields}


def relative(sizes: dict[str, int], **fields: Any) -> Case:
    """A simple case of the relative op."""
    simple = {name: SIZES[name] for name in ("batch", "heads", "queries", "keys", "width")}
    layouts = dict.fromkeys(("query", "key", "value", "tables"), "plain")
    own = {"rows": 200, "tables": ["position_bias"], "offset": None, "layouts": layouts}
    return {**PLAIN, **own, "sizes": {**simple, **sizes}, **fields}


def refusal(op: str, wrong: str, implementation: str = "chunked", queries: int = 5) -> Case:
    return {"class": op, "wrong": wrong, "implementation": implementation, "queries": queries, "gradients": False}


def with_mistake(*words: str) -> Callable[[Case], bool]:
    """Refusals of mistakes that are named by one of these words."""
    return lambda case: any(word in case["wrong"] for word in words)


def with_field(*names: str) -> Callable[[Case], bool]:
    """Configurations with one of these fields."""
    return lambda case: bool(set(names) & set(case["fields"]))


def is_longer(case: Case) -> bool:
    """Whether there are more queries than keys."""
    return case["sizes"]["queries"] > case["sizes"]["keys"]


def file(damage: str, source: str = "dcformer", destination: str = "out") -> Case:
    return {"class": damage, "source": source, "destination": destination, "seed": 1}


KNOWN: list[Known] = [
    Known(
        "composed-op",
        "multiply_cached",
        composed({"queries": 1, "batch": 0}, dtype="float64"),
        "a single query fails with an empty batch or no keys (chunked/decode.py: multiply_cached)",
    ),
    Known(
        "composed-op",
        WRONG,
        composed({}, **{"class": "C code", "first_keys": "turned"}),
        "C code reads first_keys as if contiguous (chunked/composers/native.py: softmax, softmax_backward)",
        lambda case: case["first_keys"] == "turned" and case["class"] in ("C code", "default"),
    ),
    Known(
        "composed-op",
        WRONG,
        composed({"queries": 7, "keys": 3}, **{"class": "C code", "is_causal": False}),
        "C code hides keys from queries far before them, without causality (chunked/composers/native.py: _span)",
        lambda case: is_longer(case) and not case["is_causal"] and case["window"] is None,
    ),
    Known(
        "composed-op",
        "Expected reduction dim",
        composed({"batch": 0}, **{"class": "triton", "first_keys": "int64"}),
        "triton fails with first_keys and an empty batch (triton/tiling.py: _spans)",
    ),
    Known(
        "relative-op",
        r"chunked\.py",
        relative({"queries": 9, "keys": 4}),
        "more queries than keys fail (ops/relative/chunked.py: _softmax, _position_scores)",
        lambda case: is_longer(case) and case["is_causal"],
    ),
    Known(
        "relative-op",
        WRONG,
        relative({"queries": 65, "keys": 66, "width": 1}, dtype="bfloat16", scaling=0.0, window=2),
        "scaling 0 reads uninitialised memory in bfloat16 (ops/relative/chunked.py: probabilities)",
        lambda case: case["scaling"] == 0 and case["dtype"] in ("bfloat16", "float16"),
    ),
    Known(
        "op-refusals",
        "a mask of",
        refusal("composed", "a mask of 4 keys"),
        "no op checks the shape and dtype of a mask (ops/dcmha/attention.py, ops/relative/attention.py)",
    ),
    Known(
        "op-refusals",
        "dtype|integers|float64",
        refusal("composed", "values of another dtype"),
        "no op checks dtypes (_check_shapes, check_relative_shapes)",
    ),
    Known(
        "op-refusals",
        "rank|static|down",
        refusal("composed", "key_up of another rank"),
        "ranks and dimensions of factors are not checked (ops/dcmha/attention.py: _check_composition)",
    ),
    Known(
        "op-refusals",
        "groups|hangs|process ends",
        refusal("composed", "groups -2", "eager"),
        "groups are not checked: errors, hangs and crashes (ops/dcmha/attention.py: _check_composition)",
        with_mistake("groups", "rank"),
    ),
    Known(
        "op-refusals",
        "no heads|no width",
        refusal("composed", "keys of no heads"),
        "no heads or no width divide by zero (ops/dcmha/attention.py: _check_shapes)",
    ),
    Known(
        "op-refusals",
        "dropout|offset|bias|embeddings",
        refusal("relative", "dropout NaN"),
        "dropout, offset and tables of no dimension are not checked (ops/relative/attention.py)",
    ),
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
