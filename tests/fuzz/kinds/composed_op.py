"""`dcmha_attention`: every implementation against the definition in float64, outputs and gradients."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import Tensor

from dynattn import Composition, dcmha_attention
from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS

from ..harness import Case, Kind
from ..tensors import (
    DTYPES,
    LAYOUTS,
    expect_within_noise,
    gradients,
    laid_out,
    make_mask,
    mask_in_float64,
    random_mask,
    random_values,
    rounding_of,
)

TERMS = ("query_low_rank", "key_low_rank", "query_gate", "key_gate", "static")
# Small sizes for every edge of a tile; the long ones take several chunks.
LENGTHS = (0, 1, 1, 2, 3, 5, 7, 13, 16, 17, 31, 33)
LONG = (65, 129, 257, 400)
TRITON_SHARE = 0.02
# Every implementation that is neither the reference nor interpreted.
QUICK = tuple(sorted(COMPOSING_IMPLEMENTATIONS.keys() - {"eager", "triton"}))


def generate(random: Random) -> Case:
    """A valid call; hostile are its shapes, strides, masks, and what has a gradient."""
    heads = random.choice((1, 2, 3, 4, 6, 8, 16))
    groups = random.choice([number for number in (1, 1, 2, 3, 4) if heads % number == 0])
    implementation = random.choice((*QUICK, "chunked", "C code", "C code", "C code", "default"))
    if random.random() < TRITON_SHARE:
        implementation = "triton"
    lengths = LONG if random.random() < 0.1 and implementation != "triton" else LENGTHS
    queries, keys = random.choice(lengths), random.choice(lengths)
    if random.random() < 0.25:
        queries = 1
    batch = random.choice((0, 1, 1, 2, 2, 3))
    dtype = random.choice([name for name in DTYPES if implementation != "triton" or name != "float64"])
    case: Case = {
        "class": implementation,
        "dtype": dtype,
        "sizes": {
            "batch": batch,
            "heads": heads,
            "kv_heads": random.choice([number for number in range(1, heads + 1) if heads % number == 0]),
            "queries": queries,
            "keys": keys,
            "width": random.choice((1, 2, 3, 4, 8, 16, 20)),
            "rank": random.choice((1, 1, 2, 2, 3)),
        },
        "groups": groups,
        "is_causal": random.random() < 0.6,
        "window": random.choice((None, None, 1, 2, 5, 16, 1000)),
        "scaling": random.choice((None, None, 0.3, 0.0, -1.0)),
        "mask": random_mask(random, (batch, heads, queries, keys)) if random.random() < 0.5 else None,
        "first_keys": random.choice((None, None, "int64", "int32", "turned", "beyond")),
        "tables": random_tables(random, queries, keys) if random.random() < 0.4 else {},
        "layouts": {name: random.choice(LAYOUTS) for name in ("query", "key", "value", "factors", "static", "tables")},
        "grad_layout": random.choice(("plain", "transposed", "expanded", "sliced")),
        "leaves": random.choice(("all", "all", "none", "none", "query", "factors", "static", "mask", "tables")),
        "threads": random.choice((1, 1, 2, 3)),
        "seed": random.randrange(2**31),
    }
    stages = random.choice((("pre", "post"), ("pre", "post"), ("pre",), ("post",), ()))
    case |= {stage: random.sample(TERMS, random.randint(0, len(TERMS))) for stage in stages}
    if implementation == "triton" and case["mask"] is not None and len(case["mask"]["shape"]) > 2:
        case["mask"]["shape"][-3] = 1  # the kernels say that they know no others
    return case


def random_tables(random: Random, queries: int, keys: int) -> dict[str, Any]:
    """Tables by distance, with a few rows too many, and where the queries stand, which may be anywhere."""
    offset = random.choice((None, None, 0, random.randint(-5, keys + 5)))
    rows = max(1, keys, queries + (offset or 0)) + random.choice((0, 0, 3))
    tables = {name: rows for name in ("position_bias", "position_gain") if random.random() < 0.6}
    composes = "position_bias" in tables and random.random() < 0.4
    return {"rows": tables, "offset": offset, "in_a_tensor": random.random() < 0.3, "compose_bias": composes}


def check(case: Case) -> None:
    """Finds an implementation that is further from the definition than rounding explains."""
    torch.set_num_threads(case["threads"])
    leaves, call = build(case)
    plain = outcome(call, leaves, "eager", case)
    truth = outcome(call, in_float64(leaves), "eager", case)
    actual = outcome(call, leaves, case["class"], case)
    for name, exact in truth.items():
        expect_within_noise(name, actual[name], plain[name], exact, rounding_of(name, case, truth))


def build(case: Case) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    """The tensors of a case by name, and the call that takes them."""
    sizes, dtype = case["sizes"], DTYPES[case["dtype"]]
    leaves = {}
    for place, (name, shape) in enumerate(shapes(case)):
        kind = kind_of(name)
        scale = 1.0 if kind in ("query", "key", "value") else 0.5
        values = random_values(shape, case["seed"] + place, scale).to(dtype)
        leaves[name] = laid_out(values, case["layouts"][kind])
    mask = make_mask(case["mask"], dtype)
    if mask is not None:
        leaves["mask"] = mask
    first_keys = make_first_keys(case)

    def call(tensors: Mapping[str, Tensor], implementation: str | None) -> Tensor:
        return dcmha_attention(
            tensors["query"],
            tensors["key"],
            tensors["value"],
            pre=composition("pre", tensors, case),
            post=composition("post", tensors, case),
            scaling=case["scaling"],
            attention_mask=tensors.get("mask"),
            is_causal=case["is_causal"],
            sliding_window=case["window"],
            first_keys=first_keys,
            **table_arguments(case, tensors),
            implementation=implementation,
        )

    assert sizes["heads"] % sizes["kv_heads"] == 0
    return leaves, call


def kind_of(name: str) -> str:
    """What a leaf is, as far as its layout goes."""
    if name in ("query", "key", "value"):
        return name
    return "tables" if name.startswith("position") else "static" if name.endswith("static") else "factors"


def table_arguments(case: Case, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tables of a call, and where its queries stand."""
    tables = case["tables"]
    if not tables:
        return {}
    offset = tables["offset"]
    if offset is not None and tables["in_a_tensor"]:
        offset = torch.tensor(offset)
    given = {name: tensors[name] for name in tables["rows"]}
    return {**given, "offset": offset, "compose_position_bias": tables["compose_bias"]}


