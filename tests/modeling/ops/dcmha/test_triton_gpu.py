"""The Triton kernels on a GPU: cases that an interpreter is too slow for, memory, graphs, tables by distance, pages."""

import pytest
import torch
from cases import composed_op
from cases.composed_op import DYNAMIC, in_dtype
from cases.paged_steps import STEPS, Step, assert_as_exact_as_the_reference, random_step
from cases.paged_steps import run as run_step
from cases.triton_marks import on_gpu
from torch import Tensor

pytest.importorskip("triton")
from dynattn.modeling.ops.dcmha.eager import dcmha_eager
from dynattn.modeling.ops.dcmha.triton.attention import dcmha_triton
from dynattn.modeling.ops.dcmha.triton.paged_decode import decode_pages

from .test_triton import (
    LARGE,
    LARGE_DECODING,
    Case,
    assert_decoding_is_no_noisier_than_the_reference,
    assert_no_noisier_than_the_reference,
    multiple_of_noise,
    random_inputs,
    run,
)

pytestmark = on_gpu

BOTH = ("bias", "gain")
TABLES = [
    composed_op.Case(300, 300, (16, 4), tables=BOTH, terms=DYNAMIC),
    composed_op.Case(300, 300, (32, 32), tables=BOTH, mask="padding"),
    composed_op.Case(517, 700, (12, 12), tables=BOTH, window=128, rank=1),
    composed_op.Case(300, 300, (4, 4), tables=BOTH, compose_bias=True, mask="pairs"),
    composed_op.Case(400, 400, (6, 2), tables=("gain",), window=100, is_causal=True),
    composed_op.Case(1, 700, (16, 4), tables=BOTH, window=300),
    composed_op.Case(1, 700, (6, 6), tables=BOTH, compose_bias=True, mask="padding"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_nothing_is_noisier_than_the_reference(case: Case, dtype: torch.dtype) -> None:
    assert_no_noisier_than_the_reference(case, dtype, "cuda")


def test_two_runs_are_the_same_to_the_bit() -> None:
    tensors, keywords = in_dtype(torch.bfloat16, *random_inputs(LARGE[0], "cuda"))
    for first, second in zip(run(dcmha_triton, tensors, keywords), run(dcmha_triton, tensors, keywords), strict=True):
        assert torch.equal(first, second)


def test_the_backward_pass_needs_no_map_of_all_pairs() -> None:
    case = Case(16384, 16384, heads=(16, 16), width=64)
    tensors, keywords = in_dtype(torch.bfloat16, *random_inputs(case, "cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(dcmha_triton, tensors, keywords)
    pairs = case.heads[0] * case.queries * case.keys * 2
    assert torch.cuda.max_memory_allocated() - before < pairs / 2


@pytest.mark.parametrize("window", [None, 256])
def test_a_graph_replays_both_passes(window: int | None) -> None:
    case = Case(1024, 1024, heads=(16, 16), width=64, window=window)
    tensors, keywords = in_dtype(torch.bfloat16, *random_inputs(case, "cuda"))
    upstream = torch.randn(1, 1024, 16, 64, dtype=torch.bfloat16, device="cuda")

    def step() -> tuple[Tensor, ...]:
        output, _ = dcmha_triton(*tensors[:3], **keywords)
        return output, *torch.autograd.grad(output, tensors, upstream)

    torch.cuda.synchronize()  # the other stream does not wait for the inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    with torch.no_grad():
        for tensor in replayed:
            tensor.zero_()
    graph.replay()
    for ours, theirs in zip(replayed, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", LARGE_DECODING, ids=str)
def test_decoding_is_no_noisier_than_the_reference(case: Case, dtype: torch.dtype) -> None:
    assert_decoding_is_no_noisier_than_the_reference(case, dtype, "cuda")


@torch.no_grad()
def test_a_decoding_step_can_be_captured_in_a_graph() -> None:
    case = Case(1, 1000, heads=(16, 16), batch=2, width=64, mask="padding")
    tensors, keywords = in_dtype(torch.bfloat16, *random_inputs(case, "cuda"))
    expected, _ = dcmha_triton(*tensors[:3], **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = dcmha_triton(*tensors[:3], **keywords)
    output.zero_()
    graph.replay()
    assert torch.equal(output, expected)
    keywords["attention_mask"][..., ::2] = False
    graph.replay()
    assert torch.equal(output, dcmha_triton(*tensors[:3], **keywords)[0])
    assert not torch.equal(output, expected)


def test_first_keys_keep_packed_documents_apart() -> None:
    case = Case(900, 900, heads=(16, 8), width=64, window=300)
    tensors, keywords = in_dtype(torch.float32, *random_inputs(case, "cuda"))
    documents = (torch.arange(900, device="cuda") // 250)[None]
    same = (documents[:, :, None] == documents[:, None])[:, None]
    reference = run(dcmha_eager, tensors, {**keywords, "attention_mask": same})
    for first_keys in (documents * 250, documents.cpu() * 250):
        results = run(dcmha_triton, tensors, {**keywords, "first_keys": first_keys})
        for ours, expected in zip(results, reference, strict=True):
            assert (ours - expected).norm() <= 1e-3 * expected.norm()


@torch.no_grad()
def test_a_compiled_decoding_step_is_the_same() -> None:
    tensors, keywords = in_dtype(torch.bfloat16, *random_inputs(Case(1, 300, heads=(8, 8), width=64), "cuda"))
    compiled = torch.compile(dcmha_triton, fullgraph=True)
    assert torch.equal(compiled(*tensors[:3], **keywords)[0], dcmha_triton(*tensors[:3], **keywords)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", TABLES, ids=str)
def test_tables_by_distance_are_as_exact_as_in_the_reference(case: composed_op.Case, dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        tensors, keywords = in_dtype(dtype, *composed_op.random_inputs(case))
    exact = composed_op.run(*in_dtype(torch.float64, tensors, keywords), "eager")
    found, plain = (composed_op.run(tensors, keywords, name) for name in ("triton", "eager"))
    for ours, noise, truth in zip(found, plain, exact, strict=True):
        assert ours.dtype == noise.dtype == dtype
        limit = multiple_of_noise(dtype, "cuda") * (noise - truth).norm() + 2 * torch.finfo(dtype).eps * truth.norm()
        assert (ours - truth).norm() <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_over_pages_is_as_exact_as_the_reference_on_each_request(step: Step, dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        query, pages, stages, tables, alone = random_step(step, dtype)
    assert_as_exact_as_the_reference(run_step(decode_pages, step, query, pages, stages, tables), alone, dtype)
