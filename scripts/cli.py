"""`dynattn JOB ...`: the one command of the package. Each job is a folder here with a `main(argv) -> int`."""

import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from dynattn import __version__

from .common.commands import CommandTable
from .common.errors import StoppedError, UserError, last_line
from .common.launcher import is_first_process

JOBS = CommandTable(
    prog="dynattn",
    noun="job",
    usage="JOB",
    commands={
        "pretrain": (
            "dynattn.scripts.pretrain.main",
            "train a model from scratch, or continue one, with Accelerate",
        ),
        "compare": ("dynattn.scripts.compare.main", "train variants from the same seeds, and compare them in pairs"),
        "report": ("dynattn.scripts.report.main", "the curves of one or several runs as one HTML page"),
        "evaluate": ("dynattn.scripts.evaluate.main", "score a checkpoint with lm-eval-harness"),
        "lm-eval": ("dynattn.scripts.evaluate.lm_eval_cli", "the lm_eval command with our model types registered"),
        "serve": ("dynattn.scripts.serve.main", "the transformers serve command with our model types registered"),
        "convert": ("dynattn.scripts.convert.main", "turn released checkpoints of other code into ours, and back"),
        "benchmark": (
            "dynattn.scripts.benchmark.main",
            "time, memory and error of attention beside the strongest baselines",
        ),
        "inspect": ("dynattn.scripts.inspect.main", "show how a model composes its heads on a text"),
        "publish": (
            "dynattn.scripts.publish.main",
            "write a folder that loads anywhere, verify it, push it to the Hub",
        ),
        "kernel": ("dynattn.scripts.publish.kernel", "write the attention op for Hugging Face's kernels package"),
        "export": (
            "dynattn.scripts.export.main",
            "write graphs for another runtime, and prove that it generates the same tokens",
        ),
        "reproduce": ("dynattn.scripts.reproduce.main", "repeat a study: runs, table, plot and record"),
        "quickstart": ("dynattn.scripts.reproduce.quickstart", "pretrain, evaluate, save and reload a small DCFormer"),
        "doctor": ("dynattn.scripts.doctor.main", "what is installed, what will serve, and what is missing"),
        "completion": ("dynattn.scripts.completion", "print what completes these commands in bash, zsh or fish"),
    },
)
# Names of modules, with commas between them. A process that a job starts imports them too.
IMPORTS = "DYNATTN_IMPORT"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one job and returns its exit status.

    A user's mistake prints one line and returns 2; what a signal or Ctrl-C ends prints one line, too, and returns 128
    and the signal's number. A job whose output nothing reads any more, as after `| head`, ends without a word as
    SIGPIPE would end it. Of several processes under torchrun only the first prints.

    Every job takes `--import MODULE`, which is imported before it starts: a module of the user's that registers models
    or attention functions.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            # Notices here, and not when the interpreter ends, that nothing reads any more. Without a standard output
            # there is nothing to flush, and `print` knows that.
            print(end="", flush=True)
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # What is still to be written goes nowhere: the interpreter would complain of it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(argv: list[str]) -> int:
    """What `main` does while its output is read."""
    if argv[:1] == ["--version"]:
        print(f"dynattn {__version__}")
        return 0
    try:
        argv = import_modules(argv)
        return JOBS.run(argv)
    except UserError as error:
        prog = f"dynattn {argv[0]}" if argv and argv[0] in JOBS.commands else "dynattn"
        # Whatever a message quotes, it stays one line.
        _tell(f"{prog}: error: {' '.join(str(error).split())}")
        return 2
    except StoppedError as stopped:
        _tell(f"\n{stopped}")
        return stopped.status
    except KeyboardInterrupt:
        _tell("\ninterrupted")
        return 128 + signal.SIGINT


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nothing reads any more."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are always told
    return bool(poll.poll(0))


def _tell(message: str) -> None:
    if is_first_process():
        print(message, file=sys.stderr)


def import_modules(argv: Sequence[str]) -> list[str]:
    """Imports what `--import` and the environment name, from the current folder too, and returns the other words.

    Raises:
        UserError: a module cannot be imported.
    """
    rest, names = [], list(filter(None, os.environ.get(IMPORTS, "").split(",")))
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        if option != "--import":
            rest.append(word)
            continue
        name = value if equals else next(words, "")
        if not name:
            raise UserError("--import needs the name of a module, such as my_attention")
        names.append(name)
    if not names:
        return rest
    os.environ[IMPORTS] = ",".join(dict.fromkeys(names))
    if "" not in sys.path:
        sys.path.insert(0, "")
    for name in names:
        _import_module(name)
    return rest


def _import_module(name: str) -> None:
    try:
        import_module(name)
    except Exception as error:  # a module of the user's can fail in any way
        reason = f"{type(error).__name__}: {last_line(error)}"
        raise UserError(f"--import {name}: {reason}; modules of {Path.cwd()} can be imported too") from error


if __name__ == "__main__":
    sys.exit(main())
