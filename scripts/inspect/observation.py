"""Runs a model on a text, as it is or with changed compositions, and keeps what its layers compute."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..common.composition_observation import Change, LayerObservation, attention_through


@torch.no_grad()
def observe(model: PreTrainedModel, tokens: Tensor) -> tuple[list[LayerObservation], float]:
    """Returns what each layer computes for `tokens` `[1, T]`, and the mean loss of the tokens after the first."""
    layers: dict[int, LayerObservation] = {}
    with attention_through(model, keep=layers.__setitem__):
        loss = loss_of(model, tokens)
    return [layers[index] for index in sorted(layers)], loss


@torch.no_grad()
def loss_with(model: PreTrainedModel, tokens: Tensor, change: Change) -> float:
    """The mean loss for `tokens` `[1, T]` if all layers compute with changed compositions."""
    with attention_through(model, change=change):
        return loss_of(model, tokens)


def loss_of(model: PreTrainedModel, tokens: Tensor) -> float:
    """The mean loss in nats of the tokens `[1, T]` after the first, each predicted from those before it."""
    logits = model(tokens, use_cache=False).logits  # [1, T, V]
    return float(cross_entropy(logits[0, :-1].float(), tokens[0, 1:]))
