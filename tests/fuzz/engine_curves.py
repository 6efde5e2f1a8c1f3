"""The same run by every engine in one, two and four processes: how far its losses are from those of one process.

python -m tests.fuzz.engine_curves --record FILE.json
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dynattn.scripts.common.atomic_file import write_json
from dynattn.scripts.common.environment import hardware, versions
from tests.cases.training import RUN, losses, run, run_forked, write_corpus

SEQUENCES, UPDATES = 8, 8
OPTIONS = {
    **RUN,
    "model_type": "dcformer",
    "model_size": "tiny",
    "model_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "max_steps": UPDATES,
    "eval_every": UPDATES,
}
ENGINES = {"ddp": (2, 4), "fsdp2": (2, 4), "hsdp": (4,)}
ZERO = {"zero1": (2, 4), "zero2": (2, 4), "zero3": (2, 4)}


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs, prints the table, and returns 0 if no difference is above four times that of one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="dynattn-engines-") as folder:
        rows = compare(Path(folder))
    record = {
        "command": "python -m tests.fuzz.engine_curves",
        "what": f"largest difference of {UPDATES} training losses and a validation loss from those of one process with "
        "one forward pass an update; float32, losses of about 5",
        "options": OPTIONS,
        "rows": rows,
        "hardware": hardware(torch.device("cpu")),
        "versions": versions(),
    }
    print(json.dumps(record, indent=1))
    if given.record:
        write_json(given.record, record, indent=1)
    noise = max(row["difference"] for row in rows if row["processes"] == 1)
    return 0 if all(row["difference"] <= 4 * noise for row in rows) else 1


def zero_engines() -> dict[str, tuple[int, ...]]:
    """DeepSpeed's engines, of which stage 3 is to shard the small weights of these runs, too."""
    from dynattn.scripts.pretrain.engines import zero

    zero.PERSISTENT_ELEMENTS = 0
    return ZERO


def compare(folder: Path) -> list[dict[str, Any]]:
    """One row for each engine, number of processes and of forward passes."""
    corpus = write_corpus(folder / "corpus.jsonl")
    run(folder / "alone", corpus, **split(1, 1))
    rows = []
    for accumulation in (2, 8):
        output = folder / f"one-{accumulation}"
        run(output, corpus, **split(1, accumulation))
        rows.append(row("ddp", 1, accumulation, folder / "alone", output))
    engines = ENGINES | (zero_engines() if find_spec("deepspeed") else {})
    for engine, processes in ((engine, count) for engine, counts in engines.items() for count in counts):
        for accumulation in (1, 2):
            output = folder / f"{engine}-{processes}-{accumulation}"
            shards = {"shard_processes": 2} if engine == "hsdp" else {}
            run_forked(processes, output, corpus, **split(processes, accumulation), **shards, engine=engine)
            rows.append(row(engine, processes, accumulation, folder / "alone", output))
    return rows


def split(processes: int, accumulation: int) -> dict[str, Any]:
    """The run with updates of `SEQUENCES` sequences."""
    batch = SEQUENCES // processes // accumulation
    return {**OPTIONS, "batch_size": batch, "gradient_accumulation_steps": accumulation}


def row(engine: str, processes: int, accumulation: int, alone: Path, output: Path) -> dict[str, Any]:
    """What one run has to show."""
    one, other = map(losses, (alone, output))
    difference = max(abs(a - b) for a, b in zip(one, other, strict=True))
    return {"engine": engine, "processes": processes, "forward_passes": accumulation, "difference": difference}


if __name__ == "__main__":
    sys.exit(main())
