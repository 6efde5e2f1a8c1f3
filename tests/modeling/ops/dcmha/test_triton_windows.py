"""Causal windows of the Triton path: tilings, and results against the reference op."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from cases.composed_op import ALL, in_dtype
from cases.triton_marks import interpreted
from torch import Tensor

from dynattn.modeling.ops.dcmha.eager import dcmha_eager
from dynattn.modeling.ops.dcmha.triton import tuning, workspace
from dynattn.modeling.ops.dcmha.triton.arguments import MapInputs
from dynattn.modeling.ops.dcmha.triton.attention import dcmha_triton
from dynattn.modeling.ops.dcmha.triton.tiling import RowTiling, WindowTiling, add_blocks, aligned, choose_tiling
from dynattn.modeling.ops.masking import Structure

from .test_triton import Case, assert_no_noisier_than_the_reference, family, random_inputs, run

pytest.importorskip("triton")

__all__ = ["family"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")

FORWARD = ["window_maps", "statistics", "merge", "probs", "window_queries"]
BACKWARD = [
    "window_maps",
    "window_maps",
    "backward_post",
    "window_keys",
    "backward_pre",
    "window_queries",
    "window_keys",
]
CASES = [
    Case(48, 48, heads=(2, 1), window=5),
    Case(33, 33, window=8, batch=2, mask="padding", rank=1),
    Case(66, 66, window=34, rank=1),
    Case(35, 80, window=6, mask="pairs", rank=1),  # no block reaches the first keys
    Case(40, 52, window=20, mask="additive", rank=1),
    Case(42, 32, window=4, stages=("post",), rank=1),  # queries before the first key see nothing
    Case(33, 33, heads=(4, 2), groups=2, window=4, rank=1, mask="unbatched"),
    Case(33, 33, terms=ALL, window=4, rank=1),
    Case(33, 33, stages=(), window=4, width=20),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and patches, so that a few tokens have several; buffers start as NaN."""
    tiles = dict.fromkeys(tuning.TILES, (16, 16, 4))
    matrix_tiles = dict.fromkeys(tuning.MATRIX_TILES_16, (16, 16, 4, 1))
    for name, value in {"BLOCK": 16, "TILES": tiles, "MATRIX_TILES_16": matrix_tiles}.items():
        monkeypatch.setattr(tuning, name, value)
    monkeypatch.setattr(tuning, "TILES_OF_MANY_TERMS", tiles)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)


class Recorder(NamedTuple):
    """A kernel that adds its name to `names` when it is launched, and does nothing else if it is None."""

    name: str
    kernel: Any
    names: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:  # type: ignore[override]
        self.names.append(self.name)
        return (lambda *_, **__: None) if self.kernel is None else self.kernel[grid]


def record(monkeypatch: pytest.MonkeyPatch, *, run: bool) -> list[str]:
    """Returns a list that the names of launched kernels are added to."""
    names: list[str] = []
    load = workspace.load_kernels

    def load_recorders(device: torch.device) -> dict[str, Recorder]:
        return {name: Recorder(name, kernel if run else None, names) for name, kernel in load(device).items()}

    monkeypatch.setattr(workspace, "load_kernels", load_recorders)
    return names


