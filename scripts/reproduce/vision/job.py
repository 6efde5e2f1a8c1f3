"""The study of DCViT on small images, and its run."""

from functools import partial

from ..paired_study.job import Metric, Study, Task
from ..paired_study.job import run_study as run_paired_study
from .arms import ARMS, CONTINUED, CONTRASTS
from .training import SIZES, run_one

ACCURACY, LOSS = Metric("accuracy", "accuracy", "higher"), Metric("loss", "loss", "lower")
UNSEEN = Metric("accuracy", "accuracy, unseen fonts", "higher")
UNSEEN_LOSS = Metric("loss", "loss, unseen fonts", "lower")
SEEN = Metric("seen_accuracy", "accuracy, seen fonts", "higher")

VISION = Study(
    name="vision",
    tasks={
        "digits": Task(
            "handwritten digits, 5-fold cross-validation", (ACCURACY, LOSS), chosen_by=LOSS, package="sklearn"
        ),
        "glyphs": Task("letters and digits in unseen fonts", (UNSEEN, UNSEEN_LOSS, SEEN), chosen_by=SEEN),
        "upcycled": Task(
            "the same, trained on from a model without composition",
            (UNSEEN, UNSEEN_LOSS, SEEN),
            chosen_by=SEEN,
            arms=CONTINUED,
        ),
    },
    arms={name: arm.label for name, arm in ARMS.items()},
    contrasts=CONTRASTS,
    run_one=run_one,
    sizes=SIZES,
    notes=(
        "A seed decides initial weights, the order of images, the folds of digits and the drawings of glyphs. Digits: "
        "scikit-learn's 1,797 images; one of five only chooses learning rates, and each of the others is tested on "
        "once for each seed. Glyphs: fonts that matplotlib ships, 15 to train on and 6 of other designs to test on; "
        "rates are chosen by drawings of the former on which no measured model is tested. Models that are trained on "
        "get the weights of one with the norm and nothing else, which was trained as long (in the seconds of the first "
        "arm); composition then starts as the identity. "
        "Some characters look alike (O, o and 0; l, I and 1), so no model can name all. "
        "Nothing here says anything about ImageNet."
    ),
)
run_study = partial(run_paired_study, VISION)
