"""The RCMHA paper's comparison of MHA, MDHA, RMHA and RCMHA on characters, with training and validation kept apart.

    dynattn reproduce tiny-shakespeare --data tinyshakespeare.txt [--quick]

Trains all four attention types under one protocol, at the official segment of 2 characters and at one of 128, with
several seeds; then ablations of RCMHA, and WikiText-2 characters if `--wikitext_train` and `--wikitext_validation` are
given. Finished runs are not repeated, so an interrupted study resumes where it stopped, and seeds can be added later.
"""

from functools import partial

from ..command import study_main
from .arguments import StudyArguments

main = partial(study_main, "tiny-shakespeare", StudyArguments, __doc__)
