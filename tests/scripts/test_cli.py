"""The command line's frame: jobs, what they import first, and how they end."""

import errno
import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from dynattn import __version__
from dynattn.scripts import cli
from dynattn.scripts.common.atomic_folder import staged_folder
from dynattn.scripts.common.errors import StoppedError
from dynattn.scripts.common.signals import signals_end_the_block


def test_an_unknown_way_of_compiling_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", "banana")
    assert cli.main(["report", "nowhere"]) == 2
    assert capsys.readouterr().err == (
        "dynattn: error: DYNATTN_COMPILE='banana' is not known; use '0', '1' or 'auto'\n"
    )


def test_jobs_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {job} " in shown for job in cli.JOBS.commands)
    assert "--import MODULE" in shown
    assert cli.main([]) == 2
    assert cli.main(["train"]) == 2
    assert "unknown job 'train'; choose from pretrain," in capsys.readouterr().err


@pytest.mark.parametrize("job", ["reproduce", "convert"])
def test_jobs_that_choose_among_others_list_each_on_a_line(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([job, "--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert cli.main([job, "nothing"]) == 2
    assert f"choose from {', '.join(listed)}" in capsys.readouterr().err


def test_a_users_mistake_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["pretrain", "--output", str(tmp_path / "run"), "--dataset", str(tmp_path / "none.txt")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("dynattn pretrain: error: ")
    assert "none.txt" in error


@pytest.mark.parametrize(
    ("ended", "status", "message"),
    [
        (
            StoppedError(signal.SIGTERM, "update 3 is saved"),
            128 + signal.SIGTERM,
            "stopped by SIGTERM; update 3 is saved",
        ),
        (StoppedError(0, "update 3 is saved"), 124, "stopped by max_seconds; update 3 is saved"),
        (KeyboardInterrupt(), 128 + signal.SIGINT, "interrupted"),
    ],
)
def test_what_a_signal_ends_is_one_line_of_any_job(
    ended: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(argv: list[str]) -> int:
        raise ended

    monkeypatch.setattr("dynattn.scripts.doctor.main.main", main)
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().err == f"\n{message}\n"
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_a_signal_ends_removes_what_it_has_begun(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(argv: list[str]) -> int:
        with staged_folder(tmp_path / "model") as staging:
            (staging / "config.json").write_text("{}")
            os.kill(os.getpid(), number)
            time.sleep(60)
        return 0

    monkeypatch.setattr("dynattn.scripts.doctor.main.main", main)
    earlier = signal.signal(number, signal.SIG_DFL)
    assert cli.main(["doctor"]) == 128 + number
    assert signal.signal(number, earlier) == signal.SIG_DFL
    assert capsys.readouterr().err == f"\nstopped by {signal.Signals(number).name}\n"
    assert not list(tmp_path.iterdir())


def test_signals_end_forked_workers_and_processes_of_a_torchrun_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = (forks := get_context("fork")).Event()

    def work() -> None:
        ready.set()
        time.sleep(60)

    with signals_end_the_block():
        worker = forks.Process(target=work)
        worker.start()
        ready.wait()
        worker.terminate()
        worker.join()
    assert worker.exitcode == -signal.SIGTERM
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.getsignal(signal.SIGTERM)
    with signals_end_the_block():
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_job_that_loses_the_exception_of_a_signal_ends_all_the_same() -> None:
    program = """
import os, signal, threading, time, weakref
from dynattn.scripts.common import signals
signals.GRACE_SECONDS = 0.1
went_on = threading.Event()
class Timer(threading.Timer):
    def run(self):
        went_on.wait()
        super().run()
threading.Timer = Timer
class Something: pass
thing = Something()
ref = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
with signals.signals_end_the_block():
    del thing
    print("went on", flush=True)
    went_on.set()
    time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "went on\n")


def test_a_job_whose_reader_is_gone_ends_without_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--help` of a job ends by SystemExit, before what it has written reaches the pipe."""
    for argv in (["--version"], ["completion", "bash"], ["reproduce", "upcycling", "--help"]):
        reader, writer = os.pipe()
        with os.fdopen(writer, "w") as output, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            os.close(reader)
            assert cli.main(argv) == 128 + signal.SIGPIPE
            print("more", flush=True)  # goes nowhere, and is no error at the end
    assert capsys.readouterr().err == ""


def test_a_pipe_of_its_own_that_breaks_is_an_error_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(argv: list[str]) -> int:
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setattr("dynattn.scripts.doctor.main.main", main)
    with (tmp_path / "output").open("w") as output, pytest.raises(BrokenPipeError, match="a worker is gone"):
        monkeypatch.setattr(sys, "stdout", output)
        cli.main(["doctor"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_output_that_cannot_be_written_is_an_error_in_one_line() -> None:
    command = [sys.executable, "-m", "dynattn", "--help"]
    with Path("/dev/full").open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "dynattn: error: cannot write the output: No space left on device\n"


def test_an_error_of_the_job_stays_one_if_the_output_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(argv: list[str]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dynattn.scripts.doctor.main.main", main)
    with (tmp_path / "output").open("w") as output, pytest.raises(OSError, match="No space left"):
        monkeypatch.setattr(sys, "stdout", output)
        cli.main(["doctor"])


def test_the_module_runs_as_the_command_does() -> None:
    command = [sys.executable, "-m", "dynattn", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"dynattn {__version__}\n"


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the current folder that writes a file when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(cli.IMPORTS, "")
    monkeypatch.delitem(sys.modules, "a_variant", raising=False)
    (tmp_path / "a_variant.py").write_text("open('imported', 'a').write('once')")
    return tmp_path / "imported"


@pytest.mark.parametrize("option", [["--import", "a_variant"], ["--import=a_variant"]])
def test_jobs_import_a_module_of_the_user_first(option: list[str], user_module: Path) -> None:
    assert cli.main(["convert", *option, "--help"]) == 0
    assert user_module.read_text() == "once"
    assert os.environ[cli.IMPORTS] == "a_variant"
    command = [sys.executable, "-m", "dynattn", "convert", "--help"]  # a process that a job starts imports it too
    subprocess.run(command, capture_output=True, check=True)
    assert user_module.read_text() == "onceonce"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["convert", "--import", "no_variant"],
            "--import no_variant: ModuleNotFoundError: No module named 'no_variant'",
        ),
        (["convert", "--import"], "--import needs the name of a module"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    argv: list[str], message: str, user_module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dynattn: error: {message}")


def test_a_mistake_is_signed_by_the_command_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, name in {
        ("reproduce", "vision", "--seeds", "0", "0"): "dynattn reproduce vision",
        ("reproduce", "visions"): "dynattn reproduce",
        ("evaluate", "vision", "--limit", "0"): "dynattn evaluate",
        ("evaluates",): "dynattn",
    }.items():
        assert cli.main(argv) == 2
        assert capsys.readouterr().err.startswith(f"{name}: error: ")


def test_completion_reads_unfinished_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "--words", "pretrain", "--import"]) == 0
    assert capsys.readouterr().err == ""


def test_signs_that_a_terminal_lacks_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "arrow.py").write_text("print('\\u2191')")
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", cli.IMPORTS: "arrow"}
    command = [sys.executable, "-m", "dynattn", "convert", "--help"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment, check=True)
    assert done.stdout.startswith(b"?")
