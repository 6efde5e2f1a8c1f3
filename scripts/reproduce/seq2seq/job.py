"""The study of encoder-decoders, and its run."""

from functools import partial

from ..paired_study.job import Metric, Study, Task
from ..paired_study.job import run_study as run_paired_study
from .arms import ARMS, CONTRASTS
from .training import SIZES, run_one

EXACT = Metric("exact", "exact match", "higher")
LONGER = Metric("exact_longer", "exact match, untrained lengths", "higher")
LOSS = Metric("loss", "loss", "lower")
ERRORS = Metric("character_errors", "character error rate", "lower")

SEQ2SEQ = Study(
    name="seq2seq",
    tasks={
        "sequences": Task("copy, reverse, sort, double", (EXACT, LONGER, LOSS), chosen_by=LOSS),
        "names": Task("English names in Ukrainian", (ERRORS, EXACT, LOSS), chosen_by=LOSS, package="pycountry"),
    },
    arms={name: arm.label for name, arm in ARMS.items()},
    contrasts=CONTRASTS,
    run_one=run_one,
    sizes=SIZES,
    notes=(
        "A seed decides initial weights and what is read in which order. Loss: nats per token of the target. "
        "Sequences: exact match is the mean over the four transformations and over lengths; untrained lengths go up to "
        "twice the longest trained one; learning rates are chosen by other sequences. Names: characters of the "
        "English-Ukrainian pairs that pycountry 26.2.16 ships, tested by greedy decoding on names that no model was "
        "trained on; one of ten names is tested on, one of ten chooses learning rates. DCBart and RCMHA differ in more "
        "than attention (positions, activation), so each is compared with its own kind only."
    ),
)
run_study = partial(run_paired_study, SEQ2SEQ)
