"""Asks which attention of an encoder-decoder gains from composed heads, and how RCMHA's four attention types translate.

    dynattn reproduce seq2seq [--quick] [--workers 2] [--max_seconds 10000]

The arms are small DCBarts with composition in the encoder, in the decoder, in cross-attention, in all or in none of
them, a plain DCBart with as many parameters as the composed one, and RCMHA encoder-decoders of each attention type.
There are two tasks: to copy, reverse, sort or double a sequence, tested also on longer sequences; and to translate
English names of countries, regions and languages to Ukrainian, tested on held-out names. Neither paper trains an
encoder-decoder. Finished runs are not repeated, so an interrupted study resumes where it stopped.
"""

from functools import partial

from ..command import study_main
from ..paired_study.arguments import PairedStudyArguments

main = partial(study_main, "seq2seq", PairedStudyArguments, __doc__)
