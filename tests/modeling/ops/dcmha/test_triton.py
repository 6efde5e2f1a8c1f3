"""The Triton kernels against the reference op: in Triton's interpreter on a CPU and, where there is one, on a GPU."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import composed_op
from cases.composed_op import ALL, DYNAMIC, in_dtype
from cases.triton_marks import interpreted
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dynattn import Composition, dcmha_attention
from dynattn.modeling.ops.dcmha.chunked.attention import dcmha_chunked
from dynattn.modeling.ops.dcmha.composition import list_tensors
from dynattn.modeling.ops.dcmha.eager import dcmha_eager
from dynattn.modeling.ops.dcmha.triton import decode, kernels, passes, tuning, workspace
from dynattn.modeling.ops.dcmha.triton.arguments import MapInputs, MapSettings
from dynattn.modeling.ops.dcmha.triton.attention import _forward_op, dcmha_triton
from dynattn.modeling.ops.dcmha.triton.composers import choice as composer_choice
from dynattn.modeling.ops.dcmha.triton.composers.choice import composer_class_for
from dynattn.modeling.ops.dcmha.triton.composers.head_by_head import HeadByHeadComposer
from dynattn.modeling.ops.dcmha.triton.composers.tensor_cores import TensorCoreComposer
from dynattn.modeling.ops.dcmha.triton.decode import _decode_op, _side
from dynattn.modeling.ops.dcmha.triton.devices import shared_memory_of
from dynattn.modeling.ops.dcmha.triton.kernels import registry
from dynattn.modeling.ops.dcmha.triton.matmuls import contiguous
from dynattn.modeling.ops.dcmha.triton.matrices import make_mixing, padded_terms
from dynattn.modeling.ops.dcmha.triton.workspace import Workspace
from dynattn.modeling.ops.distance_tables import NO_TABLES

pytest.importorskip("triton")
# The log-sum-exp of a patch without a visible key.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")

BOTH = ("pre", "post")


@dataclass(frozen=True)
class Case(composed_op.Case):
    heads: tuple[int, int] = (2, 2)
    terms: frozenset[str] = DYNAMIC
    batch: int = 1
    post_groups: int | None = None  # where the second stage has others


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
    Case(9, 9, heads=(4, 2), terms=ALL),
    Case(9, 12, terms=frozenset({"static"}), stages=("pre",)),
    Case(9, 12, terms=frozenset({"static", "key_gate"}), stages=("post",), window=5),
    Case(9, 9, heads=(4, 2), groups=2, batch=2, rank=1, mask="pairs"),
    Case(9, 9, heads=(6, 2), groups=3, rank=1),  # groups that share a key head
    Case(9, 9, heads=(4, 4), groups=4, post_groups=2, terms=ALL, rank=1),
    Case(9, 9, mask="additive"),
    Case(19, 5, is_causal=False),
    Case(19, 5, is_causal=False, mask="pairs", window=9),
]
# The first cases have what kernels that compose head by head have to tell apart; the others take long.
COMPOSED_CASES = [
    pytest.param(family, case, marks=marks, id=f"{family}-{case}")
    for family, others in (("head by head", [pytest.mark.slow]), ("tensor cores", []))
    for case, marks in zip(CASES, [[]] * 4 + [others] * (len(CASES) - 4), strict=True)
]
DECODING = [
    Case(1, 37, heads=(4, 2), batch=2),
    Case(1, 50, heads=(6, 3), window=20, mask="padding", width=80),
    Case(1, 17, heads=(4, 1), terms=ALL, groups=2, post_groups=1, rank=1),
    Case(1, 40, heads=(3, 3), terms=frozenset({"key_low_rank"}), stages=("pre",), rank=4, mask="additive", batch=2),
    Case(1, 40, terms=frozenset({"query_low_rank", "key_gate"}), stages=("post",), is_causal=False),
    Case(1, 16, terms=frozenset({"query_gate", "static"}), mask="unbatched"),
    Case(1, 1, stages=()),
]
# For GPUs.
LARGE = [
    Case(1000, 1000, heads=(16, 16), batch=2, width=64),
    Case(517, 1030, heads=(32, 8), window=200, width=80),
    Case(300, 300, heads=(12, 12), rank=4, mask="padding", batch=2, width=32),
    Case(512, 512, heads=(8, 2), is_causal=False, mask="pairs", width=128),
    Case(256, 256, heads=(64, 64), stages=("pre",), rank=1, width=16),
    Case(700, 700, heads=(16, 16), terms=ALL, width=64),
    Case(300, 300, heads=(16, 8), groups=4, mask="additive", batch=2, width=64),
    Case(200, 300, heads=(8, 8), groups=2, post_groups=1, terms=ALL, width=64),
    Case(200, 300, heads=(12, 12), window=64, width=8),
]
LARGE_DECODING = [
    Case(1, 2048, heads=(32, 32), width=128),
    Case(1, 777, heads=(32, 32), batch=3, width=80, mask="padding"),
    Case(1, 4096, heads=(64, 8), batch=2, width=128, window=1024),
    Case(1, 300, heads=(16, 16), batch=64, width=64, rank=4),
    Case(1, 20000, heads=(8, 2), width=64, mask="additive"),
    Case(1, 500, heads=(12, 12), terms=ALL, groups=3, width=64),
    Case(1, 500, heads=(128, 8), terms=ALL, width=128, rank=1),
]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What is not deterministic is an error; buffers start as NaN here as in all tests."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture
def small(poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks and patches, so that a few tokens have several."""
    tiles = dict.fromkeys(tuning.TILES, (8, 16, 4))
    monkeypatch.setattr(tuning, "ROWS", 8)
    monkeypatch.setattr(tuning, "LARGEST_MAP", 1)
    monkeypatch.setattr(tuning, "TILES", tiles)
    monkeypatch.setattr(tuning, "TILES_OF_MANY_TERMS", tiles)
    monkeypatch.setattr(tuning, "TILE_OF_GAINS", (8, 16, 4))
    matrix_tiles = dict.fromkeys(tuning.MATRIX_TILES_16, (16, 16, 4, 1))
    monkeypatch.setattr(tuning, "MATRIX_TILES_16", matrix_tiles)
    monkeypatch.setattr(tuning, "TURNS", 2)


