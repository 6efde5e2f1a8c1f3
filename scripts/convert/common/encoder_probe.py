"""The probe of text encoders: a plain batch, and one of its rows padded on the right and on the left."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .decoder_probe import make_probe
from .probe import Answers, Probe, by_head, rounding_between


@torch.no_grad()
def ask(model: PreTrainedModel, ids: Tensor) -> Answers:
    """Runs `model` on token ids `[2, T]` in the three ways.

    Answers are those of real tokens (logits `[B, T, V]`, scores `[B, T]` or `[B, T, C]`, or hidden states), or of whole
    rows (class scores `[B, C]`).
    """
    length = ids.shape[1]
    kept = length - length // 3
    row, padding = ids[1:, :kept], ids[1:, :1].expand(-1, length - kept)
    # Left padding shifts the tokens, which changes nothing but rounding where positions are relative.
    right, left = torch.cat([row, padding], dim=1), torch.cat([padding, row], dim=1)
    real = torch.arange(length)[None] < kept
    ways = {"right": (right, real, slice(None, kept)), "left": (left, real.flip(1), slice(length - kept, None))}
    together, alone = model(ids)[0], model(row)[0]
    for_each_token = together.shape[1] == length
    padded = {}
    for side, (tokens, mask, tokens_of_row) in ways.items():
        answer = model(tokens, attention_mask=mask.long())[0]
        padded[side] = answer[:, tokens_of_row] if for_each_token else answer
    if not for_each_token and getattr(model.config, "classifier_pooling", "cls") == "cls":
        padded["left"] = alone  # whose first token is padding, of which nothing can be said
    return Answers(
        f"{ids.numel()} tokens, plain, right-padded and left-padded",
        (together, alone, *padded.values()),
        rounding_between((alone, padded["right"])),
    )


ENCODER = Probe(by_head, make_probe, ask)
