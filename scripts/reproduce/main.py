"""Repeats a study: trains its models (or measures given ones), and writes a record and a table made from it.

Run: `dynattn reproduce STUDY [--option value]`
"""

from ..common.commands import CommandTable

STUDIES = CommandTable(
    prog="dynattn reproduce",
    noun="study",
    usage="STUDY",
    commands={
        "tiny-shakespeare": (
            f"{__package__}.tiny_shakespeare.main",
            "the RCMHA paper's four attention types on characters",
        ),
        "quickstart": (f"{__package__}.quickstart", "a small DCFormer beside a plain Transformer"),
        "upcycling": (f"{__package__}.upcycling.main", "continued training of a GPT-NeoX with and without composition"),
        "ablations": (f"{__package__}.ablations.main", "a language model without each term of the composition"),
        "masked-lm": (
            f"{__package__}.masked_lm.main",
            "an encoder that predicts hidden tokens, with parts of composition and without",
        ),
        "mechanisms": (f"{__package__}.mechanisms.main", "small tasks on which mixing heads is predicted to matter"),
        "positions": (
            f"{__package__}.positions.main",
            "position schemes on lengths beyond the trained ones, with heads composed and plain",
        ),
        "vision": (
            f"{__package__}.vision.main",
            "small vision transformers: dynamic composition, static matrices and norms, each alone",
        ),
        "seq2seq": (
            f"{__package__}.seq2seq.main",
            "small encoder-decoders: which attention gains from composition; RCMHA's types in translation",
        ),
        "quantization": (
            f"{__package__}.quantization",
            "perplexity with smaller weights, composition quantized too or not",
        ),
        "speculation": (
            f"{__package__}.speculation",
            "speculative decoding beside greedy decoding: same tokens, time, passes",
        ),
    },
)
main = STUDIES.run
