"""The metric of the built-in held-out text, against numbers that are computed by hand."""

import math
from pathlib import Path

import evaluate
import pytest

from dynattn.scripts.evaluate.heldout import METRIC


def test_the_metric_is_what_one_computes_by_hand(tmp_path: Path) -> None:
    """Four tokens of 1, 2, 3 and 1 bits, seven in all, make up a text of 14 bytes; the third was not expected."""
    probabilities = (1 / 2, 1 / 4, 1 / 8, 1 / 2)
    metric = evaluate.load(str(METRIC), cache_dir=str(tmp_path), keep_in_memory=True)
    scores = metric.compute(
        predictions=[5, 6, 7, 8], references=[5, 6, 9, 8], log_probs=[math.log(p) for p in probabilities], bytes=14
    )
    assert scores == {
        "accuracy": 0.75,
        "perplexity": pytest.approx(2 ** (7 / 4)),
        "bits_per_byte": pytest.approx(0.5),
    }
