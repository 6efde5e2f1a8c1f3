"""Cases of the composed op, and how tests run them: inputs in float64, casts, outputs with all gradients."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch
from cases.described import Described
from torch import Tensor

from dynattn import Composition, dcmha_attention

ALL = frozenset({"query_low_rank", "key_low_rank", "query_gate", "key_gate", "static"})
DYNAMIC = ALL - {"static"}
MASKS: dict[str, Callable[[int, int, int, int], Tensor]] = {
    "padding": lambda b, h, t, s: torch.rand(b, 1, 1, s) > 0.3,
    "pairs": lambda b, h, t, s: torch.rand(b, 1, t, s) > 0.3,
    "pairs of heads": lambda b, h, t, s: torch.rand(b, h, t, s) > 0.5,
    "unbatched": lambda b, h, t, s: torch.rand(t, s) > 0.3,
    "bias": lambda b, h, t, s: torch.randn(1, h, t, s, dtype=torch.float64).requires_grad_(),
    "bias of keys": lambda b, h, t, s: torch.randn(b, 1, 1, s, dtype=torch.float64).requires_grad_(),
    "lowest": lambda b, h, t, s: torch.zeros(b, 1, t, s).double().masked_fill(torch.rand(b, 1, t, s) > 0.7, -1.7e308),
    "additive": lambda b, h, t, s: torch.randn(b, 1, t, s).masked_fill(torch.rand(b, 1, t, s) > 0.7, -torch.inf),
}


@dataclass(frozen=True)
class Case(Described):
    queries: int
    keys: int
    heads: tuple[int, int] = (4, 4)
    terms: frozenset[str] = ALL
    stages: tuple[str, ...] = ("pre", "post")
    rank: int = 2
    groups: int = 1
    is_causal: bool = True
    window: int | None = None
    mask: str | None = None
    batch: int = 2
    tables: tuple[str, ...] = ()  # of "bias" and "gain"
    compose_bias: bool = False
    offset: int | None = None
    width: int = 8


CASES = [
    Case(1, 1),
    Case(1, 63, heads=(8, 2), groups=2),
    Case(1, 100, window=9, mask="padding"),
    Case(1, 63, terms=DYNAMIC, mask="bias"),
    Case(63, 63, rank=1),
    Case(63, 63, terms=DYNAMIC, stages=("pre",), mask="padding"),
    Case(100, 100, heads=(6, 1), rank=4, groups=3, stages=("post",)),
    Case(100, 100, terms=frozenset({"key_gate"}), is_causal=False, mask="unbatched"),
    Case(100, 100, heads=(4, 2), window=9, terms=frozenset({"key_low_rank"})),
    Case(100, 100, window=80, terms=frozenset({"query_low_rank", "query_gate"}), mask="pairs"),
    Case(100, 100, window=1),
    Case(100, 100, window=20, is_causal=False, mask="bias of keys"),
    Case(257, 257, terms=DYNAMIC, heads=(4, 2)),
    Case(257, 257, terms=frozenset({"static"}), window=70),
    Case(100, 257, mask="pairs of heads", groups=2),
    Case(63, 257, window=100, mask="lowest"),
    Case(100, 63, mask="bias"),  # queries before the first key see nothing
    Case(257, 257, stages=()),
    Case(70, 50, is_causal=False),  # every query sees every key, also those that stand before the first key
    Case(200, 33, is_causal=False, mask="pairs", terms=DYNAMIC),
    Case(200, 33, is_causal=False, window=100),
    Case(200, 33),
    Case(1, 63, tables=("bias",), mask="padding"),
    Case(1, 100, tables=("bias", "gain"), window=9, compose_bias=True),
    Case(1, 100, tables=("bias", "gain"), offset=40, window=9, mask="bias of keys"),
    Case(100, 100, heads=(4, 2), tables=("bias", "gain")),
    Case(257, 257, tables=("bias",), terms=DYNAMIC, mask="pairs"),
    Case(130, 130, tables=("bias", "gain"), window=20, compose_bias=True),
    Case(63, 257, tables=("gain",), stages=("pre",), groups=2),
    Case(100, 100, tables=("bias", "gain"), stages=()),
    Case(70, 150, tables=("bias", "gain"), offset=30, mask="bias"),
    Case(70, 150, tables=("bias",), offset=30, window=12),
    Case(100, 63, tables=("bias", "gain")),
    Case(70, 50, offset=-20),
    Case(70, 150, is_causal=False, window=30, tables=("bias", "gain")),  # later keys read row 0
]


def random_composition(
    terms: Set[str], batch: int, queries: int, keys: int, heads: int, rank: int = 2, **other: Any
) -> Composition:
    def factor(*shape: int) -> Tensor:
        return (torch.randn(*shape, dtype=torch.float64) * 0.4).requires_grad_()

    given: dict[str, Tensor] = {}
    for side, length in (("query", queries), ("key", keys)):
        if f"{side}_low_rank" in terms:
            given[f"{side}_down"] = factor(batch, length, rank, heads)
            given[f"{side}_up"] = factor(batch, length, rank, heads)
        if f"{side}_gate" in terms:
            given[f"{side}_gate"] = factor(batch, length, heads)
    if "static" in terms:
        given["static"] = factor(heads, heads)
    return Composition(**given, **other)


def random_inputs(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """All tensors to differentiate, the first three of which are query, key and value, and the op's keywords."""
    heads, kv_heads = case.heads
    shapes = ((heads, case.queries), (kv_heads, case.keys), (kv_heads, case.keys))
    tensors = [
        torch.randn(case.batch, h, length, case.width, dtype=torch.float64).requires_grad_() for h, length in shapes
    ]
    keywords: dict[str, Any] = {"is_causal": case.is_causal, "sliding_window": case.window}
    for stage in case.stages:
        shape = (case.batch, case.queries, case.keys, heads, case.rank)
        keywords[stage] = random_composition(case.terms, *shape, groups=case.groups)
        tensors += keywords[stage].tensors().values()
    if case.mask is not None:
        mask = keywords["attention_mask"] = MASKS[case.mask](case.batch, heads, case.queries, case.keys)
        tensors += [mask] if mask.requires_grad else []
    for name in case.tables:
        rows = max(case.keys, case.queries + (case.offset or 0))
        table = torch.randn(rows, heads, dtype=torch.float64, requires_grad=True)
        keywords[f"position_{name}"] = table
        tensors.append(table)
    if case.offset is not None:
        keywords["offset"] = case.offset
    if case.compose_bias:
        keywords["compose_position_bias"] = True
    return tensors, keywords


