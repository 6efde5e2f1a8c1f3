"""Comparing the logits of a converted model with those that the official formulas give."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.errors import UserError

# A model's logits may differ from the exact ones by this many times the float32 rounding error of the formulas.
NOISE_MULTIPLE = 16
# A check makes about three passes, each of two operations per parameter and token.
AFFORDABLE_OPERATIONS, OPERATIONS_PER_PARAMETER = 2e13, 6
# Tokens of the shortest probe, and of one for models without a sliding window.
SHORTEST_PROBE, PROBE_WITHOUT_WINDOW = 16, 64


@dataclass(frozen=True)
class LogitsCheck:
    """The largest difference of logits on a probe, and what rounding explains."""

    tokens: int
    difference: float
    noise: float
    limit: float

    def describe(self, how: str = "") -> str:
        """The outcome in one line; `how` says how the tokens were given to the models."""
        return (
            f"{self.tokens} tokens{how}: logits differ by {self.difference:.1e} from the official formulas "
            f"(float32 rounding {self.noise:.1e}, limit {self.limit:.1e})"
        )


def compare(observed: Tensor, exact: Tensor, rounded: Tensor) -> LogitsCheck:
    """Compares logits `[T, V]` with the exact ones, given what the same formulas give in float32.

    Raises:
        UserError: they differ by more than rounding, or are not finite.
    """
    if not exact.isfinite().all():
        raise UserError("the official weights give logits that are not finite; they are damaged")
    noise = max(largest(rounded - exact), torch.finfo(torch.float32).eps * largest(exact))
    limit = NOISE_MULTIPLE * noise
    difference = largest(observed - exact)
    if not difference <= limit:
        raise UserError(
            f"the converted model's logits differ from the official formulas by {difference:.1e}; rounding explains "
            f"{limit:.1e}. Nothing was written"
        )
    return LogitsCheck(len(exact), difference, noise, limit)


def affordable_tokens(parameters: int, segments: int = 1) -> int:
    """How many tokens each of `segments` probes of a model may have so that the comparison stays bearable."""
    return max(SHORTEST_PROBE, int(AFFORDABLE_OPERATIONS / (OPERATIONS_PER_PARAMETER * parameters * segments)))


def random_ids(vocabulary: int, *shape: int, generator: torch.Generator | None = None) -> Tensor:
    """Token ids `[*shape]`, the same in every run; `generator` continues an earlier sequence."""
    return torch.randint(vocabulary, shape, generator=generator or torch.Generator().manual_seed(0))


def largest(values: Tensor) -> float:
    """The largest magnitude in `values` `[...]`; NaN if there is one."""
    return values.abs().max().item()
