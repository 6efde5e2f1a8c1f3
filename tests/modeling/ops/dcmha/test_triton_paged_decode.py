"""A decoding step of the Triton kernels over pages, in the interpreter: as exact as the reference on each request."""

from typing import Any

import pytest
import torch
from cases.paged_steps import STEPS, Step, assert_as_exact_as_the_reference, random_step, run
from cases.triton_marks import interpreted

pytest.importorskip("triton")
from dynattn.modeling.ops.dcmha.pages import without_keys
from dynattn.modeling.ops.dcmha.triton import tuning
from dynattn.modeling.ops.dcmha.triton.paged_decode import decode_pages

pytestmark = [
    # The log-sum-exp of a split without keys.
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log"),
    interpreted,
]


# Of these numbers of programs, how many keys the interpreter handles in a few seconds.
FEW_KEYS = {1: 130, 264: 41}


def cases() -> list[Any]:
    """All steps in few programs and in many."""
    return [
        pytest.param(step, programs, marks=[pytest.mark.slow] if max(step.keys) > few else [])
        for step in STEPS
        for programs, few in FEW_KEYS.items()
    ]


@pytest.mark.parametrize(("step", "programs"), cases(), ids=str)
def test_a_step_over_pages_is_as_exact_as_the_reference_on_each_request(
    step: Step, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged lengths, grouped queries, windows that start within a page, and every kind of composition."""
    monkeypatch.setattr(tuning, "DECODE_PROGRAMS", programs)
    query, pages, stages, tables, alone = random_step(step, torch.float32)
    assert_as_exact_as_the_reference(run(decode_pages, step, query, pages, stages, tables), alone, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_that_of_the_reference(dtype: torch.dtype) -> None:
    step = Step((50, 3), heads=(4, 2), width=32)
    query, pages, stages, tables, alone = random_step(step, dtype)
    assert_as_exact_as_the_reference(run(decode_pages, step, query, pages, stages, tables), alone, dtype)


def test_rows_side_by_side_are_read_in_place() -> None:
    """As vLLM has them: rows of keys and of values are halves of the same memory."""
    step = Step((20, 33), heads=(4, 2))
    query, pages, stages, *_ = random_step(step, torch.float32)
    expected = run(decode_pages, step, query, pages, stages)
    joined = torch.cat([pages.key, pages.value], dim=-1)
    key, value = joined.split(pages.key.shape[-1], dim=-1)
    assert torch.equal(run(decode_pages, step, query, pages._replace(key=key, value=value), stages), expected)


def test_requests_without_keys_get_zeros() -> None:
    step = Step((5, 7))
    query, pages, stages, *_ = random_step(step, torch.float32)
    pages.key_counts[1] = 0
    output = run(decode_pages, step, query, pages, stages)
    assert output[1].abs().max() == 0 and output[0].abs().min() > 0
    pages.key_counts.zero_()
    assert run(decode_pages, step, query, pages, stages).abs().max() == 0


def test_dtypes_that_the_kernels_do_not_know_are_left_to_others() -> None:
    query, pages, stages, *_ = random_step(Step((5, 7)), torch.float64)
    pre, post = (without_keys(stages[name]) for name in ("pre", "post"))
    assert decode_pages(query, pages, pre, post, 1.0, 5) is None
