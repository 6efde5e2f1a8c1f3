"""Converts checkpoints of other code to our format, and back.

Run: `dynattn convert KIND SRC DST [--option value]`
"""

from ..common.commands import CommandTable

CONVERSIONS = CommandTable(
    prog="dynattn convert",
    noun="conversion",
    usage="KIND SRC DST",
    commands={
        "official": ("dynattn.scripts.convert.official.main", "DCFormer or DCPythia as the authors released them"),
        "rcmha": ("dynattn.scripts.convert.rcmha.main", "RCMHA, RMHA, MDHA or MHA as their authors' code stores them"),
        "pythia": (
            "dynattn.scripts.convert.upcycle.main:pythia",
            "Pythia or another GPT-NeoX to DCPythia, same outputs",
        ),
        "gpt2": ("dynattn.scripts.convert.upcycle.main:gpt2", "GPT-2 to DCPythia, same outputs"),
        "llama": (
            "dynattn.scripts.convert.upcycle.main:llama",
            "Llama, CWM, EXAONE 4, InternLM3, IQuest-Coder, Ministral, Mistral, Phi-3, Phi-4, Qwen2, Qwen3, Seed-OSS "
            "or SmolLM3 to DCFormer, same outputs",
        ),
        "olmo": ("dynattn.scripts.convert.upcycle.main:olmo", "OLMo 2 or OLMo 3 to DCFormer, same outputs"),
        "modernbert": ("dynattn.scripts.convert.upcycle.main:modernbert", "ModernBERT to DCModernBert, same outputs"),
        "bart": ("dynattn.scripts.convert.upcycle.main:bart", "BART or Marian to DCBart, same outputs"),
        "vit": ("dynattn.scripts.convert.upcycle.main:vit", "ViT, DeiT or DINOv2 to DCViT, same outputs"),
        "consolidate": (
            "dynattn.scripts.pretrain.consolidate",
            "the shards of a checkpoint of dynattn pretrain to one model in Hugging Face format",
        ),
        "check": ("dynattn.scripts.convert.check", "compare the logits of any two checkpoints"),
    },
)
main = CONVERSIONS.run
