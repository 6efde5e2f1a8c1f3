"""Asks whether composing heads helps a bidirectional encoder to predict hidden tokens, and which part of it does.

    dynattn reproduce masked-lm [--dataset TRAIN.txt --validation_dataset HELD_OUT.txt] [--quick]

Small DCModernBerts are trained on one text. The arms are: plain; with a norm of queries and keys; with a static mixing
of heads; with dynamic composition after the softmax; with it on both sides of the softmax; with all of these; the last
with dropout in the generator; and plain with an MLP that is wider by as many parameters. For each seed all arms begin
with the same values in the weights that they share, and read the same masks in the same order. The learning rate of
each arm is chosen on a seed that is not measured. Held-out text has the same masks in all runs. Finished runs are not
repeated, so an interrupted study resumes where it stopped.
"""

from functools import partial

from ..command import study_main
from .arguments import MaskedLMArguments

main = partial(study_main, "masked-lm", MaskedLMArguments, __doc__)
