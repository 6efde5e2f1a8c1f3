"""Comparing the logits of a converted model with those that the official formulas give."""

from torch import Tensor

from ...common.errors import UserError
from ...common.rounding import NOISE_MULTIPLE, largest, rounding_error


def compare(observed: Tensor, exact: Tensor, rounded: Tensor, how: str = "") -> str:
    """Compares logits `[T, V]` with the exact ones, given what the same formulas give in float32.

    Returns the outcome in one line; `how` says how the tokens were given to the models.

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
    return (
        f"{len(exact)} tokens{how}: logits differ by {difference:.1e} from the official formulas "
        f"(float32 rounding {noise:.1e}, limit {limit:.1e})"
    )
