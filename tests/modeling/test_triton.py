"""The Triton kernels against the reference op: in Triton's interpreter on a CPU and, where there is one, on a GPU."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from dynattn import Composition
from dynattn.modeling.ops import dcmha_triton_workspace
from dynattn.modeling.ops.dcmha_chunked import dcmha_chunked
from dynattn.modeling.ops.dcmha_eager import dcmha_eager
from dynattn.modeling.ops.dcmha_triton import _forward_op, dcmha_triton
from dynattn.modeling.ops.dcmha_triton_workspace import MapInputs, Workspace

pytest.importorskip("triton")
# The log-sum-exp of a patch without a visible key.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 before Triton is imported"
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ALL = frozenset({"query_low_rank", "key_low_rank", "query_gate", "key_gate"})
BOTH = ("pre", "post")
MASKS: dict[str, Callable[[int, int, int], Tensor]] = {
    "padding": lambda b, t, s: torch.rand(b, 1, 1, s) > 0.3,
    "pairs": lambda b, t, s: torch.rand(b, 1, t, s) > 0.3,
    "unbatched": lambda b, t, s: torch.rand(t, s) > 0.3,
}


@dataclass(frozen=True)
class Case:
    queries: int
    keys: int
    heads: tuple[int, int] = (2, 2)
    terms: frozenset[str] = ALL
    stages: tuple[str, ...] = BOTH
    rank: int = 2
    is_causal: bool = True
    window: int | None = None
    mask: str | None = None
    batch: int = 1
    width: int = 8


CASES = [
    Case(12, 12, heads=(4, 2), batch=2),
    Case(9, 37, heads=(3, 1), window=5),
    Case(35, 35, terms=frozenset({"key_low_rank"}), window=3),
    Case(12, 12, terms=frozenset({"query_low_rank", "query_gate"}), is_causal=False, mask="unbatched"),
    Case(12, 19, terms=frozenset({"query_low_rank", "key_gate"}), is_causal=False, window=4),
    Case(17, 17, terms=frozenset({"query_gate", "key_gate"}), mask="pairs", batch=2),
    Case(12, 12, stages=("pre",), rank=4, mask="padding", batch=2),
    Case(12, 12, stages=("post",), rank=1),
    Case(19, 11),  # queries before the first key see nothing
    Case(17, 17, stages=()),
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several chunks and patches in a few tokens; buffers start as NaN."""
    tiles = dict.fromkeys(dcmha_triton_workspace.TILES, (8, 16, 4))
    monkeypatch.setattr(dcmha_triton_workspace, "ROWS", 8)
    monkeypatch.setattr(dcmha_triton_workspace, "LARGEST_MAP", 1)
    monkeypatch.setattr(dcmha_triton_workspace, "TILES", tiles)
    monkeypatch.setattr(dcmha_triton_workspace, "TILES_OF_MANY_ROWS", tiles)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random_composition(case: Case, device: str) -> Composition:
    def factor(*shape: int) -> Tensor:
        return (torch.randn(*shape, dtype=torch.float64, device=device) * 0.4).requires_grad_()

    given: dict[str, Tensor] = {}
    for side, length in (("query", case.queries), ("key", case.keys)):
        if f"{side}_low_rank" in case.terms:
            for kind in ("down", "up"):
                given[f"{side}_{kind}"] = factor(case.batch, length, case.rank, case.heads[0])
        if f"{side}_gate" in case.terms:
            given[f"{side}_gate"] = factor(case.batch, length, case.heads[0])
    return Composition(**given)


