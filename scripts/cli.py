"""`dynattn JOB ...`: the one command of the package. `JOBS` names the module of each job, which has a `main(argv)`."""

import io
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from dynattn import __version__

from .common.commands import IMPORTS, CommandTable, imported_modules
from .common.errors import StoppedError, UserError, in_one_line, last_line, printable
from .common.launcher import is_first_process
from .common.signals import signals_end_the_block

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
        "report": ("dynattn.scripts.report.main", "draw the curves of one or several runs on one HTML page"),
        "evaluate": ("dynattn.scripts.evaluate.main", "score a checkpoint with lm-eval-harness"),
        "lm-eval": ("dynattn.scripts.evaluate.lm_eval_cli", "run lm_eval with this package's model types and tasks"),
        "serve": ("dynattn.scripts.serve.main", "run transformers serve with this package's model types"),
        "run": ("dynattn.scripts.run.main", "run another package's command with this package's model types"),
        "convert": ("dynattn.scripts.convert.main", "turn checkpoints of other code into this package's, and back"),
        "benchmark": (
            "dynattn.scripts.benchmark.main",
            "measure time, memory and error of attention beside the strongest baselines",
        ),
        "inspect": ("dynattn.scripts.inspect.main", "show how a model composes its heads on a text"),
        "publish": (
            "dynattn.scripts.publish.main",
            "write a folder that loads anywhere, verify it, push it to the Hub",
        ),
        "kernel": ("dynattn.scripts.publish.kernel", "write the attention op for Hugging Face's kernels package"),
        "export": (
            "dynattn.scripts.export.main",
            "write graphs for another runtime (ONNX ...), and prove that it generates the same tokens",
        ),
        "reproduce": ("dynattn.scripts.reproduce.main", "repeat a study: runs, table, plot and record"),
        "quickstart": ("dynattn.scripts.reproduce.quickstart", "pretrain, evaluate, save and reload a small DCFormer"),
        "doctor": ("dynattn.scripts.doctor.main", "show what is installed, what attention runs with, what is missing"),
        "completion": ("dynattn.scripts.completion", "print a function that completes these commands in your shell"),
    },
    notes="Every job takes --import MODULE, a module of yours that registers models or attention functions.\n"
    "`dynattn --version` prints the version.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one job and returns its exit status.

    A user's mistake prints one line and returns 2. A job that a signal or Ctrl-C ends prints one line, too, and returns
    128 plus the signal's number. If nothing reads the output any more, as after `| head`, a job ends silently with the
    status of SIGPIPE. Output that cannot be written, as on a full disk, is an error in one line. Of several processes
    under torchrun only the first prints.

    Every job takes `--import MODULE`: a module of the user's, which registers models or attention functions and is
    imported before the job starts.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a sign must not cost the results of a job
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            # Raises OSError here, and not when the interpreter ends, if the output cannot be written any more.
            # Unlike `sys.stdout.flush`, `print` also works without a standard output.
            print(end="", flush=True)
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if not _output_fails():
            raise
        _discard_output()
        _tell(f"{JOBS.prog}: error: cannot write the output: {error.strerror}")
        return 2


def _run(argv: list[str]) -> int:
    """Runs the job that `argv` names, and turns its errors into messages and exit statuses."""
    if argv[:1] == ["--version"]:
        print(f"dynattn {__version__}")
        return 0
    try:
        if argv[:1] != ["completion"]:  # whose words are those of a command line that is not finished
            argv = import_modules(argv)
        if argv[:1] != ["doctor"]:  # which tells what is wrong with the environment
            check_compile_mode()
        with signals_end_the_block():
            return JOBS.run(argv)
    except UserError as error:
        _tell(f"{error.command or JOBS.prog}: error: {printable(in_one_line(error))}")
        return 2
    except StoppedError as stopped:
        _tell(f"\n{stopped}")
        return stopped.status
    except KeyboardInterrupt:
        _tell("\ninterrupted")
        return 128 + signal.SIGINT


def check_compile_mode() -> None:
    """Raises UserError if the environment asks for a way of compiling that does not exist."""
    if "DYNATTN_COMPILE" in os.environ:  # else nothing heavy is imported here
        from dynattn.modeling.ops.dcmha.chunked.composers.choice import compile_mode

        try:
            compile_mode()
        except ValueError as error:
            raise UserError(str(error)) from error


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nothing reads any more."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # no events are asked for; errors are always reported
    return bool(poll.poll(0))


def _output_fails() -> bool:
    """Whether what was printed cannot be written."""
    try:
        print(end="", flush=True)
    except OSError:
        return True
    return False


def _discard_output() -> None:
    """Discards buffered output; otherwise the interpreter reports at its end that it could not write this output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(message: str) -> None:
    if is_first_process():
        print(message, file=sys.stderr)


def import_modules(argv: Sequence[str]) -> list[str]:
    """Imports the modules of `--import` and of the environment, and returns the other words.

    They may be installed, or be in the current folder.

    Raises:
        UserError: a module cannot be imported.
    """
    rest, given = split_imports(argv)
    if "" in given:
        raise UserError("--import needs the name of a module, such as my_attention")
    names = [*imported_modules(), *given]
    if not names:
        return rest
    os.environ[IMPORTS] = ",".join(dict.fromkeys(names))
    if "" not in sys.path:
        sys.path.insert(0, "")
    for name in names:
        try:
            import_module(name)
        except Exception as error:  # a module of the user's can fail in any way
            reason = f"{type(error).__name__}: {last_line(error)}"
            raise UserError(f"--import {name}: {reason}; modules of {Path.cwd()} can be imported too") from error
    return rest


def split_imports(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line without `--import MODULE`, and the names of these modules; one left out is empty."""
    rest, names = list[str](), list[str]()
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--import":
            names.append(value if equals else next(words, ""))
        else:
            rest.append(word)
    return rest, names


if __name__ == "__main__":
    sys.exit(main())
