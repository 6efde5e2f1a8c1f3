"""Labels of classifiers that fit or are refused, and their losses."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from dynattn import (
    DCModernBertConfig,
    DCModernBertForSequenceClassification,
    DCViTConfig,
    DCViTForImageClassification,
)
from dynattn.modeling.common.losses import check_class_labels

ROWS = 4


def problem(kind: str | None, count: int) -> tuple[Any, Tensor]:
    """What the check reads of a configuration, and logits `[ROWS, count]`."""
    return SimpleNamespace(problem_type=kind, num_labels=count), torch.randn(ROWS, count)


CLASSES = torch.tensor([0, 2, 1, -100])


@pytest.mark.parametrize(
    ("kind", "count", "labels"),
    [
        (None, 3, CLASSES),
        (None, 3, CLASSES[:, None]),
        (None, 3, torch.rand(ROWS, 3)),
        (None, 1, torch.rand(ROWS)),
        ("single_label_classification", 3, CLASSES),
        ("single_label_classification", 1, torch.zeros(ROWS, dtype=torch.long)),
        ("multi_label_classification", 3, torch.rand(ROWS, 3)),
        ("regression", 1, 9 * torch.randn(ROWS, 1)),
        ("regression", 2, torch.rand(ROWS, 2)),
    ],
)
def test_labels_that_the_loss_takes_are_accepted(kind: str | None, count: int, labels: Tensor) -> None:
    config, logits = problem(kind, count)
    check_class_labels(labels, logits, config)
    assert ForSequenceClassificationLoss(labels, logits, config).isfinite()


@pytest.mark.parametrize(
    ("kind", "count", "labels", "message"),
    [
        (None, 3, CLASSES[:3], "labels of shape (3,) do not fit single_label_classification of 4 rows"),
        (None, 3, torch.rand(ROWS), "with num_labels (3); give (4, 3), or set problem_type"),
        ("regression", 2, torch.rand(ROWS, 1), "labels of shape (4, 1) do not fit regression of 4 rows"),
        ("regression", 4, torch.rand(ROWS), "give (4, 4), or set problem_type"),
        ("multi_label_classification", 1, torch.rand(ROWS), "give (4, 1), or set problem_type"),
        (
            "single_label_classification",
            2,
            torch.tensor([0, 1, 7, 1]),
            "labels hold the class 7, but must be at least 0",
        ),
        (None, 2, torch.tensor([0, 1, -1, 1]), "labels hold the class -1"),
        (None, 3, torch.tensor([0, 1, 3, 2]), "labels hold the class 3, but must be at least 0 and smaller"),
    ],
    ids=lambda value: "" if isinstance(value, Tensor) else str(value),
)
def test_labels_that_do_not_fit_are_refused(kind: str | None, count: int, labels: Tensor, message: str) -> None:
    config, logits = problem(kind, count)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_class_labels(labels, logits, config)


def tiny_classifier(kind: str, problem_type: str) -> tuple[Any, Tensor]:
    """A classifier of texts or of images for `ROWS` labels of 3 numbers each or of 3 classes, and its input."""
    options: dict[str, Any] = {"num_labels": 3, "problem_type": problem_type, "num_hidden_layers": 1}
    if kind == "texts":
        config = DCModernBertConfig.from_size("tiny", **options)
        return DCModernBertForSequenceClassification(config).eval(), torch.randint(3, 2048, (ROWS, 5))
    config = DCViTConfig.from_size("tiny", **options)
    return DCViTForImageClassification(config).eval(), torch.randn(ROWS, 3, 16, 16)


@pytest.mark.parametrize(
    ("problem_type", "labels"),
    [
        ("single_label_classification", torch.tensor([0, 2, 1, -100])),
        ("multi_label_classification", torch.rand(ROWS, 3)),
        ("regression", torch.randn(ROWS, 3)),
    ],
)
@pytest.mark.parametrize("kind", ["texts", "images"])
def test_losses_of_parts_of_a_batch_add_up_to_its_loss(kind: str, problem_type: str, labels: Tensor) -> None:
    """A Trainer that accumulates gradients adds such losses, and does not divide them by the number of parts."""
    model, inputs = tiny_classifier(kind, problem_type)
    if kind == "images":
        torch.nn.init.normal_(model.classifier.weight)  # new classifiers of images give zeros
    whole = model(inputs, labels=labels).loss
    items = labels.ne(-100).sum()  # as the Trainer counts them
    parts = [model(inputs[rows], labels=labels[rows], num_items_in_batch=items).loss for rows in ([0], [1, 2, 3])]
    torch.testing.assert_close(sum(parts), whole)
