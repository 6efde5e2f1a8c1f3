"""Random positions for training sequences, so that a model meets positions beyond the length of its sequences.

They are a function of the seed and of the sequence's place in the order of the run. So a run has the same positions
after it was resumed, and with any number of processes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

from ...common.errors import UserError
from ..arguments import PretrainArguments

# Position schemes of this package that read `position_ids`; the others use the places of tokens in the sequence.
READ_POSITIONS = frozenset({"rope", "learned", "sinusoidal"})
# A step this small still lets positions of any length rise in float64.
SMALLEST_STEP = 1e-6


@dataclass(frozen=True)
class PositionSampler:
    """How the positions of training sequences are drawn.

    Attributes:
        method: `jitter` (Giraffe, arXiv 2308.10882) draws the steps between positions uniformly between 0 and 2, and
            scales them down if the last position would exceed the limit. `subset` (randomized positional encodings,
            arXiv 2305.16843) draws as many of the whole numbers below the limit as there are tokens, and sorts them.
        limit: all positions are below it.
        seed: the seed of the run.
    """

    method: str
    limit: int
    seed: int

    @classmethod
    def of(cls, arguments: PretrainArguments, config: PreTrainedConfig) -> "PositionSampler | None":
        """What the arguments ask for; None for ordinary positions.

        Raises:
            UserError: the model does not read positions, or cannot read those that the method draws.
        """
        method, limit = arguments.position_sampling, arguments.position_limit or arguments.sequence_length
        if method is None:
            return None
        check_reads_positions(config, f"position_sampling={method}")
        if method == "jitter" and "learned" in schemes_of(config):
            raise UserError("position_sampling=jitter draws fractions, which learned positions lack; take subset")
        longest: Any = getattr(config, "max_position_embeddings", None)
        if "learned" in schemes_of(config) and limit > longest:
            raise UserError(
                f"position_limit={limit} is above the max_position_embeddings={longest} of learned positions; lower "
                "it, or raise that in model_config"
            )
        return cls(method, limit, arguments.seed)

    def draw(self, item: dict[str, Tensor], place: int) -> dict[str, Tensor]:
        """The sequence of tensors `[T]` at `place` in the order of the run, with drawn `position_ids`."""
        places = torch.arange(len(item["input_ids"]))
        given = item.get("position_ids", places)
        rising = torch.from_numpy(self._rising(place, len(places)))
        # Positions of each document start at 0 as before. In it two tokens are as far apart as the drawn positions at
        # their places: `places - given` is the place of the document's first token.
        return {**item, "position_ids": rising - rising[places - given]}

    def _rising(self, place: int, length: int) -> NDArray[Any]:
        """Rising positions `[T]` for the sequence at `place` in the order of the run: int64, or float64 with jitter."""
        random = np.random.default_rng((self.seed, place))
        if self.method == "subset":
            return np.sort(random.choice(self.limit, length, replace=False))
        positions = np.cumsum(np.maximum(2 * random.random(length), SMALLEST_STEP))
        return positions * min(1.0, self.limit / positions[-1])


def check_reads_positions(config: PreTrainedConfig, option: str) -> None:
    """Refuses models that ignore `position_ids`, or that find documents by them.

    Transformers' own models take every jump of the positions for the border of a document.

    Raises:
        UserError: the model is one of them; the message names `option`.
    """
    if schemes := schemes_of(config):
        if READ_POSITIONS.isdisjoint(schemes):
            raise UserError(
                f"{option} changes positions, and position_scheme={sorted(schemes)} counts places; use one of "
                f"{sorted(READ_POSITIONS)}, or leave it out"
            )
    else:
        raise UserError(
            f"{option} is for the decoders of this package, which tell positions from the borders of documents, and "
            f"this is a {config.model_type}; leave it out"
        )


def schemes_of(config: Any) -> set[str]:
    """The position schemes of a model of this package; none for other models."""
    if hasattr(config, "schemes"):
        return set(config.schemes)
    scheme = getattr(config, "position_scheme", None)
    return set() if scheme is None else {scheme}
