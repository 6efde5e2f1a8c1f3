"""The names of tasks that each `--suite` stands for. This module is light to import."""

from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
HELDOUT = "builtin_heldout"
SUITES = {
    "builtin": (HELDOUT, "dynattn_synthetic"),
    "dcformer": ("dcformer_in_context",),
    "pythia": (
        "lambada_openai", "hellaswag", "piqa", "winogrande", "wsc", "arc_easy", "arc_challenge", "sciq", "logiqa",
    ),
}  # fmt: skip
