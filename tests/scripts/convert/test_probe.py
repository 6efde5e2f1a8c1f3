"""Comparing what two models answer: shapes, logits, and generated tokens, of which one may give fewer."""

import dataclasses

import pytest
import torch

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.convert.common.probe import Answers, compare_answers

LOGITS = torch.randn(2, 3)
ANSWERS = Answers("6 tokens", (LOGITS,), 1e-7, generated=torch.tensor([[2, 5, 7]]))


def test_models_are_equal_that_answer_and_generate_alike() -> None:
    assert compare_answers(ANSWERS, ANSWERS).equal
    for tokens in ([[2, 5, 8]], [[2, 5]]):
        comparison = compare_answers(ANSWERS, dataclasses.replace(ANSWERS, generated=torch.tensor(tokens)))
        assert not comparison.equal and comparison.difference == 0
        assert comparison.describe().startswith(
            "6 tokens: logits are equal bit for bit, but other tokens are generated"
        )


def test_logits_that_are_not_finite_are_never_equal() -> None:
    assert not compare_answers(ANSWERS, dataclasses.replace(ANSWERS, ways=(LOGITS * float("nan"),))).equal


def test_answers_of_other_shapes_are_refused() -> None:
    with pytest.raises(UserError, match=r"answers of shapes \(2, 3\) and \(2, 2\) cannot be compared"):
        compare_answers(ANSWERS, dataclasses.replace(ANSWERS, ways=(LOGITS[:, :2],)))