def chunks_of(names: list[str]) -> int:
    """The number of chunks that launched these kernels, each of them the same ones, forward and backward."""
    names = [name.removeprefix("dcmha_").removeprefix("matrix_") for name in names if name != "dcmha_matrices"]
    count, rest = divmod(len(names), len(FORWARD + BACKWARD))
    assert rest == 0 and names == FORWARD * count + BACKWARD * count
    return count


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that ran."""
    return record(monkeypatch, run=True)


def assert_equal(ours: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> None:
    for one, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(one.double(), expected, atol=2e-5, rtol=1e-5)


@interpreted
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("case", [*CASES[:2], *(pytest.param(c, marks=pytest.mark.slow) for c in CASES[2:])], ids=str)
def test_output_and_all_gradients_equal_the_reference_in_one_chunk(case: Case, launched: list[str]) -> None:
    tensors, keywords = random_inputs(case)
    reference = run(dcmha_eager, tensors, keywords)
    assert_equal(run(dcmha_triton, *in_dtype(torch.float32, tensors, keywords)), reference)
    assert chunks_of(launched) == 1


@interpreted
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize(
    ("room", "chunks"), [(2, 2 * 2), *(pytest.param(*few, marks=pytest.mark.slow) for few in [(3, 2), (100, 1)])]
)
def test_chunks_of_blocks_and_of_rows_of_the_batch_equal_the_reference(
    room: int, chunks: int, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    monkeypatch.setattr(tuning, "LARGEST_MAP", room * 2 * 16 * 48)
    tensors, keywords = random_inputs(Case(48, 48, window=20, rank=1, batch=2))
    reference = run(dcmha_eager, tensors, keywords)
    assert_equal(run(dcmha_triton, *in_dtype(torch.float32, tensors, keywords)), reference)
    assert chunks_of(launched) == chunks


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(2, 2), pytest.param((16, 4), marks=pytest.mark.slow)])
def test_half_precision_is_as_exact_as_the_reference_is(heads: tuple[int, int], dtype: torch.dtype) -> None:
    assert_no_noisier_than_the_reference(Case(40, 40, heads=heads, window=12), dtype)


@interpreted
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_first_keys_keep_packed_documents_apart(groups: int, launched: list[str]) -> None:
    case = Case(33, 33, heads=(2 * groups, 2), batch=2, window=5, rank=1, groups=groups)
    tensors, keywords = random_inputs(case)
    documents = torch.tensor([[0] * 7 + [1] * 26, [0] * 22 + [1] * 11])
    same = (documents[:, :, None] == documents[:, None])[:, None]
    first_keys = same[:, 0].to(torch.uint8).argmax(-1)
    reference = run(dcmha_eager, tensors, {**keywords, "attention_mask": same})
    low, low_keywords = in_dtype(torch.float32, tensors, keywords)
    assert_equal(run(dcmha_triton, low, {**low_keywords, "first_keys": first_keys}), reference)
    assert chunks_of(launched) == 1


@interpreted
@pytest.mark.usefixtures("family")
def test_hidden_rows_give_zeros_and_finite_gradients(launched: list[str]) -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(37, 37, batch=2, window=5, rank=1)))
    mask = torch.ones(2, 1, 1, 37, dtype=torch.bool)
    mask[0, ..., :10] = False  # padding on the left
    output, *gradients = run(dcmha_triton, tensors, {**keywords, "attention_mask": mask})
    assert output[0, :10].abs().max() == 0 and output[0, 10:].abs().min() > 0 and output[1].abs().min() > 0
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert chunks_of(launched) == 1


@interpreted
@pytest.mark.usefixtures("family")
def test_rows_are_read_in_place() -> None:
    tensors, keywords = random_inputs(Case(40, 40, batch=2, window=5, rank=1))
    reference = run(dcmha_eager, tensors, keywords)
    low, keywords = in_dtype(torch.float32, tensors, keywords)
    orders = ((0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2))  # in the last one channels are not contiguous
    for index, order in enumerate(orders):
        back = [order.index(axis) for axis in range(4)]
        moved = low[index].detach().permute(order).contiguous().permute(back)
        low[index] = moved.requires_grad_()
        assert not low[index].is_contiguous()
    assert_equal(run(dcmha_triton, low, keywords), reference)


@interpreted
@pytest.mark.usefixtures("family")
def test_what_is_not_finite_stays_in_the_reach_of_its_block() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(64, 64, window=5, rank=1)))
    with torch.no_grad():
        tensors[2][:, :, 17] = torch.nan
    output, grad_query, *_ = run(dcmha_triton, tensors, keywords)
    touched = torch.zeros(64, dtype=torch.bool)
    touched[16:48] = True  # the block of query 17, and the next one
    for rows in (output[0].transpose(0, 1), grad_query[0]):
        assert rows[:, ~touched].isfinite().all()
        assert rows[:, 17:22].isnan().any()


@interpreted
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("length", [1024, 4096])
def test_launches_do_not_grow_with_the_sequence(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = record(monkeypatch, run=False)
    monkeypatch.setattr(tuning, "BLOCK", 64)
    run(dcmha_triton, *in_dtype(torch.float32, *random_inputs(Case(length, length, rank=1, window=256, width=4))))
    assert chunks_of(names) == 1


@pytest.mark.parametrize(("step", "reach"), [(8, 16), (8, 20), (8, 8), (16, 40)])
def test_blocks_of_keys_add_up_where_they_overlap(step: int, reach: int) -> None:
    total = torch.randn(2, 2 * step + reach, 3, dtype=torch.float64)
    parts = torch.randn(2, 3, reach, 3, dtype=torch.float64)
    expected = total.clone()
    for block in range(3):
        expected[:, block * step : block * step + reach] += parts[:, block]
    add_blocks(total, parts, step)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(("queries", "room"), [(400, 1000), (400, 20), (30, 1000)])
@pytest.mark.parametrize("queries_of_a_program", [1, 16, 48])
def test_all_programs_of_a_chunk_of_rows_have_places_of_their_own(
    queries: int, room: int, queries_of_a_program: int
) -> None:
    tiling = tiling_of(queries, 400, None, room)
    assert isinstance(tiling, RowTiling)
    programs = (-(-(rows.stop - rows.start) // queries_of_a_program) for rows, _ in tiling.spans)
    assert max(programs) == tiling.slots(queries_of_a_program)


@pytest.mark.parametrize(
    ("blocks", "expected"), [(1, 1), (16, 16), (64, 64), (65, 13), (320, 64), (508, 127), (2048, 256)]
)
def test_the_programs_of_a_windows_block_are_few_and_have_whole_patches(blocks: int, expected: int) -> None:
    assert tuning.turns_of_window(blocks) == expected


@pytest.mark.parametrize("window", [5, 17, 60, 300])
@pytest.mark.parametrize("room", [1, 100, 1000])
@pytest.mark.parametrize("queries_of_a_program", [1, 4, 16])
def test_programs_that_add_to_the_same_gradients_have_other_keys(
    window: int, room: int, queries_of_a_program: int
) -> None:
    """The programs of one launch run at the same time; those with the same keys need places of their own."""
    tiling = tiling_of(400, 400, window, room)
    assert isinstance(tiling, WindowTiling)
    slots = tiling.slots(queries_of_a_program)
    for queries, _ in tiling.spans:
        programs = range(0, queries.stop - queries.start, queries_of_a_program)
        for slot in range(slots):
            starts = [first // tiling.step * tiling.step for first in programs[slot::slots]]
            assert all(after - before >= tiling.reach for before, after in pairwise(starts))


@pytest.mark.parametrize(("queries", "keys", "window"), [(32, 32, 5), (100, 120, 60), (35, 80, 6), (42, 32, 4)])
@pytest.mark.parametrize("room", [1, 2, 100])
def test_a_window_tiling_has_all_keys_of_all_windows(queries: int, keys: int, window: int, room: int) -> None:
    tiling = tiling_of(queries, keys, window, room)
    assert isinstance(tiling, WindowTiling)
    seen = [(t, s) for rows, columns in tiling.spans for t, s in pairs_of(tiling, rows, columns)]
    visible = {(t, s) for t in range(queries) for s in range(keys) if 0 <= t + keys - queries - s < window}
    assert len(seen) == len(set(seen)) and visible <= set(seen)
    assert all(columns.start % 16 == 0 and columns.stop <= tiling.keys for _, columns in tiling.spans)
    assert tiling.largest == max((rows.stop - rows.start) * tiling.reach for rows, _ in tiling.spans)


def pairs_of(tiling: WindowTiling, rows: slice, columns: slice) -> list[tuple[int, int]]:
    """The query and the key of each entry of a chunk's maps."""
    first = columns.start - tiling.before
    return [
        (t, first + s + (t - rows.start) // tiling.step * tiling.step)
        for t in range(rows.start, rows.stop)
        for s in range(tiling.reach)
    ]


def tiling_of(
    queries: int, keys: int, window: int | None, room: int = 100, *, is_causal: bool = True
) -> RowTiling | WindowTiling:
    query, key = torch.empty(1, 2, queries, 4), torch.empty(1, 2, keys, 4)
    inputs = MapInputs(query, key, key, *(None for _ in MapInputs._fields[3:]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "LARGEST_MAP", room * 2 * 16 * 32)
        return choose_tiling(inputs, Structure(queries, keys, is_causal, window), 1, (8, 16))


@pytest.mark.parametrize(
    ("queries", "keys", "window", "is_causal", "expected"),
    [
        (32, 32, 5, True, WindowTiling),
        (100, 120, 60, True, WindowTiling),
        (31, 31, 5, True, RowTiling),  # a single block
        (32, 32, 24, True, RowTiling),  # blocks that reach back to before the first key
        (32, 32, None, True, RowTiling),
        (32, 32, 5, False, RowTiling),
    ],
)
def test_long_causal_windows_have_window_tilings(
    queries: int, keys: int, window: int | None, is_causal: bool, expected: type
) -> None:
    assert isinstance(tiling_of(queries, keys, window, is_causal=is_causal), expected)


@pytest.mark.parametrize("queries", [1, 9, 16, 500])
def test_lengths_are_aligned_whatever_the_queries_of_a_patch(queries: int) -> None:
    """Otherwise kernels would be compiled anew for some lengths."""
    tiling = tiling_of(queries, 500, None)
    assert (tiling.queries, tiling.keys) == (aligned(queries), 512) and tiling.queries % 16 == 0
    assert tiling.spans[-1][0].stop == tiling.queries
