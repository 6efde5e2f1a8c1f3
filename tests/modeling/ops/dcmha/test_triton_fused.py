"""The fused forward pass of the Triton path, which keeps no maps, against the reference op."""

from collections.abc import Iterator

import pytest
import torch
from cases.triton_marks import interpreted
from torch import Tensor

from dynattn.modeling.ops.dcmha.eager import dcmha_eager
from dynattn.modeling.ops.dcmha.triton import fused, matrices, passes, tuning, workspace
from dynattn.modeling.ops.dcmha.triton.arguments import MapInputs, MapSettings
from dynattn.modeling.ops.dcmha.triton.attention import dcmha_triton
from dynattn.modeling.ops.dcmha.triton.tiling import whole_tiling
from dynattn.modeling.ops.dcmha.triton.workspace import Workspace

from .test_triton import (
    CASES,
    STATIC,
    Case,
    assert_equal_to_the_reference,
    assert_no_noisier_than_the_reference,
    cast,
    far_apart,
    random_inputs,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")

# Without composition, and with a static matrix that mixes heads of different groups, other kernels serve.
SERVED = [case for case in CASES if case.stages and not (case.groups != (1, 1) and "static" in case.terms)]
LARGE = [
    Case(1000, 1000, heads=(16, 16), batch=2, width=64),
    Case(517, 1030, heads=(16, 4), window=200, width=40),
    Case(300, 300, heads=(12, 12), rank=4, mask="padding", batch=2, width=32),
    Case(700, 700, heads=(16, 16), terms=STATIC, width=64, is_causal=False, mask="additive"),
    Case(200, 300, heads=(12, 12), width=8),
]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the fused kernels that ran; every forward pass that the tensor cores could serve is fused."""
    names: list[str] = []
    launch = fused._launch

    def note(work: Workspace, name: str, *arguments: object) -> None:
        names.append(name)
        launch(work, name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fused, "_launch", note)
    monkeypatch.setattr(passes, "composes_on_tensor_cores", lambda *_, **__: True)
    monkeypatch.setattr(tuning, "FUSES_FORWARD", True)
    monkeypatch.setattr(tuning, "FEWEST_QUERIES", 1)
    return names


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small patches, so that a few tokens have several; buffers start as NaN."""
    for name in ("FUSED_TILES_80", "FUSED_TILES_90"):
        monkeypatch.setattr(tuning, name, dict.fromkeys(tuning.FUSED_TILES_80, (8, 16, 4, 1)))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def attend(case: Case, **others: Tensor) -> tuple[Tensor, Tensor]:
    """The fused output in float32 and that of the reference in float64, both `[B, T, H, D]`."""
    tensors, keywords = random_inputs(case)
    low, low_keywords = cast(tensors, keywords, torch.float32)
    with torch.no_grad():
        return dcmha_triton(*low[:3], **low_keywords | others)[0], dcmha_eager(*tensors[:3], **keywords)[0]


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_the_output_equals_the_reference(case: Case, launched: list[str]) -> None:
    output, reference = attend(case)
    torch.testing.assert_close(output.double(), reference, atol=2e-5, rtol=1e-5)
    assert launched == ["dcmha_fused_statistics", "dcmha_fused_output"]


@interpreted
@pytest.mark.usefixtures("small")
def test_the_backward_pass_goes_on_from_the_fused_one() -> None:
    assert_equal_to_the_reference(Case(20, 23, heads=(4, 2), batch=2, window=9))


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shipped_patches_in_half_precision_are_as_exact_as_the_reference_is(dtype: torch.dtype) -> None:
    assert_no_noisier_than_the_reference(Case(33, 33, heads=(12, 4), width=20, rank=1, mask="padding"), dtype)


@interpreted
@pytest.mark.usefixtures("small")
def test_first_keys_keep_packed_documents_apart() -> None:
    case = Case(40, 40, heads=(2, 2), batch=2, rank=1)
    tensors, keywords = random_inputs(case)
    first_keys = torch.stack([torch.arange(40) // 20 * 20, torch.arange(40) // 30 * 30])
    same = torch.arange(40) >= first_keys[..., None]
    reference, _ = dcmha_eager(*tensors[:3], **{**keywords, "attention_mask": same[:, None]})
    low, low_keywords = cast(tensors, keywords, torch.float32)
    with torch.no_grad():
        low[1][:, :, :16] = torch.nan  # the last program's queries see no such key, and it does not read them
        output, _ = dcmha_triton(*low[:3], **low_keywords, first_keys=first_keys)
    torch.testing.assert_close(output[:, 32:].double(), reference[:, 32:], atol=2e-5, rtol=1e-5)


@interpreted
@pytest.mark.usefixtures("small")
def test_rows_without_a_visible_key_give_zeros_and_one_that_is_not_a_number_stays_alone() -> None:
    tensors, keywords = cast(*random_inputs(Case(20, 20, batch=2)), torch.float32)
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool)
    mask[0, :, 0] = False
    with torch.no_grad():
        expected, _ = dcmha_eager(*tensors[:3], **{**keywords, "attention_mask": mask})
        tensors[0][1, 1, 7] = torch.nan
        output, _ = dcmha_triton(*tensors[:3], **{**keywords, "attention_mask": mask})
    assert output[0, 0].abs().max() == 0 and output[1, 7].isnan().all()
    output[1, 7] = expected[1, 7]
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("case", [Case(5, 5, batch=0), Case(5, 0), Case(0, 5)], ids=str)
def test_nothing_to_attend_with_gives_what_the_reference_gives(case: Case) -> None:
    output, reference = attend(case)
    assert torch.equal(output.double(), reference)


@interpreted
@torch.no_grad()
def test_heads_may_lie_farther_apart_than_32_bits_count() -> None:
    tensors, keywords = cast(*random_inputs(Case(17, 17, heads=(3, 3), rank=1)), torch.bfloat16)
    apart = [far_apart(tensor, 1 << 30) for tensor in tensors[:3]]
    assert torch.equal(dcmha_triton(*apart, **keywords)[0], dcmha_triton(*tensors[:3], **keywords)[0])


@interpreted
def test_one_chunk_has_everything_and_needs_no_buffer() -> None:
    query, key = torch.empty(3, 4, 70, 8), torch.empty(3, 2, 90, 8)
    inputs = MapInputs(query, key, key, *(None for _ in MapInputs._fields[3:]))
    work = Workspace(inputs, MapSettings(1.0, True, 20, groups=1), (), (32, 16), whole_tiling)
    assert work.memory == {} and [chunk.counts for chunk in work.chunks()] == [(3, 96, 96)]


@interpreted
@pytest.mark.usefixtures("small")
def test_more_items_than_a_grid_takes_are_several_launches(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (matrices, workspace):
        monkeypatch.setattr(module, "MOST_PROGRAMS", 2)
    output, reference = attend(Case(9, 9, heads=(2, 2), batch=3, rank=1, mask="pairs"))
    torch.testing.assert_close(output.double(), reference, atol=2e-5, rtol=1e-5)
    assert launched == ["dcmha_fused_statistics", "dcmha_fused_output"] * 2


@pytest.mark.parametrize(
    ("heads", "width", "queries", "expected"),
    [(16, 64, 4096, True), (11, 40, 4096, True), (17, 64, 4096, False), (16, 65, 4096, False), (16, 64, 4095, False)],
)
def test_a_pass_is_fused_if_its_output_fits_and_there_are_many_queries(
    heads: int, width: int, queries: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "FEWEST_QUERIES", 8192)
    rows = torch.empty(2, heads, queries, width, device="meta")
    inputs = MapInputs(*(rows,) * 3, *(None for _ in MapInputs._fields[3:]))
    assert fused.is_fused(inputs) is expected
    monkeypatch.setattr(tuning, "FUSES_FORWARD", False)
    assert not fused.is_fused(inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_on_a_gpu_nothing_is_noisier_than_the_reference(case: Case, dtype: torch.dtype, launched: list[str]) -> None:
    assert_no_noisier_than_the_reference(case, dtype, "cuda")
    assert launched == ["dcmha_fused_statistics", "dcmha_fused_output"]
