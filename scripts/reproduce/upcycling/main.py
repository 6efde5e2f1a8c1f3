"""Compares upcycling with continued training of a plain model: do composed heads lower the loss?

    dynattn reproduce upcycling [--parent mixtral] [--dataset FILE --validation_dataset FILE] [--quick]
    dynattn reproduce upcycling --parent CHECKPOINT --arms wide composed --learning_rates 1e-4 3e-4

For every seed (initial weights and order of the data) a small GPT-NeoX is trained on the built-in corpus or on another
text, and converted to composed heads as by `dynattn convert pythia`; or a Mixtral, a mixture of experts, whose heads
are composed in place. Or all seeds continue a trained model of yours, whose heads are composed in place. Then training
continues on the same tokens in the same order in seven arms: plain; plain with wider MLPs, which give it as many
parameters as composition does, and the same logits at first; composed; composed with a lower learning rate for the
composition, in one and in two groups of heads; composed with a higher one; and composed with the parent's weights
frozen at first.
The learning rates of the plain and of the composed arm are chosen on a seed that is not measured, and the others use
the rate of the one that they resemble. Finished runs are not repeated, so an interrupted study resumes where it
stopped.
"""

from functools import partial

from ..command import study_main
from .arguments import UpcyclingArguments

main = partial(study_main, "upcycling", UpcyclingArguments, __doc__)
