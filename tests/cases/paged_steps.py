"""Decoding steps of requests whose keys, values and factors are rows of pages, for all that read them in place."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from cases.composed_op import ALL, DYNAMIC, random_composition
from cases.described import Described
from torch import Tensor

from dynattn import Composition, dcmha_attention
from dynattn.modeling.ops.dcmha.pages import Pages, without_keys
from dynattn.modeling.ops.distance_tables import NO_TABLES, DistanceTables


@dataclass(frozen=True)
class Step(Described):
    """One decoding step of requests with these numbers of keys, in pages of `page_length` rows.

    The keys of each request begin at row `first` of its first page, but the first `shared` ones are rows of the first
    request, as those of a common prefix are. Pages of one row lie in any order.
    Tables by distance come with it if `compose_bias` says where the bias is added.
    """

    keys: tuple[int, ...]
    page_length: int = 16
    heads: tuple[int, int] = (4, 4)
    width: int = 8
    terms: frozenset[str] = ALL
    stages: tuple[str, ...] = ("pre", "post")
    rank: int = 2
    groups: int = 1
    first: int = 0
    shared: int = 0
    padding: int = 0
    compose_bias: bool | None = None

    @property
    def key_terms(self) -> int:
        return 2 * self.rank * ("key_low_rank" in self.terms) + ("key_gate" in self.terms)


STEPS = [
    Step((1, 1, 1), page_length=1),
    Step((100, 3, 64, 65), heads=(16, 16), terms=DYNAMIC),
    Step((257, 12, 1, 300), page_length=1, heads=(8, 2), groups=2),
    Step((31, 130), heads=(6, 1), rank=3, padding=3),
    Step((40, 41), first=9, heads=(12, 4), groups=3, rank=1),
    Step((90, 17), terms=frozenset({"key_gate"}), stages=("post",)),
    Step((90, 17), terms=frozenset({"key_low_rank", "query_gate"}), stages=("pre",)),
    Step((90, 17), terms=frozenset({"query_low_rank", "static"})),
    Step((70, 5), stages=(), width=64),
    Step((45, 23, 31), page_length=1, shared=20),
    Step((1100, 200), page_length=256, heads=(8, 4), width=80, terms=DYNAMIC),
    Step((100, 3, 64, 65), heads=(16, 16), terms=DYNAMIC, compose_bias=True),
    Step((70, 5), stages=(), width=64, compose_bias=False),
    Step((40, 41), first=9, heads=(12, 4), groups=3, rank=1, compose_bias=False),
    Step((20, 3), first=2, heads=(4, 2), rank=1, compose_bias=True),
    Step((60, 33), heads=(8, 4), shared=32),
]


class RandomStep(NamedTuple):
    query: Tensor  # [N, H, 1, D]
    pages: Pages  # in random order
    stages: dict[str, Composition]
    tables: DistanceTables
    alone: list[dict[str, Any]]  # for each request, the arguments of the plain op


def random_step(step: Step, dtype: torch.dtype) -> RandomStep:
    """Random inputs of a step, on the default device."""
    heads, kv_heads = step.heads
    requests, longest = len(step.keys), max(step.keys)
    query = torch.randn(requests, heads, 1, step.width).to(dtype)
    states = [torch.randn(requests, longest, kv_heads, step.width).to(dtype) for _ in "kv"]
    stages = {}
    for name in step.stages:
        stage = random_composition(step.terms, requests, 1, longest, heads, step.rank, groups=step.groups)
        stages[name] = stage.map(lambda factor: factor.detach().to(dtype))
    factors = [factor for stage in stages.values() for factor in stage.side("key") if factor is not None]
    for of_keys in (*states, *factors):
        of_keys[:, : step.shared] = of_keys[:1, : step.shared]
    rows = [
        torch.cat([kept, key_terms(stages.get(name), kept, step), unread(kept, (*kept.shape[:3], step.padding))], dim=3)
        for kept, name in zip(states, ("pre", "post"), strict=True)
    ]
    counts = [-(-(keys + step.first) // step.page_length) for keys in step.keys]
    table = torch.randperm(sum(counts) + 3)[: sum(counts)]
    if step.page_length > 1:
        table = table.sort().values  # neighbours are read in one run
    pools = [unread(kept, ((sum(counts) + 3) * step.page_length, *kept.shape[2:])) for kept in rows]
    numbers = []
    for own, keys in zip(table.split(counts), step.keys, strict=True):
        of_pages = own[:, None] * step.page_length + torch.arange(step.page_length)
        own_rows = of_pages.flatten()[step.first : step.first + keys]
        numbers.append(torch.cat([(numbers or [own_rows])[0][: step.shared], own_rows[step.shared :]]))
    for pool, kept in zip(pools, rows, strict=True):
        for request, own in enumerate(numbers):
            pool[own] = kept[request, : len(own)]
    starts = torch.tensor([0, *step.keys]).cumsum(0)[:-1]
    pages = Pages(*pools, torch.cat(numbers), starts, torch.tensor(step.keys))
    tables = random_tables(step)
    alone = [
        {
            "query": query[request][None],
            "key": states[0][request][None, :keys].transpose(1, 2),
            "value": states[1][request][None, :keys].transpose(1, 2),
            **{name: one_of(stage, request, keys) for name, stage in stages.items()},
            **tables.present,
            "compose_position_bias": tables.compose_bias,
        }
        for request, keys in enumerate(step.keys)
    ]
    return RandomStep(query, pages, stages, tables, alone)


def random_tables(step: Step) -> DistanceTables:
    """Tables for the longest request."""
    if step.compose_bias is None:
        return NO_TABLES
    bias, gain = torch.randn(2, max(step.keys), step.heads[0])
    return DistanceTables(bias, gain, None, step.compose_bias)


def unread(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What lies where nothing may be read."""
    return like.new_full(shape, min(1e9, torch.finfo(like.dtype).max))


