"""Converts checkpoints of other code to our format, and back.

Run: `dynattn convert KIND SRC DST [--option value]`

A new kind needs arguments, a plan (see `common/driver.py`), a weight map, an entry point, and a line in this table.
"""

from ..common.commands import CommandTable

CONVERSIONS = CommandTable(
    prog="dynattn convert",
    noun="conversion",
    usage="KIND SRC DST",
    commands={
        "official": ("dynattn.scripts.convert.official.main", "DCFormer and DCPythia as the authors released them"),
        "rcmha": ("dynattn.scripts.convert.rcmha.main", "RCMHA, RMHA, MDHA and MHA as their authors' code stores them"),
        "pythia": (
            "dynattn.scripts.convert.upcycle.pythia",
            "Pythia or another GPT-NeoX to a DCPythia equal to it",
        ),
        "llama": ("dynattn.scripts.convert.upcycle.llama", "Llama, Mistral or Qwen3 into a DCFormer equal to it"),
        "modernbert": ("dynattn.scripts.convert.upcycle.modernbert", "ModernBERT into a DCModernBert equal to it"),
        "bart": ("dynattn.scripts.convert.upcycle.bart", "BART or Marian into a DCBart equal to it"),
        "vit": ("dynattn.scripts.convert.upcycle.vit", "ViT, DeiT or DINOv2 into a DCViT equal to it"),
        "consolidate": (
            "dynattn.scripts.pretrain.consolidate",
            "the shards of a checkpoint of dynattn pretrain to one model in Hugging Face format",
        ),
        "check": ("dynattn.scripts.convert.check", "compare the logits of any two checkpoints"),
    },
)
main = CONVERSIONS.run