def in_dtype(
    dtype: torch.dtype, tensors: list[Tensor], keywords: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The same inputs in another dtype, everything that is to be differentiated in the same order."""
    cast = {id(tensor): tensor.detach().to(dtype).requires_grad_() for tensor in tensors}
    changed = dict(keywords)
    for stage in ("pre", "post"):
        if keywords.get(stage) is not None:
            changed[stage] = keywords[stage].map(lambda factor: cast[id(factor)])
    changed |= {name: cast[id(keywords[name])] for name in ("position_bias", "position_gain") if name in keywords}
    mask = keywords.get("attention_mask")
    if mask is not None and mask.dtype != torch.bool:
        finite = mask.detach().clamp(min=torch.finfo(dtype).min).where(mask > -torch.inf, -torch.inf)
        changed["attention_mask"] = cast.get(id(mask), finite.to(dtype))
    return [cast[id(tensor)] for tensor in tensors], changed


def run(tensors: list[Tensor], keywords: dict[str, Any], implementation: str) -> tuple[Tensor, ...]:
    """The output, then the gradients of all tensors."""
    output = dcmha_attention(*tensors[:3], **keywords, implementation=implementation)
    random = {"generator": torch.Generator("cpu").manual_seed(5), "dtype": torch.float32, "device": "cpu"}
    upstream = torch.randn(output.shape, **random).to(output)
    return output, *torch.autograd.grad(output, tensors, upstream)