def key_terms(stage: Composition | None, states: Tensor, step: Step) -> Tensor:
    """The terms of all keys `[requests, keys, H_kv, terms * H / H_kv]`."""
    channels = step.key_terms * step.heads[0] // step.heads[1]
    if stage is None or not channels:
        return unread(states, (*states.shape[:3], channels))
    down, up, gate = stage.side("key")
    terms = [*([] if down is None else [down, up]), *([] if gate is None else [gate[:, :, None]])]
    return torch.cat(terms, dim=2).reshape(*states.shape[:3], channels)


def one_of(stage: Composition, request: int, keys: int) -> Composition:
    own = {
        name: tensor if name == "static" else tensor[request][None, : keys if name.startswith("key") else None]
        for name, tensor in stage.tensors().items()
    }
    return replace(stage, **own)


def run(
    decode: Callable[..., Tensor | None],
    step: Step,
    query: Tensor,
    pages: Pages,
    stages: dict[str, Composition],
    tables: DistanceTables = NO_TABLES,
) -> Tensor:
    """The output `[N, 1, H, D]` of one of the implementations."""
    pre, post = (without_keys(stages.get(name)) for name in ("pre", "post"))
    output = decode(query, pages, pre, post, step.width**-0.5, step.key_terms, tables)
    assert output is not None
    return output


def assert_as_exact_as_the_reference(output: Tensor, alone: list[dict[str, Any]], dtype: torch.dtype) -> None:
    """Each request against `eager` in float64, whose noise in the dtype of the output is the measure."""
    for found, arguments in zip(output, alone, strict=True):
        expected = dcmha_attention(**in_dtype(arguments, torch.float64), implementation="eager")[0]
        noise = (dcmha_attention(**arguments, implementation="eager")[0] - expected).abs().max()
        assert found.dtype == dtype and found.shape == expected.shape
        assert (found - expected).abs().max() <= 4 * noise + 1e-6 * expected.abs().max()


def in_dtype(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    casts: dict[type, Callable[[Any], Any]] = {
        Tensor: lambda one: one.to(dtype),
        Composition: lambda one: one.map(lambda factor: factor.to(dtype)),
    }
    return {name: casts.get(type(one), lambda one: one)(one) for name, one in arguments.items()}
