"""Asks which position schemes generalise to longer sequences, and whether composing heads changes that.

    dynattn reproduce positions [--quick]

Small DCFormers learn generated tasks (copying, sorting, sums) on short inputs and are tested on inputs up to 2.5 times
as long, with every position scheme, with composed and plain heads. Composed and plain models read the same examples in
the same order, and weights that both have start equal. Learning rates are chosen for plain and composed models on a
seed that is not measured. A run counts as learned if it answers at least 95 % of examples of the trained lengths
right; runs that have not learned are reported, too.
Finished runs are not repeated, so an interrupted study resumes where it stopped.
"""

from functools import partial

from ..command import study_main
from .arguments import PositionsArguments

main = partial(study_main, "positions", PositionsArguments, __doc__)
