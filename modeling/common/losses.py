"""The losses of classifiers, checks of labels, and the tokens that a loss over a vocabulary reads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.loss.loss_utils import fixed_cross_entropy

from ..ops.chunked_loss import IGNORED
from ..ops.dtypes import at_least_float32
from ..ops.readable import is_readable


def class_loss(
    loss_function: Callable[..., Tensor],
    labels: Tensor,
    logits: Tensor,
    config: PreTrainedConfig,
    *,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> Tensor:
    """The loss `[]` of class scores `[B, C]`, after `check_class_labels`.

    Args:
        loss_function: the model's, with the arguments of Transformers' `ForSequenceClassificationLoss`.
        num_items_in_batch: number of labels in the whole batch of which this one is a part. The loss is the sum over
            labels divided by it; by default it is their mean.
    """
    check_class_labels(labels, logits, config)
    if num_items_in_batch is None:
        return loss_function(labels, logits, config, **kwargs)
    if problem_type_of(labels, config) == "single_label_classification":
        return loss_function(labels, logits, config, num_items_in_batch=num_items_in_batch, **kwargs)
    # Transformers' losses of other problems are means in any case. A Trainer that accumulates gradients adds up what it
    # gets, so that each mean would count as much as that of the whole batch.
    return loss_function(labels, logits, config, **kwargs) * (labels.numel() / num_items_in_batch)


def choice_loss(labels: Tensor, scores: Tensor, num_items_in_batch: Any) -> Tensor:
    """The loss `[]` of scores `[B, C]` of the choices in each row; `labels` `[B]` are the indices of the right ones.

    Args:
        num_items_in_batch: number of labels in the whole batch, as in `class_loss`; None for those given.

    Raises:
        ValueError: labels have another shape, or, on a CPU, are no indices of choices.
    """
    rows, count = scores.shape
    if tuple(labels.shape) != (rows,):
        raise ValueError(f"labels of shape {tuple(labels.shape)} must be [{rows}], the number of a choice for each row")
    if (wrong := _first_outside(labels, count)) is not None:
        raise ValueError(f"labels hold the choice {wrong}, but each row has {count}; number them from 0")
    return fixed_cross_entropy(scores.to(at_least_float32(scores.dtype)), labels, num_items_in_batch, IGNORED)


def check_class_labels(labels: Tensor, logits: Tensor, config: PreTrainedConfig) -> None:
    """Raises ValueError unless labels fit logits `[B, C]` and the kind of problem for which there is a loss.

    Classes, and values of a regression with a single output, are `[B]` or `[B, 1]`; all else is `[B, C]`. The range of
    classes is checked on a CPU only, because reading them from another device would make every step wait for it.
    """
    kind, (rows, count) = problem_type_of(labels, config), logits.shape
    is_single = kind == "single_label_classification"
    shapes = ((rows,), (rows, 1)) if is_single or (kind == "regression" and count == 1) else ((rows, count),)
    if tuple(labels.shape) not in shapes:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit {kind} of {rows} rows with num_labels ({count}); give "
            f"{' or '.join(map(str, shapes))}, or set problem_type"
        )
    if is_single:
        _check_range(labels, count)


def check_token_labels(labels: Tensor, outputs: Tensor) -> None:
    """Raises ValueError unless labels are `[B, T]` for outputs `[B, T, ...]`."""
    if labels.shape != outputs.shape[:2]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit {outputs.shape[0]} rows of {outputs.shape[1]} tokens; "
            f"give one label for each token, {IGNORED} where none counts, and all logits (logits_to_keep=0)"
        )


def check_skip_logits(skip_logits: bool | None, labels: Tensor | None) -> None:
    """Raises ValueError if logits are skipped and there are no labels for the loss."""
    if skip_logits and labels is None:
        raise ValueError("skip_logits=True leaves nothing but the loss, which needs labels; give labels")


def read_by_loss(hidden_states: Tensor, labels: Tensor, skip_logits: bool | None) -> tuple[Tensor, Tensor]:
    """The hidden states and labels of a loss that compares logits and labels place by place.

    With `skip_logits` these are only the `N` targets, so that no logits are computed elsewhere.

    Args:
        hidden_states: `[B, T, E]`.
        labels: `[B, T]`, -100 where no loss is wanted.

    Returns:
        Both arguments as they are, or, with `skip_logits`, `[N, E]` and `[N]`.

    Raises:
        ValueError: labels have another shape than the tokens.
    """
    check_token_labels(labels, hidden_states)
    if not skip_logits:
        return hidden_states, labels
    is_target = labels != IGNORED
    return hidden_states[is_target], labels[is_target]


def problem_type_of(labels: Tensor, config: PreTrainedConfig) -> str:
    """The configuration's `problem_type`; if it has none, the one that Transformers' loss reads from the labels."""
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return "regression"
    return "single_label_classification" if labels.dtype in (torch.long, torch.int) else "multi_label_classification"


def _check_range(labels: Tensor, count: int) -> None:
    """Raises ValueError if classes on a CPU are not among `count`; -100 stands for none."""
    if (wrong := _first_outside(labels, count)) is not None:
        raise ValueError(
            f"labels hold the class {wrong}, but must be at least 0 and smaller than num_labels ({count}), or "
            f"{IGNORED} where none counts; make a model with more labels, or number the classes from 0"
        )


def _first_outside(labels: Tensor, count: int) -> int | None:
    """The first label that is neither -100 nor among `count`; None if there is none, or if labels are not on a CPU."""
    if labels.device.type != "cpu" or not is_readable(labels):
        return None
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= count))]
    return int(wrong[0]) if len(wrong) else None