def shapes(case: Case) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the inputs and of all factors."""
    batch, heads, kv_heads, queries, keys, width, rank = case["sizes"].values()
    yield "query", (batch, heads, queries, width)
    yield "key", (batch, kv_heads, keys, width)
    yield "value", (batch, kv_heads, keys, width)
    for stage in ("pre", "post"):
        for side, length in (("query", queries), ("key", keys)):
            if f"{side}_low_rank" in case.get(stage, ()):
                yield f"{stage}.{side}_down", (batch, length, rank, heads)
                yield f"{stage}.{side}_up", (batch, length, rank, heads)
            if f"{side}_gate" in case.get(stage, ()):
                yield f"{stage}.{side}_gate", (batch, length, heads)
        if "static" in case.get(stage, ()):
            yield f"{stage}.static", (heads, heads)
    for name, rows in case["tables"].get("rows", {}).items():
        yield name, (rows, heads)


def composition(stage: str, tensors: Mapping[str, Tensor], case: Case) -> Composition | None:
    """The factors of a stage; a static matrix mixes heads inside a group only."""
    if stage not in case:
        return None
    factors: dict[str, Any] = {
        name.removeprefix(f"{stage}."): tensor for name, tensor in tensors.items() if name.startswith(f"{stage}.")
    }
    if "static" in factors and case["groups"] > 1:
        size = case["sizes"]["heads"] // case["groups"]
        block = torch.ones(size, size, dtype=factors["static"].dtype)
        factors["static"] = factors["static"] * torch.block_diag(*[block] * case["groups"])
    return Composition(**factors, groups=case["groups"])


def make_first_keys(case: Case) -> Tensor | None:
    """`[B, T]`; "turned" is a view with swapped strides, "beyond" has keys that are not there."""
    kind, sizes = case["first_keys"], case["sizes"]
    if kind is None:
        return None
    generator = torch.Generator().manual_seed(case["seed"])
    lowest, highest = (-3, sizes["keys"] + 3) if kind == "beyond" else (0, max(1, sizes["keys"]))
    if kind == "turned":
        return torch.randint(lowest, highest, (sizes["queries"], sizes["batch"]), generator=generator).t()
    first = torch.randint(lowest, highest, (sizes["batch"], sizes["queries"]), generator=generator)
    return first.to(torch.int32 if kind == "int32" else torch.int64)


def in_float64(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    exact = {name: tensor.double() for name, tensor in leaves.items() if name != "mask"}
    mask = mask_in_float64(leaves.get("mask"))
    return exact if mask is None else {**exact, "mask": mask}


def outcome(call: Callable[..., Tensor], tensors: Mapping[str, Tensor], name: str, case: Case) -> dict[str, Tensor]:
    """The output, and the gradients of the leaves that the case asks for; those of no influence are zero."""
    leaves = {leaf: tensor.detach() for leaf, tensor in tensors.items()}
    chosen = [leaf for leaf, tensor in leaves.items() if tensor.is_floating_point() and is_chosen(leaf, case, name)]
    for leaf in chosen:
        leaves[leaf].requires_grad_()
    with composing(name) as implementation, torch.set_grad_enabled(bool(chosen)):
        output = call(leaves, implementation)
    with composing(name):
        return {"output": output.detach(), **gradients(output, {leaf: leaves[leaf] for leaf in chosen}, case)}


def is_chosen(leaf: str, case: Case, implementation: str) -> bool:
    if leaf == "mask" and case["class"] in ("triton", "default"):
        return False  # the kernels say that they have no such gradient
    is_factor = "." in leaf
    chosen = {"all": True, "none": False, "factors": is_factor, "static": leaf.endswith("static")}
    chosen["tables"] = leaf.startswith("position")
    return chosen.get(case["leaves"], leaf == case["leaves"])


@contextmanager
def composing(name: str) -> Iterator[str | None]:
    """Chooses what the chunked implementation composes with; yields the name that the op takes."""
    with patch_environment(DYNATTN_COMPILE="0" if name == "chunked" else "auto"):
        yield {"C code": "chunked", "default": None}.get(name, name)


KIND = Kind("composed-op", generate, check, fast=24, batch=60)
