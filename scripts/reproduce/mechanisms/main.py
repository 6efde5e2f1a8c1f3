"""Asks on small tasks what mixing heads contributes: do H composed heads solve what 2H plain heads need?

    dynattn reproduce mechanisms [--quick] [--workers 2] [--max_seconds 10000]

Every sequence of a task states facts and asks about them. Small models with each kind of attention read fresh sequences
until they answer 99 of 100 questions right, or until their updates are over. The result is how many sequences a run
needed; runs that did not solve the task are censored. Exact log-rank tests compare each attention with the baseline.
The learning rate of each attention is chosen on a seed that is not measured. Finished runs are not repeated, so an
interrupted study resumes where it stopped.
"""

from functools import partial

from ..command import study_main
from .arguments import MechanismsArguments

main = partial(study_main, "mechanisms", MechanismsArguments, __doc__)
