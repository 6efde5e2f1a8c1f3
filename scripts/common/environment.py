"""What a number was measured on: versions, hardware, commit and date, for records, cards and results."""

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    *("dynattn", "torch", "transformers", "accelerate", "datasets", "evaluate", "lm_eval", "tokenizers"),
    *("torchao", "bitsandbytes", "deepspeed"),
)
# The environment variable with the commit of a copy that has no repository.
COMMIT = "DYNATTN_COMMIT"
# What a run stores of where it was made, and what a record says of a run that did not.
OF_A_RUN = ("hardware", "versions", "commit", "date")
NOT_STORED = "not stored"


def versions(*others: str) -> dict[str, str]:
    """Versions of Python and of the installed packages that decide a run's numbers, and of `others` by name."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *others):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    # Wheels for a GPU do not always say in their metadata which build they are ("+cu130").
    return found | {"torch": str(torch.__version__)}


def hardware(device: torch.device, processes: int = 1) -> str:
    """The accelerators, or the processor, that a run uses."""
    if device.type == "cuda":
        return f"{processes} x {torch.cuda.get_device_name(device)}"
    return f"{os.cpu_count()} cores of {_processor_name()}"


def provenance() -> dict[str, Any]:
    """What a run stores of its code and its time: `source_commit` and the date (UTC)."""
    return {"commit": source_commit(), "date": datetime.now(UTC).date().isoformat()}


@cache
def source_commit() -> str | None:
    """The commit of this checkout, with the suffix `-dirty` if files differ from it other than records and cards.

    In a copy without its repository, or on a machine without git, it is what the environment says, None if nothing.
    A process keeps its first answer, because a commit that somebody makes later is not the code that it has loaded. So
    long work asks when it begins.
    """
    source = Path(__file__).resolve()  # an editable installation may link to the checkout
    try:
        _git(source, "ls-files", "--error-unmatch", str(source))
        # Changed files in model_cards do not count: runs write records there, and no code.
        changed = _git(source, "status", "--porcelain", "--untracked-files=no", ":/", ":(top,exclude)model_cards")
        return _git(source, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get(COMMIT)


def of_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The hardware, versions, commits and dates of the runs of a study, for its record: each different one once.

    Runs of earlier versions have not stored all of them.
    """
    return {name: distinct(run.get(name, NOT_STORED) for run in runs) for name in OF_A_RUN}


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order of their first occurrence; values need not be hashable.

    A record of several runs lists their hardware and versions so, because normally all of them share a single one.
    """
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _git(source: Path, *command: str) -> str:
    """What a git command prints in the folder of a file."""
    # Without its optional locks, git does not disturb a commit that somebody makes at the same time.
    git = ["git", "--no-optional-locks", "-C", str(source.parent), *command]
    return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()


def _processor_name() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
