"""A metric for the `evaluate` library: how well a language model predicts a text, token by token and byte by byte."""

import math

import datasets
import evaluate

DESCRIPTION = "Next-token accuracy, token perplexity and bits per byte of a scored text."
INPUTS = """
Args:
    predictions: the most probable token id at each position.
    references: the true token ids.
    log_probs: natural logarithms of the probabilities that the true tokens got.
    bytes: length of the whole text in UTF-8 bytes.
Returns:
    accuracy: share of positions where prediction and reference agree.
    perplexity: exponential of the mean negative log-probability of a token.
    bits_per_byte: summed negative log-probabilities in bits, over `bytes`.
"""


@evaluate.utils.file_utils.add_start_docstrings(DESCRIPTION, INPUTS)
class NextToken(evaluate.Metric):
    """Load it with `evaluate.load(<path of this file>)`; it needs no network."""

    def _info(self) -> evaluate.MetricInfo:
        columns = {"predictions": "int64", "references": "int64", "log_probs": "float64"}
        features = datasets.Features({name: datasets.Value(dtype) for name, dtype in columns.items()})
        return evaluate.MetricInfo(description=DESCRIPTION, citation="", inputs_description=INPUTS, features=features)

    def _compute(
        self, predictions: list[int], references: list[int], log_probs: list[float], bytes: int
    ) -> dict[str, float]:
        nats = -math.fsum(log_probs)
        hits = sum(guess == truth for guess, truth in zip(predictions, references, strict=True))
        return {
            "accuracy": hits / len(references),
            "perplexity": math.exp(nats / len(references)),
            "bits_per_byte": nats / math.log(2) / bytes,
        }
