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
            "dynattn.scripts.reproduce.tiny_shakespeare.main",
            "the RCMHA paper's four attention types on characters",
        ),
        "quickstart": ("dynattn.scripts.reproduce.quickstart", "a small DCFormer beside a plain Transformer"),
        "upcycling": (
            "dynattn.scripts.reproduce.upcycling.main",
            "continued training of a GPT-NeoX with and without composition",
        ),
        "ablations": (
            "dynattn.scripts.reproduce.ablations.main",
            "a language model without each term of the composition",
        ),
        "masked-lm": (
            "dynattn.scripts.reproduce.masked_lm.main",
            "an encoder that predicts hidden tokens, with parts of composition and without",
        ),
        "mechanisms": (
            "dynattn.scripts.reproduce.mechanisms.main",
            "small tasks on which mixing heads is predicted to matter",
        ),
        "positions": (
            "dynattn.scripts.reproduce.positions.main",
            "position schemes on lengths beyond the trained ones, with heads composed and plain",
        ),
        "vision": (
            "dynattn.scripts.reproduce.vision.main",
            "small vision transformers: dynamic composition, static matrices and norms, each alone",
        ),
        "seq2seq": (
            "dynattn.scripts.reproduce.seq2seq.main",
            "small encoder-decoders: which attention gains from composition; RCMHA's types in translation",
        ),
        "quantization": (
            "dynattn.scripts.reproduce.quantization",
            "perplexity with smaller weights, composition quantized too or not",
        ),
        "speculation": (
            "dynattn.scripts.reproduce.speculation",
            "speculative decoding beside greedy decoding: same tokens, time, passes",
        ),
    },
)
main = STUDIES.run
