"""The command of each family of parents."""

from collections.abc import Sequence
from functools import partial

from ... import convert as library
from ..common.command_line import conversion_main
from .arguments import UpcycleArguments

HELP = """\
Turns {what} with the same outputs; with --reverse back, if nothing is composed.

Run: `dynattn convert {kind} SRC DST [--option value]`
"""


def main(kind: str, parent: str, what: str, argv: Sequence[str]) -> int:
    """Runs `dynattn convert KIND`: converts, tells what was read, dropped, written and verified; returns the status.

    Args:
        kind: the conversion's name on the command line.
        parent: the name of the `Parent` in `dynattn.scripts.convert`, which imports it when the conversion begins.
        what: which model it turns into which, for `--help`.
        argv: what follows the name.
    """
    description = HELP.format(what=what, kind=kind)
    return conversion_main(
        kind,
        UpcycleArguments,
        argv,
        description,
        lambda arguments: library.upcycle_checkpoint(arguments, getattr(library, parent)),
    )


bart = partial(main, "bart", "BART_MARIAN", "a BART or Marian into a DCBart")
gpt2 = partial(main, "gpt2", "GPT2", "a GPT-2 into a DCPythia")
LLAMAS = (
    "a Llama, CWM, EXAONE 4, InternLM3, IQuest-Coder, Ministral, Mistral, Phi-3, Phi-4, Qwen2, Qwen3, Seed-OSS or\n"
    "SmolLM3 into a DCFormer"
)
llama = partial(main, "llama", "LLAMA", LLAMAS)
modernbert = partial(main, "modernbert", "MODERNBERT", "a ModernBERT into a DCModernBert")
olmo = partial(main, "olmo", "OLMO", "an OLMo 2 or OLMo 3 into a DCFormer")
pythia = partial(main, "pythia", "NEOX", "a Pythia, or any GPT-NeoX, into a DCPythia")
vit = partial(main, "vit", "VIT", "a ViT, DeiT or DINOv2 into a DCViT")
