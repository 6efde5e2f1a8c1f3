"""`relative_attention`: every implementation against the definition in float64, outputs and gradients."""

from collections.abc import Callable, Mapping
from random import Random

from torch import Tensor

from dynattn import relative_attention

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

LENGTHS = (0, 1, 1, 2, 3, 5, 8, 17, 31, 64, 65, 66, 130)
TABLES = ("position_embeddings", "position_bias", "content_bias")


def generate(random: Random) -> Case:
    """A valid call; tables may be longer than the distances that queries reach, and may be absent."""
    sizes = {
        "batch": random.choice((0, 1, 2, 2, 3)),
        "heads": random.choice((1, 2, 3, 8)),
        "queries": random.choice(LENGTHS),
        "keys": random.choice(LENGTHS),
        "width": random.choice((1, 2, 3, 8, 16)),
    }
    window = random.choice((None, None, 1, 2, 7, 64, 1000))
    offset = random.choice((None, None, None, 0, random.randint(0, 20)))
    farthest = max(sizes["keys"], 0 if offset is None else sizes["queries"] + offset)
    reach = farthest if window is None else min(farthest, window)
    tables = random.sample(TABLES, random.randint(0, 3))
    is_causal = random.random() < 0.7 or not {*tables} <= {"content_bias"}  # tables have no rows for later keys
    implementation = random.choice(("chunked", "chunked", "sdpa", "default"))
    return {
        "class": implementation,
        "dtype": random.choice(list(DTYPES)),
        "sizes": sizes,
        "rows": reach + random.choice((0, 0, 1, 5)),
        "tables": tables,
        "is_causal": is_causal,
        "window": window,
        "scaling": random.choice((None, None, 0.2, 0.0, -1.0)),
        "offset": offset,
        "mask": random_mask(random, (sizes["batch"], sizes["heads"], sizes["queries"], sizes["keys"]))
        if random.random() < 0.5
        else None,
        "layouts": {name: random.choice(LAYOUTS) for name in ("query", "key", "value", "tables")},
        "grad_layout": random.choice(("plain", "transposed", "expanded", "sliced")),
        "leaves": random.choice(("all", "all", "none", "query", "tables")),
        "seed": random.randrange(2**31),
    }


def check(case: Case) -> None:
    """Finds an implementation that is further from the definition than rounding explains."""
    dtype = DTYPES[case["dtype"]]
    tensors = build(case)
    mask = make_mask(case["mask"], dtype)
    plain = outcome(case, tensors, mask, "eager")
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    truth = outcome(case, exact, mask_in_float64(mask), "eager")
    actual = outcome(case, tensors, mask, None if case["class"] == "default" else case["class"])
    for name, value in truth.items():
        expect_within_noise(name, actual[name], plain[name], value, rounding_of(name, case, truth))


def build(case: Case) -> dict[str, Tensor]:
    """Queries `[B, H, T, D]`, keys and values `[B, H, S, D]`, and the tables that the case has."""
    batch, heads, queries, keys, width = case["sizes"].values()
    shapes = {
        "query": (batch, heads, queries, width),
        "key": (batch, heads, keys, width),
        "value": (batch, heads, keys, width),
        "position_embeddings": (case["rows"], heads, width),
        "position_bias": (case["rows"], heads),
        "content_bias": (heads, width),
    }
    return {
        name: laid_out(
            random_values(shape, case["seed"] + place).to(DTYPES[case["dtype"]]),
            case["layouts"]["tables" if name in TABLES else name],
        )
        for place, (name, shape) in enumerate(shapes.items())
        if name not in TABLES or name in case["tables"]
    }


def outcome(case: Case, tensors: Mapping[str, Tensor], mask: Tensor | None, name: str | None) -> dict[str, Tensor]:
    """The output, and the gradients of the leaves that the case asks for."""
    leaves = {leaf: tensor.detach() for leaf, tensor in tensors.items()}
    chosen = [leaf for leaf in leaves if is_chosen(leaf, case["leaves"])]
    for leaf in chosen:
        leaves[leaf].requires_grad_()
    options = {option: case[option] for option in ("scaling", "is_causal", "offset")}
    call: Callable[..., Tensor] = relative_attention
    output = call(**leaves, **options, attention_mask=mask, sliding_window=case["window"], implementation=name)
    return {"output": output.detach(), **gradients(output, {leaf: leaves[leaf] for leaf in chosen}, case)}


def is_chosen(leaf: str, leaves: str) -> bool:
    return leaves in ("all", leaf) or (leaves == "tables" and leaf in TABLES)


KIND = Kind("relative-op", generate, check, fast=30, batch=60)
