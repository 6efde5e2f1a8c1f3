"""Runs that are asked to stop: after the current update, with a checkpoint, and what continues them is the same run."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cases.clock import Clock
from cases.training import RUN, assert_same_run, command, run, without_timing

from dynattn.scripts.cli import main
from dynattn.scripts.pretrain import PretrainArguments, Result, job, stopping
from dynattn.scripts.pretrain import main as pretrain_main
from dynattn.scripts.pretrain.stopping import StoppedError, StopSignals
from dynattn.scripts.pretrain.trainer import Trainer

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signal_after(step: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process gets a signal after `step` updates, before anything of the last one is logged or saved."""

    def show(trainer: Trainer, bar: Any, loss: float) -> None:
        if trainer.progress.step == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Trainer, "_show", show)


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """As in a terminal: a shell starts what runs in the background with signals ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    earlier = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in ALL]


@pytest.mark.parametrize(("step", "number"), [(1, signal.SIGTERM), (3, signal.SIGINT), (6, signal.SIGHUP)])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    step: int, number: int, finished: Result, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The signal comes after an update has ended, so the next one is the current one; 4 is validated, and 7 not."""
    before = handlers()
    with monkeypatch.context() as patch:
        signal_after(step, number, patch)
        with pytest.raises(StoppedError) as stopped:
            run(tmp_path / "run", corpus)
    assert stopped.value.number == number
    name = signal.Signals(number).name
    assert f"stopped by {name}; update {step + 1} is finished and saved, and the same command" in str(stopped.value)
    assert (tmp_path / "run" / "checkpoints" / f"step-{step + 1:06d}").exists()
    assert handlers() == before
    resumed = run(tmp_path / "run", corpus)
    assert_same_run(resumed.output, finished.output)


def test_a_signal_in_the_last_update_leaves_only_the_end_to_do(
    finished: Result, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        signal_after(11, signal.SIGTERM, patch)
        with pytest.raises(StoppedError, match="update 12 is finished and saved"):
            run(tmp_path / "run", corpus)
    assert not (tmp_path / "run" / "model").exists()
    resumed = run(tmp_path / "run", corpus)
    assert without_timing(resumed.output) == without_timing(finished.output)
    assert resumed.validation_loss == finished.validation_loss


def test_the_command_says_so_and_exits_with_the_number_of_the_signal(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    signal_after(2, signal.SIGTERM, monkeypatch)
    options = command({**RUN, "output": tmp_path / "run", "dataset": corpus})
    assert main(options[options.index("pretrain") :]) == 128 + signal.SIGTERM
    error = capfd.readouterr().err
    assert "SIGTERM: ending after this update, with a checkpoint; a second one ends at once" in error
    assert error.endswith(
        "stopped by SIGTERM; update 3 is finished and saved, and the same command continues from there\n"
    )


def test_a_command_that_would_not_continue_says_what_does(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    signal_after(2, signal.SIGTERM, monkeypatch)
    with pytest.raises(StoppedError, match="the same command without --resume and --overwrite continues"):
        run(tmp_path / "run", corpus, overwrite=True)


def test_after_the_last_update_overwrite_is_not_advised(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job, "summarize", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError, match="the same command without --resume and --overwrite continues the run"):
        run(tmp_path / "run", corpus, overwrite=True)


def test_before_the_first_update_a_signal_ends_the_run_at_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def prepare(*_: Any) -> None:
        (tmp_path / "run" / ".prepared").mkdir()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(job, "prepare", prepare)
    with pytest.raises(StoppedError, match="stopped by SIGTERM; no update had been interrupted"):
        run(tmp_path / "run", corpus)
    assert not (tmp_path / "run").exists()


def test_a_second_signal_has_its_ordinary_effect(monkeypatch: pytest.MonkeyPatch):
    clock, signals = Clock(), StopSignals(speaks=True)
    monkeypatch.setattr(stopping, "time", clock)
    with pytest.raises(KeyboardInterrupt) as ended, signals:
        signals.react(after_update=True)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested == signal.SIGINT
        clock.work(stopping.SAME_REQUEST_SECONDS + 0.1)
        os.kill(os.getpid(), signal.SIGINT)
    assert not isinstance(ended.value, StoppedError)


def test_an_interrupt_that_ends_the_run_at_once_promises_no_checkpoint(monkeypatch: pytest.MonkeyPatch):
    def interrupted(arguments: PretrainArguments) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain_main, "run", interrupted)
    with pytest.raises(StoppedError, match="from the newest checkpoint, or begins anew if none was saved"):
        pretrain_main.main(["tiny.yaml"])


def test_one_request_may_arrive_twice(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(stopping, "time", clock)
    with StopSignals(speaks=True) as signals:
        signals.react(after_update=True)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            clock.work(stopping.SAME_REQUEST_SECONDS - 0.1)
        assert signals.requested == signal.SIGINT


def test_ignored_signals_stay_ignored():
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(speaks=True) as signals:
            signals.react(after_update=True)
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, earlier)


@pytest.mark.parametrize("speaks", [True, False])
def test_only_the_process_that_speaks_reacts_while_the_others_wait_for_it(speaks: bool):
    usual: Callable[..., Any] | int | None = signal.getsignal(signal.SIGTERM)
    with StopSignals(speaks):
        assert (signal.getsignal(signal.SIGTERM) == usual) is not speaks
