"""Positions that are drawn anew for every sequence that an update reads, so that a model meets more than it has tokens.

What is drawn is a function of the seed and of the sequence's place in the order of the run. So a run that resumes, or
is shared out among other processes, has the same positions.
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

# What position schemes of this package read `position_ids`; all others count places.
READ_POSITIONS = frozenset({"rope", "learned", "sinusoidal"})
# A step this small still lets positions of any length rise in float64.
SMALLEST_STEP = 1e-6


@dataclass(frozen=True)
class PositionSampler:
    """How the positions of training sequences are drawn.

    Attributes:
        method: None for ordinary positions. `jitter` (Giraffe, arXiv 2308.10882): steps between 0 and 2, all of them
            shorter where they would lead beyond the limit. `subset` (randomized positional encodings, arXiv
            2305.16843): so many of the whole numbers below the limit, in order.
        limit: positions stay below it.
        seed: of the run.
    """

    method: str | None
    limit: int
    seed: int

    @classmethod
    def of(cls, arguments: PretrainArguments, config: PreTrainedConfig) -> "PositionSampler":
        """What the arguments ask for.

        Raises:
            UserError: the model does not read positions, or not such ones.
        """
        method, length = arguments.position_sampling, arguments.sequence_length
        limit = arguments.position_limit or length
        if method is None:
            return cls(None, limit, arguments.seed)
        check_reads_positions(config, f"position_sampling={method}")
        if method == "jitter" and "learned" in schemes_of(config):
            raise UserError("position_sampling=jitter has fractions, which learned positions lack; take subset")
        longest: Any = getattr(config, "max_position_embeddings", None)
        if "learned" in schemes_of(config) and limit > longest:
            raise UserError(
                f"position_limit={limit} is above the max_position_embeddings={longest} of learned positions; lower "
                "it, or raise that in model_config"
            )
        return cls(method, limit, arguments.seed)

    def draw(self, batch: dict[str, Tensor], first: int) -> dict[str, Tensor]:
        """A batch of tensors `[B, T]` with drawn `position_ids`.

        Args:
            first: place of the first sequence in the order of the run; those after it follow.
        """
        if self.method is None:
            return batch
        count, length = batch["input_ids"].shape
        places = torch.arange(length)
        given = batch.get("position_ids", places.expand(count, length))
        rising = torch.from_numpy(np.stack([self._rising(first + row, length) for row in range(count)]))
        # Two tokens are as far apart as the drawn positions at their places; each count still starts at 0.
        return {**batch, "position_ids": rising - rising.gather(1, places - given)}

    def _rising(self, place: int, length: int) -> NDArray[Any]:
        """Positions `[T]` of the sequence at `place`: whole numbers, or float64 where steps have fractions."""
        random = np.random.default_rng((self.seed, place))
        if self.method == "subset":
            return np.sort(random.choice(self.limit, length, replace=False))
        positions = np.cumsum(np.maximum(2 * random.random(length), SMALLEST_STEP))
        return positions * min(1.0, self.limit / positions[-1])


def check_reads_positions(config: PreTrainedConfig, option: str) -> None:
    """Refuses models to which the positions of a sequence say nothing, or something else.

    Transformers' own models take every jump of the positions for the border of a document.

    Raises:
        UserError: the model is one of them.
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
    scheme = getattr(config, "position_scheme", None)
    return set(getattr(config, "schemes", {scheme} - {None}))
