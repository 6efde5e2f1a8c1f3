"""Sliding windows of the Triton path: blocks of queries as items of the batch, against the reference op."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dynattn.modeling.ops import dcmha_triton_choice, dcmha_triton_workspace
from dynattn.modeling.ops.dcmha_eager import dcmha_eager
from dynattn.modeling.ops.dcmha_triton import dcmha_triton
from dynattn.modeling.ops.dcmha_triton_arguments import MapInputs, MapSettings
from dynattn.modeling.ops.dcmha_triton_windows import Blocks, choose_blocks

from .test_triton import STATIC, Case, assert_no_noisier_than_the_reference, cast, interpreted, random_inputs, run

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")

# Of one chunk, forward and backward.
LAUNCHES = 3 + 2
CASES = [
    Case(24, 24, heads=(2, 1), window=5),
    Case(17, 17, window=8, batch=2, mask="padding", rank=1),
    Case(35, 35, window=18, rank=1),
    Case(18, 40, window=6, mask="pairs", rank=1),  # no block reaches the first keys
    Case(19, 21, window=12, mask="additive", rank=1),
    Case(21, 16, window=4, stages=("post",), rank=1),  # queries before the first key see nothing
    Case(17, 17, heads=(4, 2), groups=(2, 2), window=4, rank=1, mask="unbatched"),
    Case(17, 17, terms=STATIC, window=4, rank=1),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a few tokens."""
    monkeypatch.setattr(dcmha_triton_choice, "BLOCK", 8)


class Recorder(NamedTuple):
    """A kernel that notes when it is launched; None does nothing."""

    name: str
    kernel: Any
    names: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:  # type: ignore[override]
        self.names.append(self.name)
        return (lambda *_, **__: None) if self.kernel is None else self.kernel[grid]