def random_inputs(case: Case, device: str = "cpu") -> tuple[list[Tensor], dict[str, Any]]:
    """All tensors to differentiate, the first three of which are query, key and value, and the keywords of kernels."""
    with torch.device(device):
        tensors, given = composed_op.random_inputs(case)
    keywords = {"pre": None, "post": None, "scaling": case.width**-0.5, "attention_mask": None, **given}
    if case.post_groups is not None:
        keywords["post"] = replace(keywords["post"], groups=case.post_groups)
    return tensors, keywords


def run(attend: Callable[..., Any], tensors: list[Tensor], keywords: dict[str, Any]) -> tuple[Tensor, ...]:
    """Returns the output `[B, T, H, D]`, then the gradients of all tensors."""
    output, _ = attend(*tensors[:3], **keywords)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return output, *torch.autograd.grad(output, tensors, upstream.to(output))


def multiple_of_noise(dtype: torch.dtype, device: str) -> float:
    """How much larger than the reference's an error may be.

    In float32 a GPU's exponential adds to it: the instruction may be wrong by 2^-22, four roundings, where the
    interpreter rounds once.
    """
    return 3.0 if dtype == torch.float32 and device == "cuda" else 1.5


def assert_no_noisier_than_the_reference(case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    tensors, keywords = in_dtype(dtype, *random_inputs(case, device))
    reference = run(dcmha_eager, *in_dtype(torch.float64, tensors, keywords))
    noise = run(dcmha_eager, tensors, keywords)
    for ours, theirs, expected in zip(run(dcmha_triton, tensors, keywords), noise, reference, strict=True):
        assert ours.dtype == dtype
        assert (ours - expected).norm() <= multiple_of_noise(dtype, device) * (theirs - expected).norm()


@torch.no_grad()
def assert_decoding_is_no_noisier_than_the_reference(case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    tensors, keywords = in_dtype(dtype, *random_inputs(case, device))
    double, double_keywords = in_dtype(torch.float64, tensors, keywords)
    reference, _ = dcmha_eager(*double[:3], **double_keywords)
    theirs, _ = dcmha_eager(*tensors[:3], **keywords)
    ours, _ = dcmha_triton(*tensors[:3], **keywords)
    assert ours.dtype == dtype
    assert (ours - reference).norm() <= multiple_of_noise(dtype, device) * (theirs - reference).norm()


def assert_equal_to_the_reference(case: Case) -> None:
    """Compares in norm: matrices over many heads round a few elements ten times as much as they do most."""
    tensors, keywords = random_inputs(case)
    reference = run(dcmha_eager, tensors, keywords)
    for ours, expected in zip(run(dcmha_triton, *in_dtype(torch.float32, tensors, keywords)), reference, strict=True):
        assert (ours.dtype, ours.shape) == (torch.float32, expected.shape)
        assert (ours - expected).norm() <= 3e-6 * expected.norm() + 2e-5


@pytest.fixture(params=[pytest.param("head by head", marks=pytest.mark.slow), "tensor cores"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels that compose, whatever the dtype and the number of heads."""
    monkeypatch.setattr(composer_choice, "composes_on_tensor_cores", lambda *_, **__: request.param == "tensor cores")
    return str(request.param)


@pytest.mark.parametrize(
    "case", [Case(1, 37, groups=2), Case(9, 37), Case(9, 9, heads=(4, 2), groups=2, terms=DYNAMIC, batch=2)], ids=str
)
def test_operations_are_those_of_the_reference(case: Case) -> None:
    """No kernel is needed to count them: the operator has an implementation for tensors without content."""
    learns = case.queries > 1  # decoding steps with gradients have no operator of their own
    tensors, keywords = in_dtype(torch.float32, *random_inputs(case))
    counts = []
    for attend, device in ((dcmha_eager, "cpu"), (dcmha_triton, "meta")):
        moved = {name: to_device(value, device) for name, value in keywords.items()}
        leaves = [tensor.detach().to(device).requires_grad_() for tensor in tensors[:3]]
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(learns):
            output, _ = attend(*leaves, **moved)
            if learns:
                output.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("queries", [1, 9])
@torch.no_grad()
def test_no_kernel_is_needed_for_tensors_without_content(queries: int) -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(queries, 37)))
    moved = {name: to_device(value, "meta") for name, value in keywords.items()}
    output, _ = dcmha_triton(*(tensor.to("meta") for tensor in tensors[:3]), **moved)
    assert (output.device.type, output.shape) == ("meta", (1, queries, 2, 8))


def to_device(value: Any, device: str) -> Any:
    """A keyword of kernels on a device, with factors that need gradients."""
    if isinstance(value, Composition):
        return value.map(lambda factor: factor.detach().to(device).requires_grad_())
    return value.to(device) if isinstance(value, Tensor) else value


@interpreted
@pytest.mark.usefixtures("small", "family")
@pytest.mark.parametrize(("family", "case"), COMPOSED_CASES, indirect=["family"])
def test_output_and_all_gradients_equal_the_reference(case: Case) -> None:
    assert_equal_to_the_reference(case)


@interpreted
@pytest.mark.usefixtures("small", "family")
def test_gradients_do_not_depend_on_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert_equal_to_the_reference(CASES[0])
    finally:
        torch.set_default_dtype(torch.float32)


@interpreted
@pytest.mark.parametrize("rank", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_shipped_patches_equal_the_reference(rank: int) -> None:
    assert_equal_to_the_reference(Case(33, 66, heads=(3, 1), rank=rank, window=40))


@interpreted
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("heads", [12, pytest.param(18, marks=pytest.mark.slow)])
def test_the_shipped_tensor_core_patches_equal_the_reference(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composer_choice, "composes_on_tensor_cores", lambda *_, **__: True)
    assert_equal_to_the_reference(Case(40, 50, heads=(heads, 6), window=20, rank=3))


@interpreted
@pytest.mark.usefixtures("small", "family")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_reference_is(dtype: torch.dtype) -> None:
    assert_no_noisier_than_the_reference(Case(17, 17), dtype)


@interpreted
@pytest.mark.usefixtures("small", "family")
def test_second_derivatives_are_refused() -> None:
    query, key, value = torch.randn(3, 1, 2, 9, 16, requires_grad=True)
    options = {"pre": None, "post": None, "scaling": 0.25, "attention_mask": None, "is_causal": True}
    output, _ = dcmha_triton(query, key, value, **options, sliding_window=None)
    (gradient,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no second derivatives; use implementation='eager'"):
        torch.autograd.grad(gradient.sum(), query)


@interpreted
@pytest.mark.usefixtures("small", "family")
def test_float32_factors_serve_heads_in_half_precision() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(9, 12)))
    heads = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors[:3]]
    ours, theirs = (run(attend, [*heads, *tensors[3:]], keywords) for attend in (dcmha_triton, dcmha_eager))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= 0.05 * other.norm()


@interpreted
@pytest.mark.usefixtures("small", "family")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_with_one_key_give_no_gradient_to_scores(dtype: torch.dtype) -> None:
    tensors, keywords = in_dtype(dtype, *random_inputs(Case(17, 17, window=1)))
    _, query, key, value, *_ = run(dcmha_triton, tensors, keywords)
    assert max(query.abs().max(), key.abs().max()) < 1e-5 < value.abs().max()


@interpreted
@pytest.mark.usefixtures("poisoned")
def test_scores_scaled_by_zero_have_no_gradient() -> None:
    tensors, keywords = in_dtype(torch.bfloat16, *random_inputs(Case(33, 33, width=16, rank=1)))
    _, query, key, *_ = run(dcmha_triton, tensors, {**keywords, "scaling": 0.0})
    assert not query.any() and not key.any()


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stages", [(), ("pre",)])
def test_gradients_that_cancel_vanish(stages: tuple[str, ...], family: str, dtype: torch.dtype) -> None:
    """Equal values have equal gradients of all probabilities of a row, so that scores have none, however large.

    On the tensor cores the rounding of the log-sum-exp is left, as DESIGN.md says. Without stages heads are composed
    one by one in any case.
    """
    tensors, keywords = in_dtype(dtype, *random_inputs(Case(17, 17, stages=stages)))
    with torch.no_grad():
        tensors[0].mul_(10.0)
        tensors[2].fill_(1.0)
    output, _ = dcmha_triton(*tensors[:3], **keywords)
    (query,) = torch.autograd.grad(output, tensors[:1], torch.ones_like(output))
    assert float(query.abs().max()) < (1e-4 if stages and family == "tensor cores" else 1e-30)


@interpreted
@pytest.mark.parametrize(
    "case", [Case(5, 5, batch=0), Case(1, 5, batch=0), Case(5, 0), Case(1, 0), Case(0, 5), Case(0, 0)], ids=str
)
@pytest.mark.parametrize("documents", [False, True])
def test_nothing_to_attend_with_gives_what_the_reference_gives(case: Case, documents: bool) -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(case))
    keywords["first_keys"] = torch.zeros(case.batch, case.queries, dtype=torch.long) if documents else None
    for needs_grad in (False, True):
        with torch.set_grad_enabled(needs_grad):
            output, _ = dcmha_triton(*tensors[:3], **keywords)
        assert torch.equal(output, dcmha_eager(*tensors[:3], **keywords)[0])


@interpreted
def test_a_chunk_has_at_most_the_items_that_a_grid_takes() -> None:
    rows = torch.empty(70_000, 1, 2, 4, device="meta")
    inputs = MapInputs(*(rows,) * 3, *(None for _ in MapInputs._fields[3:]))
    work = Workspace(inputs, MapSettings(1.0, True, None, groups=1), ("scores",), (8, 16))
    assert [chunk.counts[0] for chunk in work.chunks()] == [65_535, 70_000 - 65_535]


class Noting:
    """Stands for all kernels: notes the grids of launches, which CUDA has to take, and computes nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, key: str | tuple[int, ...]) -> Any:
        if isinstance(key, str):
            return self
        assert max(key[1:], default=1) <= 65_535
        self.grids.append(key)
        return lambda *_, **__: None


@pytest.mark.parametrize(
    ("shape", "keys", "terms", "dtype", "window", "table"),
    [
        ((1, 16, 600_000), 600_000, 5, torch.bfloat16, 512, None),  # matrices of many positions
        ((1, 16, 128), 600_000, 5, torch.bfloat16, None, None),
        ((4096, 16, 16), 16, 5, torch.bfloat16, None, "position_bias"),  # sums of the maps of many heads
        ((1, 1, 2_200_000), 16, 5, torch.float32, None, None),  # chunks of many queries
        ((1, 1, 2_200_000), 64, 5, torch.float32, None, "position_gain"),
        ((1, 1, 2_200_000), 2_200_000, 9, torch.float32, 1, None),
    ],
)
def test_grids_are_no_larger_than_cuda_takes(
    shape: tuple[int, int, int],
    keys: int,
    terms: int,
    dtype: torch.dtype,
    window: int | None,
    table: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (batch, heads, queries), empty = shape, partial(torch.empty, device="meta", dtype=dtype)
    query, key = (empty(batch, heads, length, 16) for length in (queries, keys))
    inputs = MapInputs(query, key, key, *(None for _ in MapInputs._fields[3:]))
    inputs = inputs._replace(pre_query=empty(batch, queries, terms, heads), pre_key=empty(batch, keys, terms, heads))
    if table is not None:
        inputs = inputs._replace(**{table: empty(keys, heads)})
    settings, noting = MapSettings(1.0, window is not None, window, groups=1), Noting()
    monkeypatch.setattr(workspace, "load_kernels", lambda _: noting)
    output, lse = passes.attend(inputs, settings)
    passes.attend_backward(output, lse, inputs, settings, [] if table is None else [table])
    assert len(noting.grids) >= 4


@interpreted
def test_kernels_of_all_items_take_any_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.empty(70_000, 16, 2, 16, device="meta", dtype=torch.bfloat16)
    terms = torch.empty(70_000, 2, 5, 16, device="meta", dtype=torch.bfloat16)
    inputs = MapInputs(*(rows,) * 3, pre_query=terms, pre_key=terms, **dict.fromkeys(MapInputs._fields[5:]))
    work = Workspace(inputs, MapSettings(1.0, True, None, groups=1), (), (16, 16))
    work.kernels = matrices = Noting()  # type: ignore[assignment]
    make_mixing(work, inputs, padded_terms(work, inputs))
    assert matrices.grids == [(4, 65_535), (4, 70_000 - 65_535)]
    decoding = Noting()
    monkeypatch.setattr(decode, "load_kernels", lambda _: decoding)
    stages = (decode.decode_stage([None] * 7),) * 2
    where, tables = decode._mask(None, None, 70_000, 2), decode.decode_tables(NO_TABLES)
    decode.launch(rows[:, :, :1], rows, rows, stages, (1, 1), where, None, tables, (0, 2), 1.0)
    assert [grid[0] for grid in decoding.grids] == [70_000] * len(decoding.grids) and len(decoding.grids) >= 2


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_many_heads_in_half_precision_are_as_exact_as_the_reference_is(dtype: torch.dtype) -> None:
    assert_no_noisier_than_the_reference(Case(24, 24, heads=(16, 4), terms=ALL, batch=2, mask="padding"), dtype)


@pytest.mark.parametrize(
    ("expected", "dtype", "heads", "groups", "parts"),
    [
        (TensorCoreComposer, torch.bfloat16, 16, 1, {"pre_key", "post_query"}),
        (TensorCoreComposer, torch.float16, 32, 2, {"pre_key"}),
        (TensorCoreComposer, torch.bfloat16, 12, 1, {"post_static"}),
        (HeadByHeadComposer, torch.float32, 16, 1, {"pre_key"}),
        (HeadByHeadComposer, torch.bfloat16, 8, 1, {"pre_key"}),
        (HeadByHeadComposer, torch.bfloat16, 64, 1, {"pre_key"}),
        (HeadByHeadComposer, torch.bfloat16, 16, 2, {"pre_key", "pre_static"}),
        (HeadByHeadComposer, torch.bfloat16, 16, 1, set()),
        (HeadByHeadComposer, torch.bfloat16, 16, 1, {"pre_query gate", "post_key gate"}),
    ],
)
def test_tensor_cores_compose_what_they_can(
    expected: type, dtype: torch.dtype, heads: int, groups: int, parts: set[str]
) -> None:
    rows = torch.empty(2, heads, 9, 4, dtype=dtype)
    inputs = MapInputs(*(rows,) * 3, *(None for _ in MapInputs._fields[3:]))
    given = {part.split()[0]: torch.empty(2, 9, 1 if "gate" in part else 3, heads) for part in parts}
    inputs = inputs._replace(**given)
    assert composer_class_for(inputs, MapSettings(1.0, True, None, groups)) is expected


@pytest.mark.parametrize(
    ("heads", "shared_memory", "expected"),
    [
        (16, 232_448, TensorCoreComposer),
        (16, 101_376, TensorCoreComposer),  # compute capability 8.6, 8.9 and 12.0
        (16, 49_152, HeadByHeadComposer),
        (32, 166_912, TensorCoreComposer),  # 8.0
        (32, 101_376, HeadByHeadComposer),
    ],
)
def test_no_kernel_takes_more_shared_memory_than_there_is(
    heads: int, shared_memory: int, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composer_choice, "shared_memory_of", lambda _: shared_memory)
    rows = torch.empty(2, heads, 9, 4, dtype=torch.bfloat16)
    inputs = MapInputs(*(rows,) * 3, *(None for _ in MapInputs._fields[3:]))
    inputs = inputs._replace(pre_key=torch.empty(2, 9, 5, heads))
    assert composer_class_for(inputs, MapSettings(1.0, True, None, 1)) is expected


def rows_in_memory(dtype: torch.dtype, width: int, start: int, between: int) -> Tensor:
    """Rows `[2, 3, 5, width]`, contiguous by token, with a number of elements before the first and between tokens."""
    tokens = torch.randn(start + 2 * 5 * (3 * width + between)).to(dtype)[start:].view(2, 5, -1)
    return tokens[..., : 3 * width].unflatten(-1, (3, width)).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("width", "start", "between"), [(8, 0, 0), (8, 4, 8), (8, 3, 0), (8, 0, 1), (5, 0, 0), (0, 0, 4)]
)
def test_contiguous_rows_have_the_same_elements(dtype: torch.dtype, width: int, start: int, between: int) -> None:
    rows = rows_in_memory(dtype, width, start, between)
    copied = contiguous(rows)
    assert copied.is_contiguous() and copied.dtype == dtype and torch.equal(copied, rows)
    assert torch.equal(contiguous(rows.transpose(2, 3)), rows.transpose(2, 3))
    assert contiguous(copied) is copied


def test_tiles_have_an_element_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that write in place count on it."""
    monkeypatch.setattr(tuning, "MATRIX_TILES_16", dict.fromkeys(tuning.MATRIX_TILES_16, (1, 8, 8, 1)))
    with pytest.raises(AssertionError):
        tuning.matrix_tiles_for(16)
    monkeypatch.setattr(tuning, "DECODE_WARPS", 16)
    with pytest.raises(AssertionError):
        tuning.blocks_of_decoding(16, 128, paged=False)


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"shared_memory_per_block": 49_152, "shared_memory_per_block_optin": 101_376}, 101_376),
        ({"shared_memory_per_block": 65_536}, 65_536),  # AMD
    ],
)
def test_devices_tell_their_shared_memory(
    properties: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
    assert shared_memory_of(torch.device("cuda")) == expected
    assert shared_memory_of(torch.device("cpu")) >= 1 << 30


@pytest.mark.parametrize(("keys", "expected"), [(1 << 20, TensorCoreComposer), (1 << 21, HeadByHeadComposer)])
def test_sequences_beyond_32_bits_compose_head_by_head(keys: int, expected: type) -> None:
    query, key = (torch.empty(1, 32, length, 4, dtype=torch.bfloat16, device="meta") for length in (9, keys))
    inputs = MapInputs(query, key, key, *(None for _ in MapInputs._fields[3:]))
    inputs = inputs._replace(pre_key=torch.empty(1, keys, 3, 32, device="meta"))
    assert composer_class_for(inputs, MapSettings(1.0, True, None, 1)) is expected


@interpreted
@pytest.mark.usefixtures("small", "family")
def test_rows_without_a_visible_key_give_zeros_and_finite_gradients() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(12, 12, batch=2)))
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    mask[0, :, 0] = False
    output, *gradients = run(dcmha_triton, tensors, {**keywords, "attention_mask": mask})
    assert output[0, 0].abs().max() == 0 and output[1, 0].abs().min() > 0
    assert all(gradient.isfinite().all() for gradient in gradients)


@interpreted
@pytest.mark.usefixtures("small", "family")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_a_row_that_is_not_a_number_stays_alone() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(20, 20, heads=(4, 2), batch=2)))
    expected, _ = dcmha_triton(*tensors[:3], **keywords)
    with torch.no_grad():
        tensors[0][1, 2, 7] = torch.nan
    output, _ = dcmha_triton(*tensors[:3], **keywords)
    assert output[1, 7].isnan().all()
    output[1, 7] = expected[1, 7]
    torch.testing.assert_close(output, expected)


@interpreted
@pytest.mark.parametrize("case", [Case(1, 17, heads=(3, 3), rank=1), Case(33, 33, heads=(3, 3), window=4, rank=1)])
@torch.no_grad()
def test_heads_may_lie_farther_apart_than_32_bits_count(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BLOCK", 16)
    monkeypatch.setattr(tuning, "TILES", dict.fromkeys(tuning.TILES, (16, 16, 4)))
    tensors, keywords = in_dtype(torch.bfloat16, *random_inputs(case))
    apart = [far_apart(tensor, 1 << 30) for tensor in tensors[:3]]
    assert all(tensor.stride(1) * 2 >= 1 << 31 for tensor in apart)
    assert torch.equal(dcmha_triton(*apart, **keywords)[0], dcmha_triton(*tensors[:3], **keywords)[0])


def far_apart(rows: Tensor, distance: int) -> Tensor:
    """Returns the same `[1, H, T, D]` with heads `distance` elements apart; memory between them is never touched."""
    _, heads, length, width = rows.shape
    elements = (heads - 1) * distance + length * width
    storage = torch.UntypedStorage(elements * rows.element_size())  # unlike a tensor, it is not filled with NaN
    whole = torch.empty(0, dtype=rows.dtype).set_(storage, 0, (elements,))
    return whole.as_strided(rows.shape, (elements, distance, width, 1)).copy_(rows)


@interpreted
@pytest.mark.usefixtures("small", "family")
def test_autocast_gives_its_dtype_and_factors_keep_theirs() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(12, 12)))
    reference = run(dcmha_eager, tensors, keywords)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, *gradients = run(dcmha_triton, tensors, keywords)
    assert output.dtype == torch.bfloat16
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert (output - reference).abs().max() < 0.03 * reference.abs().max()


@interpreted
@torch.no_grad()
def test_autocast_takes_the_factors_of_a_step_in_the_other_dtype_of_half_precision() -> None:
    (query, key, value, *_), keywords = in_dtype(torch.float16, *random_inputs(Case(1, 12)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = dcmha_triton(query, key, value, **keywords)
        expected, _ = dcmha_eager(query, key, value, **keywords)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected.to(output.dtype), atol=0.03, rtol=0.03)


@interpreted
@pytest.mark.usefixtures("small")
def test_a_compiler_sees_one_node_without_graph_breaks() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(9, 9)))
    compiled = torch.compile(dcmha_triton, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(run(compiled, tensors, keywords), run(dcmha_triton, tensors, keywords), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@interpreted
@pytest.mark.usefixtures("small")
def test_the_operator_says_what_it_returns() -> None:
    query, key, value = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    terms = torch.randn(1, 9, 3, 2, requires_grad=True)
    first_keys = torch.zeros(1, 9, dtype=torch.int64)
    tables = (None, None, None)
    given = (query, key, value, terms, None, None, terms, torch.eye(2), None, *tables, None, first_keys, None)
    arguments = (*given, 1.0, True, 4, 1)
    torch.library.opcheck(_forward_op, arguments, test_utils=("test_schema", "test_faketensor"))


@interpreted
@pytest.mark.parametrize("window", [None, 256])
def test_memory_and_work_grow_with_the_reach_of_queries(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LARGEST_MAP", 1)
    heads, length = 4, 2048
    query, key, value = (torch.empty(3, heads, length, 2) for _ in range(3))
    inputs = MapInputs(query, key, value, *(None for _ in MapInputs._fields[3:]))
    work = Workspace(inputs, MapSettings(1.0, True, window, groups=1), ("a", "b", "c"), (32, 64))
    reach = length if window is None else window + 128 + 16
    assert sum(memory.numel() for memory in work.memory.values()) <= 3 * heads * 128 * reach
    pairs = sum(items * queries * keys for items, queries, keys in (chunk.counts for chunk in work.chunks()))
    assert pairs <= 3 * length * (length / 2 + 64 if window is None else reach)


@interpreted
@pytest.mark.parametrize(("fitting", "expected"), [(2 * 128, (2, 128)), (3 * 128, (3, 128)), (3 * 600, (3, 512))])
def test_chunks_take_more_items_and_then_more_queries(
    fitting: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, length = 4, 2048
    monkeypatch.setattr(tuning, "LARGEST_MAP", fitting * heads * length)
    query, key, value = (torch.empty(3, heads, length, 2) for _ in range(3))
    inputs = MapInputs(query, key, value, *(None for _ in MapInputs._fields[3:]))
    work = Workspace(inputs, MapSettings(1.0, True, None, groups=1), ("a",), (32, 64))
    assert next(work.chunks()).counts[:2] == expected
    assert work.memory["a"].numel() <= fitting * heads * length


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("groups", [1, 2])
def test_first_keys_keep_packed_documents_apart(groups: int) -> None:
    case = Case(10, 10, heads=(2 * groups, 2), batch=2, window=5, rank=1, groups=groups)
    tensors, keywords = random_inputs(case)
    documents = torch.tensor([[0] * 3 + [1] * 7, [0] * 8 + [1] * 2])
    first_keys = (documents[:, :, None] == documents[:, None]).int().argmax(-1)
    same = (documents[:, :, None] == documents[:, None])[:, None]
    reference = run(dcmha_eager, tensors, {**keywords, "attention_mask": same})
    low, low_keywords = in_dtype(torch.float32, tensors, keywords)
    results = run(dcmha_triton, low, {**low_keywords, "first_keys": first_keys})
    for ours, expected in zip(results, reference, strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=1e-5)


@interpreted
@pytest.mark.usefixtures("small")
def test_first_keys_beyond_32_bits_hide_all_keys() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(5, 5)))
    first_keys = torch.tensor([[0, -(2**40), 2**32, 2**32 + 1, torch.iinfo(torch.int64).max]])
    output, _ = dcmha_triton(*tensors[:3], **keywords, first_keys=first_keys)
    narrow = torch.tensor([[0, 0, 5, 5, 127]], dtype=torch.int8)
    assert torch.equal(dcmha_triton(*tensors[:3], **keywords, first_keys=narrow)[0], output)
    visible = (torch.arange(5) < 2)[:, None].expand(5, 5)
    expected, _ = dcmha_eager(*tensors[:3], **{**keywords, "attention_mask": visible})
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)


@interpreted
@pytest.mark.usefixtures("small")
@torch.no_grad()
def test_keys_of_a_mask_may_lie_farther_apart_than_32_bits_count() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(5, 40)))
    mask = torch.rand(5, 40) < 0.5
    distance = 1 << 26
    storage = torch.UntypedStorage(39 * distance + 5)  # unlike a tensor, it is not filled
    apart = torch.empty(0, dtype=torch.bool).set_(storage, 0, (5, 40), (1, distance)).copy_(mask)
    found, expected = (dcmha_triton(*tensors[:3], **{**keywords, "attention_mask": one})[0] for one in (apart, mask))
    assert torch.equal(found, expected)


@interpreted
def test_first_keys_that_the_host_knows_save_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LARGEST_MAP", 1)
    query, key, value = (torch.empty(1, 2, 1024, 2) for _ in range(3))
    none = (None for _ in MapInputs._fields[3:])
    first_keys = (torch.arange(1024) // 256 * 256)[None]
    inputs = MapInputs(query, key, value, *none)._replace(first_keys=first_keys)
    work = Workspace(inputs, MapSettings(1.0, True, None, groups=1), ("a",), (32, 64))
    pairs = sum(queries * keys for _, queries, keys in (chunk.counts for chunk in work.chunks()))
    assert pairs == 4 * 128 * (128 + 256)


@interpreted
@pytest.mark.parametrize("implementation", ["eager", "chunked", "triton", "sdpa"])
@pytest.mark.parametrize("mask", [None, "pairs", "additive"])
def test_every_implementation_takes_first_keys(implementation: str, mask: str | None) -> None:
    case = Case(9, 9, mask=mask, stages=() if implementation == "sdpa" else BOTH)
    tensors, keywords = in_dtype(torch.float32, *random_inputs(case))
    first_keys = torch.tensor([[0] * 4 + [4] * 5])
    keywords |= {"first_keys": first_keys, "implementation": implementation}
    output = dcmha_attention(*tensors[:3], **keywords)
    changed = [tensor.clone() for tensor in tensors[:3]]
    changed[2][:, :, :4] += 1.0
    difference = (dcmha_attention(*changed, **keywords) - output).abs().amax(dim=(0, 2, 3))
    assert difference[4:].max() == 0 and difference[:4].max() > 0
    with pytest.raises(ValueError, match=r"first_keys must be integers \(1, 9\)"):
        dcmha_attention(*tensors[:3], **{**keywords, "first_keys": first_keys.float()})


@interpreted
@pytest.mark.parametrize("programs", [1, 264])
@pytest.mark.parametrize("case", DECODING, ids=str)
def test_decoding_equals_the_reference(case: Case, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "DECODE_PROGRAMS", programs)
    tensors, keywords = random_inputs(case)
    reference, _ = dcmha_eager(*tensors[:3], **keywords)
    low, low_keywords = in_dtype(torch.float32, tensors, keywords)
    with torch.no_grad():
        output, _ = dcmha_triton(*low[:3], **low_keywords)
    torch.testing.assert_close(output.double(), reference, atol=2e-6, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_in_half_precision_is_as_exact_as_the_reference_is(dtype: torch.dtype) -> None:
    assert_decoding_is_no_noisier_than_the_reference(Case(1, 50, heads=(4, 2), batch=3, width=32), dtype)


@interpreted
@torch.no_grad()
def test_decoding_reads_a_static_cache_in_place() -> None:
    """Keys of a longer cache, factors packed as the cache packs them, and unwritten positions behind a mask."""
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(1, 20, heads=(4, 2), batch=2)))
    query, key, value = tensors[:3]
    reference, _ = dcmha_eager(query, key, value, **keywords)
    longer = [torch.cat([rows, torch.full((2, 2, 13, 8), 1e4)], dim=2) for rows in (key, value)]
    packed = {}
    for stage in BOTH:
        factors = keywords[stage].tensors()
        terms = torch.cat([factors["key_down"], factors["key_up"], factors["key_gate"][:, :, None]], dim=2)
        terms = torch.cat([terms.transpose(1, 2), torch.full((2, 5, 13, 4), 1e4)], dim=2)  # [B, terms, S, H]
        terms = terms.transpose(1, 2)
        cached = {"key_down": terms[:, :, :2], "key_up": terms[:, :, 2:4], "key_gate": terms[:, :, 4]}
        packed[stage] = replace(keywords[stage], **cached)
        side = _side(*list_tensors(packed[stage])[3:6])
        assert [part.data_ptr() for part in side[:3]] == [part.data_ptr() for part in cached.values()]
    visible = (torch.arange(33) < 20).expand(2, 1, 1, 33)
    output, _ = dcmha_triton(query, *longer, **{**keywords, **packed, "attention_mask": visible})
    torch.testing.assert_close(output, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_lone_factor_whose_heads_are_not_contiguous_is_copied(heads: int) -> None:
    gate = torch.randn(3, heads, 7).transpose(1, 2)  # `cat` would keep these strides
    side = _side(None, None, gate)
    assert side.gate is not None and side.gate.stride(-1) == 1
    assert torch.equal(side.gate, gate)


@interpreted
@torch.no_grad()
def test_decoding_hides_what_first_keys_and_masks_hide() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(1, 12, batch=2)))
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    mask[0] = False
    first_keys = torch.tensor([[0], [7]])
    output, _ = dcmha_triton(*tensors[:3], **{**keywords, "attention_mask": mask, "first_keys": first_keys})
    mask[1, :, :, :7] = False
    reference, _ = dcmha_eager(*tensors[:3], **{**keywords, "attention_mask": mask})
    assert output[0].abs().max() == 0
    torch.testing.assert_close(output, reference, atol=1e-6, rtol=1e-5)


@interpreted
@torch.no_grad()
def test_a_compiler_sees_a_decoding_step_as_one_node() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(1, 9, terms=ALL)))
    compiled = torch.compile(dcmha_triton, fullgraph=True, backend="aot_eager")
    expected, _ = dcmha_triton(*tensors[:3], **keywords)
    assert torch.equal(compiled(*tensors[:3], **keywords)[0], expected)
    stages = [[None if part is None else part.detach() for part in list_tensors(keywords[stage])] for stage in BOTH]
    no_tables = (None, None, None)
    arguments = (*(tensor.detach() for tensor in tensors[:3]), *stages, None, None, *no_tables, 1.0, 4, 1, 1, False)
    torch.library.opcheck(_decode_op, arguments, test_utils=("test_schema", "test_faketensor"))


@interpreted
def test_a_single_query_with_gradients_goes_to_chunked() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(1, 12)))
    for ours, theirs in zip(run(dcmha_triton, tensors, keywords), run(dcmha_chunked, tensors, keywords), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.zeros(1, 1, 9, 9, requires_grad=True)}, "no gradient for attention_mask; detach it"),
        (
            {"attention_mask": torch.ones(1, 2, 9, 9).bool()},
            r"masks that all heads share.*\(1, 2, 9, 9\); use 'chunked'",
        ),
    ],
)
def test_what_the_kernels_do_not_support_is_an_error(change: dict[str, Any], message: str) -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(9, 9)))
    with pytest.raises(ValueError, match=message):
        dcmha_triton(*tensors[:3], **{**keywords, **change})


@interpreted
@torch.no_grad()
def test_a_mask_that_learns_is_fine_where_no_gradient_is_asked_for() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(9, 9)))
    mask = torch.randn(1, 1, 9, 9, requires_grad=True)
    found, expected = (
        dcmha_triton(*tensors[:3], **{**keywords, "attention_mask": one})[0] for one in (mask, mask.detach())
    )
    assert torch.equal(found, expected)


def test_an_unknown_dtype_is_an_error() -> None:
    tensors, keywords = random_inputs(Case(9, 9))
    with pytest.raises(ValueError, match=r"not torch.float64; use 'chunked'"):
        dcmha_triton(*tensors[:3], **keywords)


def test_a_cpu_without_the_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(9, 9)))
    with pytest.raises(ValueError, match="runs on CUDA devices"):
        dcmha_triton(*tensors[:3], **keywords)


def test_without_triton_the_op_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_all_kernels", registry._all_kernels.__wrapped__)  # the table is kept otherwise
    for name in [name for name in sys.modules if name.startswith(kernels.__name__ + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(9, 9)))
    with pytest.raises(ImportError, match="implementation='triton' needs Triton: pip install triton, or use 'chunked'"):
        dcmha_triton(*tensors[:3], **keywords)
