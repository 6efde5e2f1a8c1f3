"""Tables by distance and pages in the Triton kernels on a GPU; the other files have the rest that runs there."""

import pytest
import torch
from cases.composed_op import DYNAMIC, Case, in_dtype, random_inputs, run
from cases.paged_steps import STEPS, Step, assert_as_exact_as_the_reference, random_step
from cases.paged_steps import run as run_step

pytest.importorskip("triton")
from dynattn.modeling.ops.dcmha.triton.paged_decode import decode_pages

from .test_triton import multiple_of_noise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BOTH = ("bias", "gain")
TABLES = [
    Case(300, 300, (16, 4), tables=BOTH, terms=DYNAMIC),
    Case(300, 300, (32, 32), tables=BOTH, mask="padding"),
    Case(517, 700, (12, 12), tables=BOTH, window=128, rank=1),
    Case(300, 300, (4, 4), tables=BOTH, compose_bias=True, mask="pairs"),
    Case(400, 400, (6, 2), tables=("gain",), window=100, is_causal=True),
    Case(1, 700, (16, 4), tables=BOTH, window=300),
    Case(1, 700, (6, 6), tables=BOTH, compose_bias=True, mask="padding"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", TABLES, ids=str)
def test_tables_by_distance_are_as_exact_as_in_the_reference(case: Case, dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        tensors, keywords = in_dtype(dtype, *random_inputs(case))
    exact = run(*in_dtype(torch.float64, tensors, keywords), "eager")
    for ours, noise, truth in zip(
        run(tensors, keywords, "triton"), run(tensors, keywords, "eager"), exact, strict=True
    ):
        assert ours.dtype == noise.dtype == dtype
        limit = multiple_of_noise(dtype, "cuda") * (noise - truth).norm() + 2 * torch.finfo(dtype).eps * truth.norm()
        assert (ours - truth).norm() <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_over_pages_is_as_exact_as_the_reference_on_each_request(step: Step, dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        query, pages, stages, tables, alone = random_step(step, dtype)
    assert_as_exact_as_the_reference(run_step(decode_pages, step, query, pages, stages, tables), alone, dtype)
