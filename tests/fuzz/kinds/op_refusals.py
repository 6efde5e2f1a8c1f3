"""Calls of both ops with one thing wrong: every implementation says so with a ValueError, and none crashes."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from dynattn import Composition, dcmha_attention, relative_attention
from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS

from ..harness import Case, FindingError, Kind, one_line
from .composed_op import composing

B, H, T, S, D, R = 2, 6, 5, 11, 4, 2
COMPOSED = (*COMPOSING_IMPLEMENTATIONS, "C code", "default")
RELATIVE = ("eager", "sdpa", "chunked", "default")
Arguments = dict[str, Any]


def generate(random: Random) -> Case:
    op = random.choice(("composed", "composed", "relative"))
    wrong = random.choice(sorted(COMPOSED_MISTAKES if op == "composed" else RELATIVE_MISTAKES))
    implementation = random.choice(COMPOSED if op == "composed" else RELATIVE)
    queries = random.choice((T, T, 1))
    gradients = random.random() < 0.3
    return {"class": op, "wrong": wrong, "implementation": implementation, "queries": queries, "gradients": gradients}


def check(case: Case) -> None:
    """Finds a mistake that is accepted, or told by another exception."""
    composed = case["class"] == "composed"
    arguments = composed_arguments(case["queries"]) if composed else relative_arguments(case["queries"])
    for value in arguments.values():
        if isinstance(value, Tensor) and case["gradients"]:
            value.requires_grad_(value.is_floating_point())
    (COMPOSED_MISTAKES if composed else RELATIVE_MISTAKES)[case["wrong"]](arguments)
    if composed:
        factors = {stage: arguments.pop(stage) for stage in ("pre", "post")}
        arguments |= {stage: None if values is None else Composition(**values) for stage, values in factors.items()}
    name = f"{case['class']} op, {case['implementation']}, {case['wrong']}"
    try:
        with composing(case["implementation"]) as implementation:
            (dcmha_attention if composed else relative_attention)(**arguments, implementation=implementation)
    except ValueError:
        return
    except Exception as error:  # every other exception is the finding
        raise FindingError(f"{name}: {one_line(error)}") from error
    raise FindingError(f"{name}: accepted")


def composed_arguments(queries: int) -> Arguments:
    torch.manual_seed(0)
    factors = {
        "query_down": torch.randn(B, queries, R, H),
        "query_up": torch.randn(B, queries, R, H),
        "key_down": torch.randn(B, S, R, H),
        "key_up": torch.randn(B, S, R, H),
        "query_gate": torch.randn(B, queries, H),
        "key_gate": torch.randn(B, S, H),
        "static": torch.randn(H, H),
        "groups": 1,
    }
    return {**plain_arguments(queries), "pre": dict(factors), "post": dict(factors)}


def relative_arguments(queries: int) -> Arguments:
    tables = {"position_embeddings": torch.randn(S, H, D), "position_bias": torch.randn(S, H)}
    return {**plain_arguments(queries), **tables, "content_bias": torch.randn(H, D)}


def plain_arguments(queries: int) -> Arguments:
    return {
        "query": torch.randn(B, H, queries, D),
        "key": torch.randn(B, H, S, D),
        "value": torch.randn(B, H, S, D),
    }


def put(**values: Callable[[int], Any]) -> Callable[[Arguments], None]:
    """A mistake: arguments that take other values, which may depend on the number of queries."""

    def apply(arguments: Arguments) -> None:
        queries = arguments["query"].shape[2]
        arguments |= {name: make(queries) for name, make in values.items()}

    return apply


def factor(**values: Callable[[int], Any]) -> Callable[[Arguments], None]:
    """A mistake in the composition of both stages."""

    def apply(arguments: Arguments) -> None:
        queries = arguments["query"].shape[2]
        for stage in ("pre", "post"):
            arguments[stage] |= {name: make(queries) for name, make in values.items()}

    return apply


def mask(*shape: int | None) -> Callable[[Arguments], None]:
    """A boolean mask; None stands for the number of queries."""
    return put(
        attention_mask=lambda queries: torch.ones([queries if n is None else n for n in shape], dtype=torch.bool)
    )


def keys(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Arguments], None]:
    return put(key=lambda _: torch.randn(shape).to(dtype), value=lambda _: torch.randn(shape).to(dtype))


SHARED_MISTAKES: dict[str, Callable[[Arguments], None]] = {
    "keys of another batch": keys(3, H, S, D),
    "keys of batch 1": keys(1, H, S, D),
    "keys of no batch": keys(0, H, S, D),
    "keys of 4 heads": keys(B, 4, S, D),
    "keys of no heads": keys(B, 0, S, D),
    "keys of another width": keys(B, H, S, D + 1),
    "keys of three dimensions": keys(H, S, D),
    "keys of another dtype": keys(B, H, S, D, dtype=torch.float64),
    "values of another dtype": put(value=lambda _: torch.randn(B, H, S, D).double()),
    "fewer values than keys": put(value=lambda _: torch.randn(B, H, S - 1, D)),
    "queries of three dimensions": put(query=lambda queries: torch.randn(H, queries, D)),
    "queries of integers": put(query=lambda queries: torch.ones(B, H, queries, D, dtype=torch.long)),
    "everything of integers": put(
        query=lambda queries: torch.ones(B, H, queries, D, dtype=torch.long),
        key=lambda _: torch.ones(B, H, S, D, dtype=torch.long),
        value=lambda _: torch.ones(B, H, S, D, dtype=torch.long),
    ),
    "queries of no width": put(
        query=lambda queries: torch.ones(B, H, queries, 0),
        key=lambda _: torch.ones(B, H, S, 0),
        value=lambda _: torch.ones(B, H, S, 0),
    ),
    "a mask of 4 keys": mask(B, 1, None, 4),
    "a mask of 4 keys for all": mask(4),
    "a mask of more keys": mask(B, 1, None, S + 1),
    "a mask of more queries": mask(B, 1, 7, S),
    "a mask of another batch": mask(3, 1, None, S),
    "a mask of 4 heads": mask(B, 4, None, S),
    "a mask of five dimensions": mask(1, B, 1, None, S),
    "a mask of no keys": mask(B, 1, None, 0),
    "a mask of integers": put(attention_mask=lambda queries: torch.ones(B, 1, queries, S, dtype=torch.long)),
    "window 0": put(sliding_window=lambda _: 0),
    "window -1": put(sliding_window=lambda _: -1),
}


COMPOSED_MISTAKES: dict[str, Callable[[Arguments], None]] = {
    **SHARED_MISTAKES,
    "key_up of another rank": factor(key_up=lambda _: torch.randn(B, S, R + 1, H)),
    "query_up of another rank": factor(query_up=lambda queries: torch.randn(B, queries, R + 1, H)),
    "query_up of rank 1": factor(query_up=lambda queries: torch.randn(B, queries, 1, H)),
    "key_down without rank": factor(key_down=lambda _: torch.randn(B, S, H), key_up=lambda _: torch.randn(B, S, H)),
    "key_down without key_up": factor(key_up=lambda _: None),
    "key_gate with a rank": factor(key_gate=lambda _: torch.randn(B, S, 1, H)),
    "query_gate with a rank": factor(query_gate=lambda queries: torch.randn(B, queries, R, H)),
    "key_gate of fewer keys": factor(key_gate=lambda _: torch.randn(B, S - 1, H)),
    "key_gate of batch 1": factor(key_gate=lambda _: torch.randn(1, S, H)),
    "query_gate of the keys": factor(query_gate=lambda _: torch.randn(B, S, H)),
    "factors of 4 heads": factor(key_gate=lambda _: torch.randn(B, S, 4)),
    "a static row": factor(static=lambda _: torch.randn(H)),
    "a static matrix that is not square": factor(static=lambda _: torch.randn(H, H - 1)),
    "a static matrix for each row": factor(static=lambda _: torch.randn(H, 2, H)),
    "a static matrix of integers": factor(static=lambda _: torch.ones(H, H, dtype=torch.long)),
    "a gate of float64": factor(key_gate=lambda _: torch.randn(B, S, H).double()),
    "groups 4": factor(groups=lambda _: 4),
    "groups 0": factor(groups=lambda _: 0),
    "groups -2": factor(groups=lambda _: -2),
    "groups -1": factor(groups=lambda _: -1),
    "groups 12": factor(groups=lambda _: 12),
    "groups 1.5": factor(groups=lambda _: 1.5),
    "first_keys of another length": put(first_keys=lambda queries: torch.zeros(B, queries + 1, dtype=torch.long)),
    "first_keys of another batch": put(first_keys=lambda queries: torch.zeros(1, queries, dtype=torch.long)),
    "first_keys of floats": put(first_keys=lambda queries: torch.zeros(B, queries)),
    "first_keys of booleans": put(first_keys=lambda queries: torch.zeros(B, queries, dtype=torch.bool)),
    "a bias that is too short": put(position_bias=lambda _: torch.randn(3, H)),
    "a gain that is too short": put(position_gain=lambda _: torch.randn(3, H)),
    "an empty bias": put(position_bias=lambda _: torch.randn(0, H)),
    "a bias of 4 heads": put(position_bias=lambda _: torch.randn(S, 4)),
    "a gain of one dimension": put(position_gain=lambda _: torch.randn(S)),
    "a bias of integers": put(position_bias=lambda _: torch.ones(S, H, dtype=torch.long)),
    "a gain of float64": put(position_gain=lambda _: torch.randn(S, H).double()),
    "a composed bias without a bias": put(compose_position_bias=lambda _: True),
    "offset 1.5": put(offset=lambda _: 1.5),
    "an offset of two numbers": put(offset=lambda _: torch.ones(2, dtype=torch.long)),
    "first_keys of one dimension": put(first_keys=lambda queries: torch.zeros(queries, dtype=torch.long)),
}


RELATIVE_MISTAKES: dict[str, Callable[[Arguments], None]] = {
    **SHARED_MISTAKES,
    "embeddings that are too short": put(position_embeddings=lambda _: torch.randn(S - 1, H, D)),
    "embeddings of 4 heads": put(position_embeddings=lambda _: torch.randn(S, 4, D)),
    "embeddings of two dimensions": put(position_embeddings=lambda _: torch.randn(S, H)),
    "embeddings of no dimension": put(position_embeddings=lambda _: torch.tensor(1.0)),
    "embeddings of float64": put(position_embeddings=lambda _: torch.randn(S, H, D).double()),
    "embeddings of integers": put(position_embeddings=lambda _: torch.ones(S, H, D, dtype=torch.long)),
    "a bias that is too short": put(position_bias=lambda _: torch.randn(3, H)),
    "an empty bias": put(position_bias=lambda _: torch.randn(0, H)),
    "a bias of 4 heads": put(position_bias=lambda _: torch.randn(S, 4)),
    "a content bias of one head": put(content_bias=lambda _: torch.randn(1, D)),
    "a content bias of one dimension": put(content_bias=lambda _: torch.randn(D)),
    "dropout 1.5": put(dropout=lambda _: 1.5),
    "dropout -0.1": put(dropout=lambda _: -0.1),
    "dropout NaN": put(dropout=lambda _: float("nan")),
    "offset 1.5": put(offset=lambda _: 1.5),
}
KIND = Kind("op-refusals", generate, check, fast=30, seconds=60, batch=200)