def factors_of(composition: Composition) -> dict[str, Tensor]:
    values = {field.name: getattr(composition, field.name) for field in fields(Composition)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def random_inputs(case: Case, device: str = "cpu") -> tuple[list[Tensor], dict[str, Any]]:
    """All tensors to differentiate, the first three of which are query, key and value, and the op's keywords."""
    heads, kv_heads = case.heads
    shapes = ((heads, case.queries), (kv_heads, case.keys), (kv_heads, case.keys))
    tensors = [
        torch.randn(case.batch, h, length, case.width, dtype=torch.float64, device=device).requires_grad_()
        for h, length in shapes
    ]
    keywords: dict[str, Any] = {"pre": None, "post": None, "scaling": case.width**-0.5, "attention_mask": None}
    keywords |= {"is_causal": case.is_causal, "sliding_window": case.window}
    for stage in case.stages:
        keywords[stage] = random_composition(case, device)
        tensors += factors_of(keywords[stage]).values()
    if case.mask is not None:
        keywords["attention_mask"] = MASKS[case.mask](case.batch, case.queries, case.keys).to(device)
    return tensors, keywords


def cast(tensors: list[Tensor], keywords: dict[str, Any], dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """Fresh leaves of another dtype."""
    low = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    factors, keywords = iter(low[3:]), dict(keywords)
    for stage in BOTH:
        if keywords[stage] is not None:
            keywords[stage] = Composition(**{name: next(factors) for name in factors_of(keywords[stage])})
    return low, keywords


def run(attend: Callable[..., Any], tensors: list[Tensor], keywords: dict[str, Any]) -> tuple[Tensor, ...]:
    """The output, then the gradients of all tensors."""
    output, _ = attend(*tensors[:3], **keywords)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return output, *torch.autograd.grad(output, tensors, upstream.to(output))


def assert_no_noisier_than_the_reference(case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    tensors, keywords = cast(*random_inputs(case, device), dtype)
    truth = run(dcmha_eager, *cast(tensors, keywords, torch.float64))
    noise = run(dcmha_eager, tensors, keywords)
    for ours, theirs, true in zip(run(dcmha_triton, tensors, keywords), noise, truth, strict=True):
        assert ours.dtype == dtype
        assert (ours - true).norm() <= 1.5 * (theirs - true).norm()


def assert_equal_to_the_reference(case: Case) -> None:
    tensors, keywords = random_inputs(case)
    truth = run(dcmha_eager, tensors, keywords)
    for ours, true in zip(run(dcmha_triton, *cast(tensors, keywords, torch.float32)), truth, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), true, atol=2e-5, rtol=1e-5)


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_all_gradients_equal_the_reference(case: Case) -> None:
    assert_equal_to_the_reference(case)


@interpreted
@pytest.mark.parametrize("rank", [2, 4])
def test_the_shipped_patches_equal_the_reference(rank: int) -> None:
    assert_equal_to_the_reference(Case(33, 66, heads=(3, 1), rank=rank, window=40))


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_reference_is(dtype: torch.dtype) -> None:
    assert_no_noisier_than_the_reference(Case(17, 17), dtype)


@interpreted
@pytest.mark.usefixtures("small")
def test_rows_without_a_visible_key_give_zeros_and_finite_gradients() -> None:
    tensors, keywords = cast(*random_inputs(Case(12, 12, batch=2)), torch.float32)
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    mask[0, :, 0] = False
    output, *gradients = run(dcmha_triton, tensors, {**keywords, "attention_mask": mask})
    assert output[0, 0].abs().max() == 0 and output[1, 0].abs().min() > 0
    assert all(gradient.isfinite().all() for gradient in gradients)


@interpreted
@pytest.mark.usefixtures("small")
def test_autocast_gives_its_dtype_and_factors_keep_theirs() -> None:
    tensors, keywords = cast(*random_inputs(Case(12, 12)), torch.float32)
    truth = run(dcmha_eager, tensors, keywords)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, *gradients = run(dcmha_triton, tensors, keywords)
    assert output.dtype == torch.bfloat16
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert (output - truth).abs().max() < 0.03 * truth.abs().max()


@interpreted
@pytest.mark.usefixtures("small")
def test_a_compiler_sees_one_node_without_graph_breaks() -> None:
    tensors, keywords = cast(*random_inputs(Case(9, 9)), torch.float32)
    compiled = torch.compile(dcmha_triton, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(run(compiled, tensors, keywords), run(dcmha_triton, tensors, keywords), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@interpreted
@pytest.mark.usefixtures("small")
def test_the_operator_says_what_it_returns() -> None:
    query, key, value = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    rows = torch.randn(1, 9, 3, 2, requires_grad=True)
    arguments = (query, key, value, rows, None, None, rows, None, 1.0, True, 4)
    torch.library.opcheck(_forward_op, arguments, test_utils=("test_schema", "test_faketensor"))


@interpreted
@pytest.mark.parametrize("window", [None, 256])
def test_memory_and_work_grow_with_the_reach_of_queries(window: int | None) -> None:
    heads, length = 4, 2048
    query, key, value = (torch.empty(3, heads, length, 2) for _ in range(3))
    inputs = MapInputs(query, key, value, None, None, None, None, None)
    work = Workspace(inputs, 1.0, is_causal=True, sliding_window=window, maps=3)
    reach = length if window is None else window + 128 + 16
    assert work.memory.numel() <= 3 * 3 * heads * 128 * reach
    pairs = sum(items * queries * keys for items, queries, keys in (chunk.counts for chunk in work.chunks()))
    assert pairs <= 3 * length * (length / 2 + 64 if window is None else reach)


def test_a_single_query_goes_the_way_of_chunked() -> None:
    tensors, keywords = cast(*random_inputs(Case(1, 12)), torch.float32)
    for ours, theirs in zip(run(dcmha_triton, tensors, keywords), run(dcmha_chunked, tensors, keywords), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": Composition(groups=2)}, "mixes all heads, not pre.groups=2; use 'chunked'"),
        ({"post": Composition(static=torch.eye(2))}, "knows no static matrix, but post.static is one; use 'chunked'"),
        ({"attention_mask": torch.zeros(1, 1, 9, 9)}, "boolean masks, not torch.float32; use 'chunked'"),
        (
            {"attention_mask": torch.ones(1, 2, 9, 9).bool()},
            r"masks that all heads share.*\(1, 2, 9, 9\); use 'chunked'",
        ),
    ],
)
def test_what_the_kernels_do_not_know_is_an_error(change: dict[str, Any], message: str) -> None:
    tensors, keywords = cast(*random_inputs(Case(9, 9)), torch.float32)
    with pytest.raises(ValueError, match=message):
        dcmha_triton(*tensors[:3], **{**keywords, **change})


def test_an_unknown_dtype_is_an_error() -> None:
    tensors, keywords = random_inputs(Case(9, 9))
    with pytest.raises(ValueError, match=r"not torch.float64; use 'chunked'"):
        dcmha_triton(*tensors[:3], **keywords)


def test_a_cpu_without_the_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors, keywords = cast(*random_inputs(Case(9, 9)), torch.float32)
    with pytest.raises(ValueError, match="runs on CUDA devices"):
        dcmha_triton(*tensors[:3], **keywords)


def test_without_triton_the_package_works_and_the_op_says_what_to_install() -> None:
    program = (
        "import os, sys\n"
        "sys.modules['triton'] = None\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "import dynattn, torch\n"
        "from dynattn.modeling.ops.dcmha_triton import dcmha_triton\n"
        "query = torch.zeros(1, 2, 3, 4)\n"
        "others = dict(pre=None, post=None, scaling=1.0, attention_mask=None, is_causal=True, sliding_window=None)\n"
        "try:\n"
        "    dcmha_triton(query, query, query, **others)\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "implementation='triton' needs Triton: pip install triton, or use 'chunked'\n"


LARGE = [
    Case(1000, 1000, heads=(16, 16), batch=2, width=64),
    Case(517, 1030, heads=(32, 8), window=200, width=80),
    Case(300, 300, heads=(12, 12), rank=4, mask="padding", batch=2, width=32),
    Case(512, 512, heads=(8, 2), is_causal=False, mask="pairs", width=128),
    Case(256, 256, heads=(64, 64), stages=("pre",), rank=1, width=16),
]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_on_a_gpu_nothing_is_noisier_than_the_reference(case: Case, dtype: torch.dtype) -> None:
    assert_no_noisier_than_the_reference(case, dtype, "cuda")


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_two_runs_are_the_same_to_the_bit() -> None:
    tensors, keywords = cast(*random_inputs(LARGE[0], "cuda"), torch.bfloat16)
    for first, second in zip(run(dcmha_triton, tensors, keywords), run(dcmha_triton, tensors, keywords), strict=True):
        assert torch.equal(first, second)


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_the_backward_pass_needs_no_map_of_all_pairs() -> None:
    case = Case(8192, 8192, heads=(16, 16), width=64)
    tensors, keywords = cast(*random_inputs(case, "cuda"), torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(dcmha_triton, tensors, keywords)
    pairs = case.heads[0] * case.queries * case.keys * 2
    assert torch.cuda.max_memory_allocated() - before < pairs / 2
