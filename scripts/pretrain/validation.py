"""Loss, perplexity and bits per byte of held-out text."""

import math
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import default_collate

from ..common.segment_memory import CarriedMemory
from ..common.token_streams import IGNORE_INDEX
from .data.sequences import Sequences
from .engines.interface import Engine
from .model import loss_options


@dataclass(frozen=True)
class Validation:
    """Measured on all held-out text.

    Attributes:
        loss: nats per target token. Targets are all tokens of the text and the end token of each document.
        perplexity: exp(loss).
        bits_per_byte: the nats of all targets, end tokens included, divided by ln 2 and by the UTF-8 bytes of the text,
            end tokens excluded. It does not depend on the tokenizer's vocabulary.
    """

    loss: float
    perplexity: float
    bits_per_byte: float

    @classmethod
    def from_sums(cls, nats: float, targets: int, text_bytes: int) -> "Validation":
        """From the total negative log-likelihood of `targets` tokens that spell `text_bytes` bytes of text."""
        loss = nats / targets
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return cls(loss, perplexity, nats / math.log(2) / text_bytes)


@torch.no_grad()
def validate(
    engine: Engine, model: nn.Module, sequences: Sequences, batch_size: int, memory: CarriedMemory
) -> Validation:
    """Scores every target once; the model is left in the mode it was in.

    Args:
        memory: an empty memory, which reads the held-out text.
    """
    accelerator = engine.accelerator
    unwrapped, scorer = accelerator.unwrap_model(model), engine.scorer(model)
    was_training = unwrapped.training
    unwrapped.eval()
    options = {"num_items_in_batch": torch.ones((), device=accelerator.device), **loss_options(unwrapped)}
    nats, targets = 0.0, 0
    share = list(sequences.share(accelerator.process_index, accelerator.num_processes, batch_size))
    rounds = max(gather_object([len(share)])) if engine.is_collective else len(share)
    for indices in share:
        batch = default_collate([sequences[index] for index in indices])
        targets += count_targets(batch["labels"], batch.get("shift_labels"))
        nats += memory.loss(scorer, {**to_device(batch, accelerator.device), **options}).item()
    # Processes whose share is smaller run along, or the others would wait for them.
    for _ in range(len(share), rounds):
        batch = to_device(default_collate([sequences[0]]), accelerator.device)
        memory.empty_copy().loss(scorer, {**batch, **options})
    engine.end_scoring(unwrapped)
    unwrapped.train(was_training)
    sums = gather_object([(nats, targets)])
    return Validation.from_sums(sum(n for n, _ in sums), sum(t for _, t in sums), sequences.text_bytes)


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch of `[B, T]` on a device."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def count_targets(labels: Tensor, shift_labels: Tensor | None = None) -> int:
    """Number of targets in `shift_labels` `[B, T]`, or, without those, in `labels` `[B, T]` after a shift by one."""
    targets = labels[:, 1:] if shift_labels is None else shift_labels
    return int((targets != IGNORE_INDEX).sum())
