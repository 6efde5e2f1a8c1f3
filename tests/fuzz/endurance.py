"""A long run of a very small model, whose process must not grow.

python -m tests.fuzz.endurance --updates 10000 --record FILE.json
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tqdm import tqdm

from dynattn.scripts.common.atomic_file import write_json
from dynattn.scripts.common.environment import hardware, versions
from dynattn.scripts.pretrain import PretrainArguments, pretrain
from dynattn.scripts.pretrain.trainer import Trainer

MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SAMPLES = 20
MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints how much memory the process had, and returns 0 if it did not grow after the first tenth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="dynattn-endurance-") as folder:
        record = endure(Path(folder), given.updates)
    print(json.dumps(record, indent=2))
    if given.record:
        write_json(given.record, record)
    return 0 if record["growth_mib_of_the_last_half"] < 1 else 1


def endure(folder: Path, updates: int) -> dict[str, Any]:
    """The resident memory of this process after each twentieth of the updates, with validations and checkpoints."""
    lines = [json.dumps({"text": f"The number {n} is followed by {n + 1}. "}) for n in range(40)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    process, resident, show = psutil.Process(), {}, Trainer._show

    def sample(trainer: Trainer, bar: tqdm, loss: float) -> None:
        if trainer.progress.step % (updates // SAMPLES) == 0:
            resident[trainer.progress.step] = round(process.memory_info().rss / MIB, 2)
        show(trainer, bar, loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_show", sample)
        pretrain(
            PretrainArguments(
                output=str(folder / "run"), dataset=str(folder / "text.jsonl"), model_type="dcformer",
                model_config=MODEL, vocab_size=257, sequence_length=16, batch_size=2, max_steps=updates,
                log_every=100, eval_every=updates // 10, save_every=updates // 10,
            )
        )  # fmt: skip
    values = list(resident.values())
    return {
        "command": f"python -m tests.fuzz.endurance --updates {updates}",
        "model": MODEL,
        "resident_mib": resident,
        "growth_mib_of_the_last_half": round(values[-1] - values[len(values) // 2 - 1], 2),
        "hardware": hardware(torch.device("cpu")),
        "versions": versions(),
    }


if __name__ == "__main__":
    sys.exit(main())
