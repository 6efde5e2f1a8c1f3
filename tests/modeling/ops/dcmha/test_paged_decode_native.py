"""A decoding step over a paged cache in C code: as exact as the reference op on the same keys, wherever rows lie."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases.composed_op import ALL, DYNAMIC, random_composition
from torch import Tensor

from dynattn import Composition, dcmha_attention
from dynattn.modeling.ops import native_library
from dynattn.modeling.ops.dcmha.chunked import paged_decode_native
from dynattn.modeling.ops.dcmha.chunked.paged_decode_native import Pages, attend_to_pages

pytestmark = pytest.mark.skipif(native_library.find_compiler() is None, reason="there is no C compiler")
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Step:
    """One decoding step of requests with these numbers of keys, in pages of `page_length` rows."""

    keys: tuple[int, ...]
    page_length: int = 16
    heads: tuple[int, int] = (4, 4)
    width: int = 8
    terms: frozenset[str] = ALL
    stages: tuple[str, ...] = ("pre", "post")
    rank: int = 2
    groups: int = 1
    first: int = 0
    padding: int = 0

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
    Step((1100, 200), page_length=256, heads=(8, 4), width=80, terms=DYNAMIC),
]


def random_step(step: Step, dtype: torch.dtype) -> tuple[Tensor, Pages, dict[str, Composition], list[dict[str, Any]]]:
    """The query, pages in random order, both stages, and for each request the arguments of the plain op."""
    heads, kv_heads = step.heads
    requests, longest = len(step.keys), max(step.keys)
    query = torch.randn(requests, heads, 1, step.width).to(dtype)
    states = [torch.randn(requests, longest, kv_heads, step.width).to(dtype) for _ in "kv"]
    stages = {}
    for name in step.stages:
        stage = random_composition(step.terms, requests, 1, longest, heads, step.rank, groups=step.groups)
        stages[name] = stage.map(lambda factor: factor.detach().to(dtype))
    rows = [
        torch.cat(
            [kept, key_terms(stages.get(name), kept, step), kept.new_full((*kept.shape[:3], step.padding), 1e9)], 3
        )
        for kept, name in zip(states, ("pre", "post"), strict=True)
    ]
    counts = [-(-(keys + step.first) // step.page_length) for keys in step.keys]
    table = torch.randperm(sum(counts) + 3)[: sum(counts)]
    if step.page_length > 1:
        table = table.sort().values  # neighbours are read in one run
    pools = [torch.full((sum(counts) + 3, step.page_length, *kept.shape[2:]), 1e9, dtype=dtype) for kept in rows]
    starts = torch.tensor([0, *counts]).cumsum(0)[:-1]
    for request, keys in enumerate(step.keys):
        places = torch.arange(step.first, step.first + keys)
        page = table[starts[request] + places // step.page_length]
        for pool, kept in zip(pools, rows, strict=True):
            pool[page, places % step.page_length] = kept[request, :keys]
    pages = Pages(*pools, table, starts, torch.full((requests,), step.first), torch.tensor(step.keys))
    alone = [
        {
            "query": query[request][None],
            "key": states[0][request][None, :keys].transpose(1, 2),
            "value": states[1][request][None, :keys].transpose(1, 2),
            **{name: one_of(stage, request, keys) for name, stage in stages.items()},
        }
        for request, keys in enumerate(step.keys)
    ]
    return query, pages, stages, alone


def key_terms(stage: Composition | None, states: Tensor, step: Step) -> Tensor:
    """The terms of all keys `[requests, keys, H_kv, terms * H / H_kv]`."""
    channels = step.key_terms * step.heads[0] // step.heads[1]
    if stage is None or not channels:
        return states.new_full((*states.shape[:3], channels), 1e9)
    down, up, gate = stage.side("key")
    terms = [*([] if down is None else [down, up]), *([] if gate is None else [gate[:, :, None]])]
    return torch.cat(terms, dim=2).reshape(*states.shape[:3], channels)


def one_of(stage: Composition, request: int, keys: int) -> Composition:
    own = {
        name: tensor if name == "static" else tensor[request][None, : keys if name.startswith("key") else None]
        for name, tensor in stage.tensors().items()
    }
    return replace(stage, **own)


def without_keys(stage: Composition | None) -> Composition | None:
    return None if stage is None else replace(stage, key_down=None, key_up=None, key_gate=None)


def run(step: Step, query: Tensor, pages: Pages, stages: dict[str, Composition]) -> Tensor:
    pre, post = (without_keys(stages.get(name)) for name in ("pre", "post"))
    output = attend_to_pages(query, pages, pre, post, step.width**-0.5, step.key_terms)
    assert output is not None
    return output


def in_dtype(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: one.to(dtype) if isinstance(one, Tensor) else one.map(lambda factor: factor.to(dtype))
        for name, one in arguments.items()
    }


def each(steps: list[Step]) -> list[Any]:
    """Every third of the steps, and the others for slow runs: each of them is compiled anew."""
    return [
        pytest.param(step, marks=[pytest.mark.slow] if index % 3 else [], id=str(step))
        for index, step in enumerate(steps)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", each(STEPS))
def test_a_step_over_pages_is_as_exact_as_the_reference_on_each_request(step: Step, dtype: torch.dtype) -> None:
    query, pages, stages, alone = random_step(step, dtype)
    output = run(step, query, pages, stages)
    for found, arguments in zip(output, alone, strict=True):
        expected = dcmha_attention(**in_dtype(arguments, torch.float64), implementation="eager")[0]
        noise = (dcmha_attention(**arguments, implementation="eager")[0] - expected).abs().max()
        assert found.dtype == dtype and found.shape == expected.shape
        assert (found - expected).abs().max() <= 4 * noise + 1e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_threads_nor_on_other_requests(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode_native, "ELEMENTS_PER_THREAD", 1)
    step, before = Step((1100, 3, 200), heads=(8, 4)), torch.get_num_threads()
    query, pages, stages, _ = random_step(step, dtype)
    outputs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(run(step, query, pages, stages))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    last = pages._replace(**{name: getattr(pages, name)[2:] for name in ("table_starts", "first_keys", "key_counts")})
    own = {name: stage.map(lambda factor: factor if factor.ndim == 2 else factor[2:]) for name, stage in stages.items()}
    assert torch.equal(run(step, query[2:], last, own), outputs[0][2:])


def test_a_request_without_keys_gets_zeros() -> None:
    step = Step((5, 7))
    query, pages, stages, _ = random_step(step, torch.float32)
    pages.key_counts[1] = 0
    output = run(step, query, pages, stages)
    assert output[1].abs().max() == 0 and output[0].abs().min() > 0


@pytest.mark.parametrize("change", ["float64", "gradients", "other groups"])
def test_what_c_code_cannot_do_is_left_to_others(change: str) -> None:
    step = Step((5, 7))
    query, pages, stages, _ = random_step(step, torch.float32)
    post = without_keys(stages["post"])
    if change == "float64":
        query = query.double()
    if change == "gradients":
        query.requires_grad_()
    if change == "other groups":
        post = replace(post, groups=2)
    assert attend_to_pages(query, pages, without_keys(stages["pre"]), post, 1.0, step.key_terms) is None
