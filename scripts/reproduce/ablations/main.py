"""Trains DCFormers on text that each lack a term of the composition, and compares them with the plain model.

    dynattn reproduce ablations [--size small] [--dataset FILE --validation_dataset FILE] [--max_seconds 10000]

All variants ship with this study, and are run as by `dynattn compare`: with the same seeds and the same data in the
same order, differences paired by seed, and p corrected for the number of comparisons. One variant is a plain model with
a wider MLP, with as many parameters as full composition. Finished runs are not repeated, so an interrupted study
resumes where it stopped.
"""

from functools import partial

from ..command import study_main
from .arguments import AblationsArguments

main = partial(study_main, "ablations", AblationsArguments, __doc__)
