"""The held-out part of the built-in corpus: as a dataset for lm-eval, and scored directly as a check on lm-eval.

lm-eval scores windows of different lengths in one batch, padded on the right without an attention mask. The function
`score_documents` computes the same scores without padding and shares no code with it. If the two disagree, padding or
later tokens influence earlier ones in the model, and its lm-eval scores mean nothing.
"""

import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import evaluate
from datasets import Dataset, DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.builtin_corpus import builtin_documents
from .windows import encode_document, read

METRIC = Path(__file__).parent / "metrics" / "next_token.py"


def load_dataset(**_: object) -> DatasetDict:
    """The held-out documents as the split "test" with a column "text"; lm-eval calls it from the YAML."""
    return DatasetDict(test=Dataset.from_dict({"text": builtin_documents("validation")}))


def score_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    *,
    max_length: int,
    carry_memory: bool = False,
) -> dict[str, float]:
    """Next-token accuracy, token perplexity and bits per byte of `documents`, in windows of up to `max_length` tokens.

    The windows are those of lm-eval: each predicts the next `max_length` tokens, and the last one, which predicts
    fewer, begins earlier to be as long. With `carry_memory` no windows overlap, and the model's cache carries its
    memory along.
    """
    with tempfile.TemporaryDirectory() as cache:
        metric = evaluate.load(str(METRIC), cache_dir=cache, experiment_id=uuid.uuid4().hex, keep_in_memory=True)
        for document in documents:
            tokens = encode_document(tokenizer, document)
            for part in read(model, tokens, max_length=max_length, stride=max_length, carry_memory=carry_memory):
                metric.add_batch(predictions=part.predictions, references=part.targets, log_probs=part.log_probs)
        return metric.compute(bytes=sum(len(document.encode()) for document in documents))
