"""Asks what composing heads does to small vision transformers, apart from other changes of the official comparison.

    dynattn reproduce vision [--quick] [--workers 2] [--max_seconds 10000]

The authors' DCViT differs from a plain vision transformer by dynamic composition, by a static matrix that mixes heads,
and by a norm of queries and keys. Here each is an arm of its own, and one plain arm has as many parameters as the
authors' model. There are three tasks: scikit-learn's handwritten digits with cross-validation; letters and digits in
fonts that were not seen in training; and the same when the training of a model without composition is continued with
each arm. Finished runs are not repeated, so an interrupted study resumes where it stopped.
"""

from functools import partial

from ..command import study_main
from ..paired_study.arguments import PairedStudyArguments

main = partial(study_main, "vision", PairedStudyArguments, __doc__)
