"""Log-likelihoods of whole texts that a model with memory reads segment by segment."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from dynattn.modeling.caches.names import named_cache
from dynattn.modeling.ops.chunked_loss import IGNORED

from ..common.checkpoint_loading import refuse_nan
from ..common.parallel_streams import ParallelStreams


def roll_texts(model: PreTrainedModel, texts: Sequence[list[int]], *, segment: int, batch_size: int) -> list[float]:
    """The log-likelihood of each text but its first token; each token is scored once, given those before it.

    Args:
        model: one whose cache is a memory.
        texts: token ids, at least one each; texts of similar length share a batch.
        segment: tokens of a segment.

    Raises:
        UserError: the model's logits are NaN.
    """
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    totals = [0.0] * len(texts)
    for begin in range(0, len(texts), batch_size):
        chosen = order[begin : begin + batch_size]
        batch = [torch.tensor(texts[index], device=model.device) for index in chosen]
        for index, total in zip(chosen, _roll_batch(model, batch, segment).tolist(), strict=True):
            totals[index] = total
    return totals


@torch.no_grad()
def _roll_batch(model: PreTrainedModel, texts: Sequence[Tensor], segment: int) -> Tensor:
    """Log-likelihoods `[B]`. Padding is at the end of texts, so that no token that is scored has it in its memory."""
    inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
    targets = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=IGNORED)
    memory = DynamicCache(config=model.config)
    total = torch.zeros(len(texts), dtype=torch.float64)
    for part, wanted in ParallelStreams(inputs, targets, segment):
        logits = model(part, **named_cache(memory)).logits.float()
        refuse_nan(logits)
        nats = F.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")
        total -= nats.double().sum(1).cpu()
    return total
