"""A decoding step over a paged cache in C code: as exact as the reference op on the same keys, wherever rows lie."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.composed_op import DYNAMIC
from cases.paged_steps import STEPS, Step, assert_as_exact_as_the_reference, random_step, run

from dynattn.modeling.ops import c_compiler
from dynattn.modeling.ops.dcmha.chunked.paged_decode_native import attend_to_pages
from dynattn.modeling.ops.dcmha.pages import without_keys

pytestmark = pytest.mark.skipif(c_compiler.find_compiler() is None, reason="there is no C compiler")
DTYPES = [torch.float32, torch.bfloat16]


def each(steps: list[Step]) -> list[Any]:
    """Every third of the steps, and the others for slow runs: each of them is compiled anew."""
    return [
        pytest.param(step, marks=[pytest.mark.slow] if index % 3 else [], id=str(step))
        for index, step in enumerate(steps)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", each(STEPS))
def test_a_step_over_pages_is_as_exact_as_the_reference_on_each_request(step: Step, dtype: torch.dtype) -> None:
    query, pages, stages, tables, alone = random_step(step, dtype)
    assert_as_exact_as_the_reference(run(attend_to_pages, step, query, pages, stages, tables), alone, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_threads_nor_on_other_requests(dtype: torch.dtype, threads: None) -> None:
    step = Step((1100, 3, 200), heads=(8, 4))
    query, pages, stages, *_ = random_step(step, dtype)
    outputs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outputs.append(run(attend_to_pages, step, query, pages, stages))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    last = pages._replace(**{name: getattr(pages, name)[2:] for name in ("table_starts", "key_counts")})
    own = {name: stage.map(lambda factor: factor if factor.ndim == 2 else factor[2:]) for name, stage in stages.items()}
    assert torch.equal(run(attend_to_pages, step, query[2:], last, own), outputs[0][2:])


def test_a_request_without_keys_gets_zeros() -> None:
    step = Step((5, 7))
    query, pages, stages, *_ = random_step(step, torch.float32)
    pages.key_counts[1] = 0
    output = run(attend_to_pages, step, query, pages, stages)
    assert output[1].abs().max() == 0 and output[0].abs().min() > 0


def test_no_requests_get_no_outputs() -> None:
    step = Step((5, 7))
    query, pages, stages, *_ = random_step(step, torch.float32)
    none = pages._replace(**{name: getattr(pages, name)[:0] for name in ("table", "table_starts", "key_counts")})
    own = {name: stage.map(lambda factor: factor if factor.ndim == 2 else factor[:0]) for name, stage in stages.items()}
    assert run(attend_to_pages, step, query[:0], none, own).shape == (0, 1, 4, 8)


@pytest.mark.parametrize("change", ["float64", "gradients", "other groups"])
def test_what_c_code_cannot_do_is_left_to_others(change: str) -> None:
    step = Step((5, 7))
    query, pages, stages, *_ = random_step(step, torch.float32)
    post = without_keys(stages["post"])
    if change == "float64":
        query = query.double()
    if change == "gradients":
        query.requires_grad_()
    if change == "other groups":
        post = replace(post, groups=2)
    assert attend_to_pages(query, pages, without_keys(stages["pre"]), post, 1.0, step.key_terms) is None


def test_terms_that_do_not_fit_on_the_stack_are_left_to_others() -> None:
    step = Step((5,), heads=(256, 256), rank=64, terms=DYNAMIC)
    query, pages, stages, *_ = random_step(step, torch.float32)
    pre, post = (without_keys(stages[name]) for name in ("pre", "post"))
    assert attend_to_pages(query, pages, pre, post, 1.0, step.key_terms) is None


def test_c_code_is_left_out_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step((5, 7))
    query, pages, stages, *_ = random_step(step, torch.float32)
    pre, post = (without_keys(stages[name]) for name in ("pre", "post"))
    assert attend_to_pages(query, pages, pre, post, 1.0, step.key_terms) is not None
    monkeypatch.setenv("DYNATTN_COMPILE", "0")
    assert attend_to_pages(query, pages, pre, post, 1.0, step.key_terms) is None
