"""The probe of text encoders: a plain batch, and one of its rows padded on the right and on the left."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...common.rounding import largest
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
    together, alone = _answer(model, ids), _answer(model, row)
    for_each_token = together.shape[1] == length
    padded = {}
    for side, (tokens, mask, tokens_of_row) in ways.items():
        answer = _answer(model, tokens, mask.long())
        padded[side] = answer[:, tokens_of_row] if for_each_token else answer
    # Padding on the right often changes no bit, but shifted tokens are rotated by other angles, which rounds anew.
    noise = rounding_between((alone, padded["right"]), (alone, padded["left"]))
    if not for_each_token and getattr(model.config, "classifier_pooling", "cls") == "cls":
        padded["left"] = alone  # whose first token is padding, of which nothing can be said
        share = relative_rounding(model, row, *ways["left"])
        noise = max(rounding_between((alone, padded["right"])), share * max(1, largest(alone)))
    question = f"{ids.numel()} tokens, plain, right-padded and left-padded"
    return Answers(question, (together, alone, *padded.values()), noise)


def _answer(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """What `model` says of token ids `[B, T]`, which are the only choices of their rows if it chooses."""
    if not type(model).__name__.endswith("ForMultipleChoice"):
        return model(ids, attention_mask=mask)[0]
    # ModernBERT's own fails without a mask if it takes the mean.
    return model(ids[:, None], attention_mask=(torch.ones_like(ids) if mask is None else mask)[:, None])[0]


def relative_rounding(model: PreTrainedModel, row: Tensor, padded: Tensor, mask: Tensor, tokens_of_row: slice) -> float:
    """The rounding error of the hidden states of `row` `[1, T]`, as a share of the largest of them.

    It is how far they move if padding shifts the tokens: `padded`, with the `mask` of tokens that are none, `[1, S]`.
    """
    alone = model.base_model(row)[0]
    shifted = model.base_model(padded, attention_mask=mask.long())[0][:, tokens_of_row]
    return rounding_between((alone, shifted)) / max(1, largest(alone))


ENCODER = Probe(by_head, make_probe, ask)
