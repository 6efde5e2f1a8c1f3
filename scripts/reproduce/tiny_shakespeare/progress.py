"""Scores and progress of a run, and its checkpoint between two passes over its text."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.atomic_file import partial_path, put_in_place


@dataclass
class Tally:
    """Scores, summed over segments.

    Attributes:
        nats: negative log-likelihood of all targets.
        correct: targets that were the most likely token.
    """

    tokens: int = 0
    correct: int = 0
    nats: float = 0.0

    def add(self, logits: Tensor, targets: Tensor, mean_loss: Tensor) -> None:
        """Adds a segment: logits `[B, T, V]`, targets `[B, T]` and their mean loss."""
        self.tokens += targets.numel()
        self.correct += int((logits.detach().argmax(-1) == targets).sum())
        self.nats += float(mean_loss.detach()) * targets.numel()

    def scores(self) -> dict[str, float]:
        """Accuracy, bits per character and the number of targets; a model that diverged has no accuracy."""
        return {
            "accuracy": self.correct / self.tokens if math.isfinite(self.nats) else math.nan,
            "bits_per_character": self.nats / self.tokens / math.log(2),
            "tokens": self.tokens,
        }


@dataclass
class StudyProgress:
    """What a run has done so far.

    Memory is empty between passes over the text, so a run can resume there without saving it.

    Attributes:
        part, total: scores since the last point of the curve, and since the start.
        curve: scores of successive parts.
        validations: validation scores after each pass, where training ends when they stop improving.
    """

    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    part: Tally = field(default_factory=Tally)
    total: Tally = field(default_factory=Tally)
    curve: list[dict[str, float]] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)

    @property
    def best_pass(self) -> int:
        """The index of the pass with the lowest validation loss; the first of equal ones."""
        losses = [scores["bits_per_character"] for scores in self.validations]
        return losses.index(min(losses))

    def end_part(self) -> None:
        """Adds the part to the curve and begins another."""
        self.curve.append({"step": self.step, **self.part.scores()})
        self.part = Tally()

    def save(self, path: Path, identity: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Writes everything that a run needs to resume; `identity` is what it is recognized by, in JSON types."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(path)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({"identity": identity, "progress": asdict(self), **state}, partial)
        put_in_place(partial, path)

    @classmethod
    def resume(
        cls, path: Path, identity: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> "StudyProgress":
        """Loads what `save` wrote into model and optimizer; a fresh start if no checkpoint has this identity.

        Checkpoints of earlier versions do not say which text they have read, so their runs start afresh.
        """
        if not path.exists():
            return cls()
        stored = torch.load(path, weights_only=True)
        if stored.get("identity") != identity:
            return cls()
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        values = stored["progress"]
        return cls(**{**values, "part": Tally(**values["part"]), "total": Tally(**values["total"])})
