"""Probes: fixed inputs on which models are compared, run in several ways.

The outputs are called answers: logits, or hidden states of a model without a head. Here is what all probes share, and
the comparison of two models' answers; `decoder_probe`, `encoder_probe`, `image_probe` and `translation_probe` are those
of each kind of model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...common.errors import UserError
from ...common.rounding import NOISE_MULTIPLE, largest, smallest_error

# A check makes about three passes, each of two operations per parameter and token.
AFFORDABLE_OPERATIONS, OPERATIONS_PER_PARAMETER = 2e13, 6
# Rounding explains no more than this share of the largest answer. Where ways of running a model differ by more, it does
# not compute the same in all of them: rotary angles may depend on the longest row, or the memory on the segments.
LARGEST_NOISE = 1e-3
# Tokens of the shortest probe, and of one for models without a sliding window.
SHORTEST_PROBE, PROBE_WITHOUT_WINDOW = 16, 64
# Elements of the maps of all heads, of which the eager attention of a layer holds several copies in float32.
LARGEST_MAP = 2**27
# Official formulas are computed in float64, in which the maps of one text take the memory of so many in float32.
FLOAT64_MAPS = 2


@dataclass(frozen=True)
class Answers:
    """The outputs of one model on one probe.

    Attributes:
        question: the probe and the ways of running it, in words for the report.
        ways: logits or hidden states `[...]` of each way of running the model (plain, padded, from a cache).
        noise: the largest difference between ways that should agree, which is the model's rounding error.
        loss: the model's loss on the probe, if it has one.
        generated: the tokens `[2, T]` that it generates, if it was run so; models may stop at different lengths `T`.
    """

    question: str
    ways: tuple[Tensor, ...]
    noise: float
    loss: float | None = None
    generated: Tensor | None = None


class Probe(NamedTuple):
    """How models of one kind (decoders, encoders, ...) are run for a comparison.

    Attributes:
        auto_class: returns the name of the Auto class for the class names in `architectures`.
        make: returns an input that models of all given configurations accept; the folder may hold a tokenizer for it.
        ask: runs a model on that input in several ways.
        generates: whether models of this kind generate, and so have generation settings.
        unread: how the names of weights begin on which no answer depends, so that a checkpoint may lack them.
    """

    auto_class: Callable[[list[str]], str]
    make: Callable[..., Any]
    ask: Callable[[PreTrainedModel, Any], Answers]
    generates: bool = False
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The comparison of two models on one probe.

    Attributes:
        question: the probe and the ways of running it, in words for the report.
        difference: the largest difference of logits over all ways.
        noise: the difference that rounding alone explains.
        losses: of both models.
        generate_alike: whether both generate the same tokens; True if they were not asked to generate.
    """

    question: str
    difference: float
    noise: float
    losses: tuple[float | None, float | None]
    generate_alike: bool = True

    @property
    def limit(self) -> float:
        """The largest difference that counts as rounding."""
        return NOISE_MULTIPLE * self.noise

    @property
    def equal(self) -> bool:
        """Whether rounding explains the difference, and generated tokens are the same."""
        return self.generate_alike and self.difference <= self.limit

    def describe(self) -> str:
        """How far the logits are from each other, and whether generated tokens differ, in one line."""
        logits = f"differ by {self.difference:.1e} (float32 rounding {self.noise:.1e}, limit {self.limit:.1e})"
        if self.difference == 0:
            logits = "are equal bit for bit"
        generated = "" if self.generate_alike else ", but other tokens are generated; compare the generation settings"
        return f"{self.question}: logits {logits}{generated}"

    def describe_effect(self) -> str:
        """What the second model's difference does to loss and logits, in one line."""
        before, after = self.losses
        asked = self.question.partition(",")[0]
        if before is None or after is None:
            return f"on {asked} logits change by up to {self.difference:.1e}"
        return (
            f"on {asked} the loss changes from {before:.5f} to {after:.5f} ({after - before:+.1e}), "
            f"logits by up to {self.difference:.1e}"
        )


def compare_answers(first: Answers, second: Answers) -> Comparison:
    """Compares two models' answers to the same probe.

    Raises:
        UserError: the first model's logits are not finite, or the second model's have another shape.
    """
    if not first.ways[0].isfinite().all():
        raise UserError("the first model's logits are not finite; its weights are damaged")
    pairs = list(zip(first.ways, second.ways, strict=True))
    for one, other in pairs:
        if one.shape != other.shape:
            raise UserError(f"answers of shapes {tuple(one.shape)} and {tuple(other.shape)} cannot be compared")
    difference = torch.tensor([largest(one - other) for one, other in pairs]).max().item()  # NaN if there is one
    generated = [answers.generated for answers in (first, second) if answers.generated is not None]
    alike = len(generated) < 2 or torch.equal(*generated)
    noise = min(first.noise, LARGEST_NOISE * largest(first.ways[0]))
    return Comparison(first.question, difference, noise, (first.loss, second.loss), alike)


def rounding_between(*pairs: tuple[Tensor, Tensor]) -> float:
    """The largest difference of answers `[...]` that should be equal; at least one float32 rounding of the first.

    Pairs that differ by more than `LARGEST_NOISE` are not counted: the model does not compute the same in both ways.
    Answers below 1 count as 1: they are sums of larger terms that cancel, as a single class score is.
    """
    floor = max(smallest_error(pairs[0][0]), torch.finfo(torch.float32).eps)
    differences = [largest(one - other) for one, other in pairs]
    return max([floor, *(one for one in differences if one <= LARGEST_NOISE * largest(pairs[0][0]))])


def affordable_tokens(parameters: int, segments: int = 1) -> int:
    """How many tokens each of `segments` probes of a model may have so that the comparison stays bearable."""
    return max(SHORTEST_PROBE, int(AFFORDABLE_OPERATIONS / (OPERATIONS_PER_PARAMETER * parameters * segments)))


def longest_within_memory(rows: int, heads: int) -> int:
    """How many tokens each of `rows` texts may have so that the attention maps of `heads` heads stay in memory."""
    return math.isqrt(LARGEST_MAP // (rows * heads))


def random_ids(vocabulary: int, *shape: int, generator: torch.Generator | None = None) -> Tensor:
    """Token ids `[*shape]`, the same in every run; `generator` continues an earlier sequence."""
    return torch.randint(vocabulary, shape, generator=generator or torch.Generator().manual_seed(0))


def by_head(architectures: list[str]) -> str:
    """The Auto class of a model that may have any head or none, by the name of its class."""
    _, _, head = (architectures or [""])[0].partition("For")
    return f"AutoModelFor{head}" if head else "AutoModel"
