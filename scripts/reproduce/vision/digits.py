"""Handwritten digits: the 1,797 images of 8 x 8 pixels that scikit-learn ships."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...common.errors import UserError
from .images import Images

FOLDS = 5
# Decides which images are never scored by a measured run; they only serve to choose learning rates.
TUNING_SPLIT = 2**31
# The largest pixel.
WHITE = 16


def load_digits() -> Images:
    """All images, `[N, 1, 8, 8]`.

    Raises:
        UserError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise UserError("the digits come with scikit-learn; install dynattn[studies]") from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8)
    return Images(images * (2 / WHITE) - 1, torch.from_numpy(labels).long())


def splits(labels: Tensor, seed: int, tuning: bool) -> list[tuple[Tensor, Tensor]]:
    """Pairs of indices, to train and to test on: one pair to choose a learning rate, `FOLDS` pairs to measure with.

    One image of `FOLDS` is tested on by tuning runs alone; measured runs neither train nor test on it.
    """
    measured, kept = next(folds(labels, TUNING_SPLIT))
    if tuning:
        return [(measured, kept)]
    return [(measured[train], measured[test]) for train, test in folds(labels[measured], seed)]


def folds(labels: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`FOLDS` pairs of indices, to train and to test on; every image is tested on once, and classes are balanced."""
    from sklearn.model_selection import StratifiedKFold

    for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(labels, labels):
        yield torch.from_numpy(train), torch.from_numpy(test)