def record(monkeypatch: pytest.MonkeyPatch, *, run: bool) -> list[str]:
    """Returns a list that the names of launched kernels are added to."""
    names: list[str] = []
    load = dcmha_triton_workspace.load_kernels

    def load_recorders(device: torch.device) -> dict[str, Recorder]:
        return {name: Recorder(name, kernel if run else None, names) for name, kernel in load(device).items()}

    monkeypatch.setattr(dcmha_triton_workspace, "load_kernels", load_recorders)
    return names


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that ran."""
    return record(monkeypatch, run=True)


def assert_equal(ours: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    for one, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(one.double(), true, atol=2e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_all_gradients_equal_the_reference_in_one_chunk(case: Case, launched: list[str]) -> None:
    tensors, keywords = random_inputs(case)
    truth = run(dcmha_eager, tensors, keywords)
    assert_equal(run(dcmha_triton, *cast(tensors, keywords, torch.float32)), truth)
    assert len(launched) == LAUNCHES


@interpreted
def test_many_chunks_of_blocks_equal_the_reference(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    monkeypatch.setattr(dcmha_triton_choice, "ROWS", 8)
    monkeypatch.setattr(dcmha_triton_choice, "LARGEST_MAP", 2 * 2 * 10 * 32)
    tensors, keywords = random_inputs(Case(40, 40, window=20, rank=1))
    truth = run(dcmha_eager, tensors, keywords)
    assert_equal(run(dcmha_triton, *cast(tensors, keywords, torch.float32)), truth)
    assert len(launched) == LAUNCHES * 2 * 2  # four blocks, two at once, in chunks of eight and of two queries


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_reference_is(dtype: torch.dtype) -> None:
    assert_no_noisier_than_the_reference(Case(24, 24, window=12), dtype)


@interpreted
@pytest.mark.parametrize("groups", [1, 2])
def test_first_keys_keep_packed_documents_apart(groups: int, launched: list[str]) -> None:
    case = Case(17, 17, heads=(2 * groups, 2), batch=2, window=5, rank=1, groups=(groups, groups))
    tensors, keywords = random_inputs(case)
    documents = torch.tensor([[0] * 7 + [1] * 10, [0] * 13 + [1] * 4])
    same = (documents[:, :, None] == documents[:, None])[:, None]
    first_keys = same[:, 0].to(torch.uint8).argmax(-1)
    truth = run(dcmha_eager, tensors, {**keywords, "attention_mask": same})
    low, low_keywords = cast(tensors, keywords, torch.float32)
    assert_equal(run(dcmha_triton, low, {**low_keywords, "first_keys": first_keys}), truth)
    assert len(launched) == LAUNCHES


@interpreted
def test_hidden_rows_give_zeros_and_finite_gradients(launched: list[str]) -> None:
    tensors, keywords = cast(*random_inputs(Case(19, 19, batch=2, window=5, rank=1)), torch.float32)
    mask = torch.ones(2, 1, 1, 19, dtype=torch.bool)
    mask[0, ..., :10] = False  # padding on the left
    output, *gradients = run(dcmha_triton, tensors, {**keywords, "attention_mask": mask})
    assert output[0, :10].abs().max() == 0 and output[0, 10:].abs().min() > 0 and output[1].abs().min() > 0
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert len(launched) == LAUNCHES


@interpreted
def test_what_is_not_finite_stays_in_the_reach_of_its_block() -> None:
    tensors, keywords = cast(*random_inputs(Case(40, 40, window=5, rank=1)), torch.float32)
    with torch.no_grad():
        tensors[2][:, :, 17] = torch.nan
    output, grad_query, *_ = run(dcmha_triton, tensors, keywords)
    touched = torch.zeros(40, dtype=torch.bool)
    touched[16:32] = True  # its block, and the next one
    for rows in (output[0].transpose(0, 1), grad_query[0]):
        assert rows[:, ~touched].isfinite().all()
        assert rows[:, 17:22].isnan().any()


@interpreted
@pytest.mark.parametrize("length", [1024, 4096])
def test_launches_do_not_grow_with_the_sequence(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = record(monkeypatch, run=False)
    monkeypatch.setattr(dcmha_triton_choice, "BLOCK", 128)
    run(dcmha_triton, *cast(*random_inputs(Case(length, length, rank=1, window=256, width=4)), torch.float32))
    assert len(names) == LAUNCHES


@pytest.mark.parametrize("blocks", [Blocks(21, 21, 1, 8, 16), Blocks(16, 50, 2, 8, 16), Blocks(19, 12, 1, 8, 32)])
@pytest.mark.parametrize("axis", [1, 2])
def test_gradients_of_keys_add_up_where_blocks_overlap(blocks: Blocks, axis: int) -> None:
    shape = [4, 3, 3, 2]
    shape[axis] = blocks.keys
    rows = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    parts = blocks.of_keys(rows, axis)
    assert parts.shape[0] == 4 * blocks.count and parts.shape[axis] == blocks.reach
    upstream = torch.randn_like(parts)
    torch.testing.assert_close(blocks.add_keys(upstream, axis), torch.autograd.grad(parts, rows, upstream)[0])


def test_queries_come_back_from_their_blocks() -> None:
    rows, blocks = torch.randn(4, 3, 21, 2), Blocks(21, 21, 2, 8, 16)
    parts = blocks.of_queries(rows, 2)
    assert torch.equal(parts[4, :, :5], rows[0, :, 16:]) and parts[4, :, 5:].abs().max() == 0
    assert torch.equal(blocks.join_queries(parts, 2), rows)


@pytest.mark.parametrize(
    ("queries", "keys", "window", "is_causal", "expected"),
    [
        (16, 16, 5, True, Blocks(16, 16, 1, 8, 16)),
        (100, 120, 60, True, Blocks(100, 120, 1, 30, 96)),
        (15, 15, 5, True, None),  # a single block
        (16, 16, 12, True, None),  # blocks that reach back to before the first key
        (16, 16, None, True, None),
        (16, 16, 5, False, None),
    ],
)
def test_what_is_cut_into_blocks(
    queries: int, keys: int, window: int | None, is_causal: bool, expected: Blocks | None
) -> None:
    query, key = torch.empty(1, 2, queries, 4), torch.empty(1, 2, keys, 4)
    inputs = MapInputs(query, key, key, *(None for _ in MapInputs._fields[3:]))
    assert choose_blocks(inputs, MapSettings(1.0, is_causal, window, groups=1)) == expected


def test_a_batch_that_fills_chunks_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    query, settings = torch.empty(4, 2, 32, 4), MapSettings(1.0, True, 5, groups=1)
    inputs = MapInputs(query, query, query, *(None for _ in MapInputs._fields[3:]))
    for room, is_cut in ((2, True), (1, False)):
        monkeypatch.setattr(dcmha_triton_choice, "LARGEST_MAP", room * 4 * 2 * 8 * 16)
        assert (choose_blocks(inputs, settings) is not None) == is_cut
