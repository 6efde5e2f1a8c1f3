"""Handwritten digits: the 1,797 images of 8 x 8 pixels that scikit-learn ships."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...common.errors import UserError
from .images import Images

FOLDS = 5
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


def folds(labels: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`FOLDS` pairs of indices, to train and to test on; every image is tested on once, and classes are balanced."""
    from sklearn.model_selection import StratifiedKFold

    for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(labels, labels):
        yield torch.from_numpy(train), torch.from_numpy(test)
