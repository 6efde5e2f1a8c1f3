"""The golden curves: losses of 200 updates of a very small model of each family. Run it to make them anew:

    python -m tests.cases.golden_curves

`eager` makes the curve. Its tolerance is ten times the largest change, up to each update, in five runs whose initial
weights were changed in the last bit: as much as another processor, or another order of sums, may change it. A curve
stands for the tokenizer without merges and for torch's random numbers, which do not depend on the processor.
"""

import json
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dynattn.scripts.pretrain import plan

from .golden import GOLDEN
from .training import losses, run, write_corpus

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "dcformer": {"model_type": "dcformer", "model_config": {**SMALL, "sliding_window": 9}},
    "dcpythia": {"model_type": "dcpythia", "model_config": {**SMALL, "num_attention_heads": 2}},
    "rcmha": {
        "model_type": "rcmha",
        "model_config": {**SMALL, "mem_len": 16},
        "carry_memory": True,
        "mask_documents": False,
    },
}
IMPLEMENTATIONS = {
    "dcformer": ("eager", "chunked"),
    "dcpythia": ("eager", "chunked"),
    "rcmha": ("eager", "sdpa", "chunked"),
}
RUN = {
    "vocab_size": 257,
    "sequence_length": 16,
    "batch_size": 2,
    "max_steps": 200,
    "warmup_steps": 20,
    "learning_rate": 3e-3,
    "eval_every": 200,
    "save_every": 200,
}
MARGIN, PERTURBED = 10, 5


def train(folder: Path, family: str, implementation: str) -> list[float]:
    """The losses of all updates, and at last that of the validation."""
    corpus = write_corpus(folder / "corpus.jsonl")
    run(folder / "run", corpus, **RUN, **MODELS[family], attn_implementation=implementation)
    return losses(folder / "run").tolist()


def train_perturbed(folder: Path, family: str, seed: int) -> list[float]:
    """The losses of a run that begins with weights of which each is one unit in the last place larger or smaller."""
    build = plan.build_model

    def build_perturbed(*given: Any, **options: Any) -> PreTrainedModel:
        model, generator = build(*given, **options), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                up = torch.rand(weight.shape, generator=generator) < 0.5
                weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf)))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "build_model", build_perturbed)
        return train(folder, family, "eager")


def read_curve(family: str) -> tuple[list[float], list[float]]:
    """The golden losses of a family, and the tolerance of each."""
    stored = json.loads((GOLDEN / "curves" / f"{family}.json").read_text())
    return stored["losses"], stored["tolerances"]


def make_curve(family: str) -> dict[str, list[float]]:
    """What `read_curve` reads."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number in range(PERTURBED + 1)]
        for folder in folders:
            folder.mkdir()
        losses = train(folders[0], family, "eager")
        perturbed = [train_perturbed(folder, family, seed) for seed, folder in enumerate(folders[1:])]
    changes = [max(abs(other - loss) for other in others) for loss, *others in zip(losses, *perturbed, strict=True)]
    tolerances = [MARGIN * largest for largest in accumulate(changes, max)]
    return {"losses": losses, "tolerances": [float(f"{tolerance:.2e}") for tolerance in tolerances]}


def main() -> None:
    """Writes all curves."""
    torch.set_num_threads(1)
    (GOLDEN / "curves").mkdir(exist_ok=True)
    for family in MODELS:
        (GOLDEN / "curves" / f"{family}.json").write_text(json.dumps(make_curve(family)) + "\n")


if __name__ == "__main__":
    main()
