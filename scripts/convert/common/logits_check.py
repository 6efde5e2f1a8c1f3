"""Comparing the logits of a converted model with those that the official formulas give."""

from dataclasses import dataclass

from torch import Tensor

from ...common.errors import UserError
from ...common.rounding import NOISE_MULTIPLE, largest, rounding_error


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
    if not rounded.isfinite().all():
        raise UserError("the official formulas overflow in float32, so logits cannot be compared; give --no-verify")
    noise = rounding_error(rounded, exact)
    limit = NOISE_MULTIPLE * noise
    difference = largest(observed - exact)
    if not difference <= limit:
        raise UserError(
            f"the converted model's logits differ from the official formulas by {difference:.1e}; rounding explains "
            f"{limit:.1e}. Nothing was written"
        )
    return LogitsCheck(len(exact), difference, noise, limit)
