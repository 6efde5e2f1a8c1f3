"""What the Triton kernels take of a GPU, compiled without one: registers, shared memory, spills and instructions.

`python tests/modeling/ops/dcmha/triton_report.py model_cards/records/triton-compiled` writes
`record.json` and `table.md`.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from test_triton_compile import SHARED_MEMORY, compile_elsewhere

from dynattn.scripts.benchmark.harness.process import source_commit
from dynattn.scripts.common.environment import versions

COLUMNS = {"registers": "registers", "shared": "shared memory, bytes", "spilled": "spilled, bytes"}
COLUMNS |= {"instructions": "instructions", "outside": "outside of the loop"}
HEADING = """`python tests/modeling/ops/dcmha/triton_report.py model_cards/records/triton-compiled`

Compiled ahead of time, not run: commit {commit}, triton {triton}, torch {torch}.

Of a thread: registers (255 at most), bytes that it spills, and, where a kernel loops over heads or turns, instructions
for each (head, query, key) in that loop and outside of it. Of a program: shared memory.
"""


def report() -> dict[str, Any]:
    """What each kernel of each configuration takes, by compute capability."""
    import triton

    with ThreadPoolExecutor() as pool:
        taken = dict(zip(SHARED_MEMORY, pool.map(compile_elsewhere, SHARED_MEMORY), strict=True))
    return {
        "commit": source_commit(),
        "versions": versions() | {"triton": triton.__version__},
        "capabilities": {f"sm_{capability}": kernels for capability, kernels in taken.items()},
    }


def as_markdown(record: dict[str, Any]) -> str:
    parts = [HEADING.format(commit=record["commit"], **record["versions"])]
    for capability, configurations in record["capabilities"].items():
        parts.append(f"\n**{capability}**\n\n| configuration | kernel | {' | '.join(COLUMNS.values())} |")
        parts.append(f"|{'---|' * (2 + len(COLUMNS))}")
        for configuration, kernels in configurations.items():
            for kernel, taken in kernels.items():
                numbers = " | ".join(str(taken.get(column, "")) for column in COLUMNS)
                parts.append(f"| {configuration} | `{kernel}` | {numbers} |")
    return "\n".join(parts) + "\n"


def main(folder: Path) -> None:
    record = report()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(as_markdown(record), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
