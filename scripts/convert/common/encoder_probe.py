"""The probe of text encoders: a plain batch, and one of its rows padded on the right and on the left."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .decoder_probe import make_probe
from .probe import Answers, Probe, by_head, rounding_between


@torch.no_grad()
def ask(model: PreTrainedModel, ids: Tensor) -> Answers:
    """Runs `model` on token ids `[2, T]` in the three ways; answers are those of real tokens, or of whole rows."""
    length = ids.shape[1]
    kept = length - length // 3
    row, padding = ids[1:, :kept], ids[1:, :1].expand(-1, length - kept)
    # Left padding shifts the tokens, which changes nothing but rounding where positions are relative.
    right, left = torch.cat([row, padding], dim=1), torch.cat([padding, row], dim=1)
    real = torch.arange(length)[None] < kept
    ways = {"right": (right, real, slice(None, kept)), "left": (left, real.flip(1), slice(length - kept, None))}
    together, alone = _answer(model, ids), _answer(model, row)
    for_each_token = together.shape[1] == length
    padded = {}
    for side, (tokens, mask, tokens_of_row) in ways.items():
        answer = _answer(model, tokens, attention_mask=mask.long())
        padded[side] = answer[:, tokens_of_row] if for_each_token else answer
    if not for_each_token and getattr(model.config, "classifier_pooling", "cls") == "cls":
        padded["left"] = alone  # whose first token is padding, of which nothing can be said
    return Answers(
        f"{ids.numel()} tokens, plain, right-padded and left-padded",
        (together, alone, *padded.values()),
        rounding_between((alone, padded["right"])),
    )


def _answer(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    """Logits `[B, T, V]`, scores of tokens `[B, T]`, class scores `[B, C]` or `[B, T, C]`, or hidden states."""
    return model(ids, **options)[0]


ENCODER = Probe(by_head, make_probe, ask)
