"""`dynattn JOB ...`: the one command of the package. Each job is a folder here with a `main(argv) -> int`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from .common.errors import UserError

JOBS = {
    "pretrain": ("dynattn.scripts.pretrain.main", "train a model from scratch, or continue one, with Accelerate"),
    "evaluate": ("dynattn.scripts.evaluate.main", "score a checkpoint with lm-eval-harness"),
    "lm-eval": ("dynattn.scripts.evaluate.lm_eval_cli", "the lm_eval command with our model types registered"),
    "convert": ("dynattn.scripts.convert.main", "turn released checkpoints of other code into ours, and back"),
    "benchmark": (
        "dynattn.scripts.benchmark.main",
        "time, memory and error of attention beside the strongest baselines",
    ),
    "publish": ("dynattn.scripts.publish.main", "write a folder that loads anywhere, verify it, push it to the Hub"),
    "reproduce": ("dynattn.scripts.reproduce.main", "repeat a study: runs, table, plot and record"),
    "quickstart": ("dynattn.scripts.reproduce.quickstart", "pretrain, evaluate, save and reload a small DCFormer"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one job and returns its exit status; a user's mistake prints one line and returns 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    job, *rest = argv
    if job not in JOBS:
        print(f"dynattn: error: unknown job {job!r}; choose from {', '.join(JOBS)}", file=sys.stderr)
        return 2
    module, _ = JOBS[job]
    try:
        return import_module(module).main(rest)
    except UserError as error:
        # Whatever a message quotes, it stays one line.
        print(f"dynattn {job}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def usage() -> str:
    """The help text: every job with one line."""
    lines = [f"  {job:<12}{text}" for job, (_, text) in JOBS.items()]
    return "\n".join(["usage: dynattn JOB [options]    (dynattn JOB --help tells the options)", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
