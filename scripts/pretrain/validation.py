"""Validation: loss, perplexity and bits per byte of held-out text, or the loss of its masked tokens."""

import math
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object, send_to_device
from torch import nn
from torch.utils.data import default_collate

from .carried_memory import CarriedMemory
from .data.objectives import CausalLM, Examples
from .engines.interface import Engine
from .losses import loss_options, share_of_loss, without_added_losses


@dataclass(frozen=True)
class Validation:
    """What is measured on all held-out text.

    Attributes:
        loss: nats per target token. Targets are all tokens of the text and the end token of each document; in masked
            language modeling, the masked tokens, which are the same in each validation.
        perplexity: exp(loss).
        bits_per_byte: the nats of all targets, end tokens included, divided by ln 2 and by the UTF-8 bytes of the text,
            end tokens excluded. It does not depend on the tokenizer's vocabulary. None in masked language modeling,
            whose targets are a sample of the text, and where the targets spell no text, as in empty answers.
        targets: their number.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    targets: int

    @classmethod
    def from_sums(cls, nats: float, targets: int, text_bytes: int | None) -> "Validation":
        """Computes all from the total negative log-likelihood `nats` of all targets.

        Args:
            targets: number of targets.
            text_bytes: bytes of the text that they spell; None if they are only a sample of it.
        """
        loss = nats / targets
        perplexity = math.exp(loss) if loss < 700 else math.inf
        bits_per_byte = nats / math.log(2) / text_bytes if text_bytes else None
        return cls(loss, perplexity, bits_per_byte, targets)


@torch.no_grad()
def validate(
    engine: Engine, model: nn.Module, examples: Examples, batch_size: int, memory: CarriedMemory
) -> Validation:
    """Scores every target once; the model is left in the mode it was in.

    Args:
        memory: an empty memory, which is carried along the held-out text.
    """
    accelerator, sequences, objective = engine.accelerator, examples.sequences, examples.objective
    unwrapped, scorer = accelerator.unwrap_model(model), engine.scorer(model)
    was_training = unwrapped.training
    unwrapped.eval()
    one = torch.ones((), device=accelerator.device)
    options = {"num_items_in_batch": one, **loss_options(unwrapped)}
    nats, targets = 0.0, 0
    groups = engine.groups
    share = list(sequences.share(groups.index, groups.number, batch_size))
    rounds = max(gather_object([len(share)])) if engine.is_collective else len(share)
    with without_added_losses(unwrapped):
        for indices in share:
            batch = groups.part(default_collate([examples[index, index] for index in indices]))
            targets += (count := objective.count(batch))
            placed = send_to_device(batch, accelerator.device, non_blocking=True)
            nats += share_of_loss(unwrapped, memory.loss(scorer, {**placed, **options}), count, one).item()
    # A collective engine needs all processes in each forward pass, so those with fewer batches repeat one.
    for _ in range(len(share), rounds):
        batch = send_to_device(groups.part(default_collate([examples[0, 0]])), accelerator.device)
        memory.empty_copy().loss(scorer, {**batch, **options})
    engine.end_scoring(unwrapped)
    unwrapped.train(was_training)
    sums = gather_object([(nats, targets)])
    text_bytes = sequences.text_bytes if isinstance(objective, CausalLM) else None
    return Validation.from_sums(sum(n for n, _ in sums), sum(t for _, t in sums), text_bytes)
