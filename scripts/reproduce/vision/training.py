"""One run of the study: models are trained on images of a task and tested on others."""

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....modeling.modeling_dcvit import DCViTForImageClassification
from ..model_training import forward_flops, train_steps
from ..paired_study.job import Run
from .arms import PARENT, Shape, continue_parent, make_model
from .digits import FOLDS, load_digits, splits
from .glyphs import CHARACTERS, SEEN, UNSEEN, draw_glyphs
from .images import Images

# The seeds of the drawings on which models are tested, by whether the run only chooses a learning rate; no run trains
# with them. What chooses is never what is measured, or the choice would favor the arms that chance favors there.
TEST_SEEDS = {False: 2**31, True: 2**31 + 1}
# Added to a seed for the drawings with which the training of a parent continues.
MORE_DRAWINGS = 2**30
TEST_BATCH = 256

Metrics = dict[str, float]


@dataclass(frozen=True)
class Schedule:
    """How long a model is trained, and on how many images.

    Attributes:
        parent_rate: the peak learning rate of a parent, which is trained as long.
    """

    steps: int
    batch: int = 64
    images: int = 0
    tests: int = 0
    parent_rate: float | None = None


@dataclass(frozen=True)
class TaskSizes:
    """The models of a task, and their training."""

    shape: Shape
    schedule: Schedule

    def with_parent(self, rate: float) -> "TaskSizes":
        """The same sizes for models that continue one that was trained at this learning rate."""
        return replace(self, schedule=replace(self.schedule, parent_rate=rate))


FULL = {
    "digits": TaskSizes(Shape(8, patch=2, hidden_size=64, layers=4, heads=4, labels=10), Schedule(630)),
    "glyphs": TaskSizes(
        Shape(28, patch=4, hidden_size=96, layers=6, heads=6, labels=len(CHARACTERS)),
        Schedule(3000, images=20_000, tests=7440),
    ),
}
QUICK = {
    "digits": TaskSizes(replace(FULL["digits"].shape, hidden_size=32, layers=2), Schedule(200, batch=32)),
    "glyphs": TaskSizes(
        replace(FULL["glyphs"].shape, patch=7, hidden_size=48, layers=2, heads=4),
        Schedule(600, batch=32, images=6000, tests=1488),
    ),
}
FULL["upcycled"] = FULL["glyphs"].with_parent(1e-3)
QUICK["upcycled"] = QUICK["glyphs"].with_parent(3e-3)
# The sizes by whether the study is the quick one.
SIZES = {False: FULL, True: QUICK}


def run_one(run: Run) -> dict[str, Any]:
    """Trains and tests the models of a run; returns its settings, costs and metrics."""
    began = time.process_time()
    sizes = SIZES[run.quick][run.task]
    metrics = TASKS[run.task](run, sizes)
    model = make_model(run.arm, sizes.shape, run.seed)
    return {
        "run": asdict(run),
        "sizes": asdict(sizes),
        "parameters": model.num_parameters(),
        "flops": forward_flops(model, torch.zeros(1, 1, sizes.shape.image, sizes.shape.image)),
        "metrics": metrics,
        "cpu_seconds": time.process_time() - began,
    }


def run_digits(run: Run, sizes: TaskSizes) -> Metrics:
    """Cross-validation; to choose a learning rate, a single model is tested on images apart from these."""
    digits = load_digits()
    tested = []
    for fold, (train, test) in enumerate(splits(digits.labels, run.seed, run.tuning)):
        seed = FOLDS * run.seed + fold
        model = make_model(run.arm, sizes.shape, seed)
        fit(model, digits.take(train), sizes.schedule, run.learning_rate, seed)
        tested.append(losses_and_hits(model, digits.take(test)))
    losses, hits = (torch.cat(parts) for parts in zip(*tested, strict=True))
    return {"accuracy": hits.mean().item(), "loss": losses.mean().item()}


def run_glyphs(run: Run, sizes: TaskSizes) -> Metrics:
    """Trains on some fonts and tests on others."""
    model = make_model(run.arm, sizes.shape, run.seed)
    fit(model, draw_glyphs(SEEN, sizes.schedule.images, run.seed), sizes.schedule, run.learning_rate, run.seed)
    return score_glyphs(model, sizes.schedule.tests, TEST_SEEDS[run.tuning])


def run_upcycled(run: Run, sizes: TaskSizes) -> Metrics:
    """Trains on, with other drawings of the same fonts, what was trained as `PARENT`."""
    shape, schedule = sizes.shape, sizes.schedule
    model = continue_parent(run.arm, shape, run.seed, trained_parent(shape, schedule, run.seed))
    seed = run.seed + MORE_DRAWINGS
    fit(model, draw_glyphs(SEEN, schedule.images, seed), schedule, run.learning_rate, seed)
    return score_glyphs(model, sizes.schedule.tests, TEST_SEEDS[run.tuning])


@functools.lru_cache(maxsize=1)  # the arms of a seed follow each other
def trained_parent(shape: Shape, schedule: Schedule, seed: int) -> DCViTForImageClassification:
    """A model that has learned letters and digits without composition, the same for all arms of a seed."""
    model = make_model(PARENT, shape, seed)
    fit(model, draw_glyphs(SEEN, schedule.images, seed), schedule, schedule.parent_rate or 0.0, seed)
    return model


def score_glyphs(model: DCViTForImageClassification, number: int, seed: int) -> Metrics:
    """Accuracy and loss on `number` drawings of fonts that were never seen, and accuracy on as many of the others."""
    losses, hits = losses_and_hits(model, draw_glyphs(UNSEEN, number, seed))
    _, seen = losses_and_hits(model, draw_glyphs(SEEN, number, seed))
    return {"accuracy": hits.mean().item(), "loss": losses.mean().item(), "seen_accuracy": seen.mean().item()}


def fit(model: DCViTForImageClassification, images: Images, schedule: Schedule, rate: float, seed: int) -> None:
    """Trains a model; all arms of a seed see the same images in the same order."""
    batches = images.batches(schedule.batch, seed)

    def loss_of(step: int) -> Tensor:
        """The mean cross-entropy of the next batch."""
        pixels, labels = next(batches)
        return F.cross_entropy(model(pixels).logits, labels)

    train_steps(model, rate, schedule.steps, loss_of)


@torch.no_grad()
def losses_and_hits(model: DCViTForImageClassification, images: Images) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and 1 where the most probable class is right, both `[N]`; both NaN for a model that diverged."""
    model.eval()
    logits = torch.cat([model(pixels).logits for pixels in images.pixels.split(TEST_BATCH)])
    losses = F.cross_entropy(logits, images.labels, reduction="none")
    return losses, (logits.argmax(dim=-1) == images.labels).float().masked_fill(losses.isnan(), torch.nan)


TASKS: dict[str, Callable[[Run, TaskSizes], Metrics]] = {
    "digits": run_digits,
    "glyphs": run_glyphs,
    "upcycled": run_upcycled,
}
