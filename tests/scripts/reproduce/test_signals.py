"""Studies that run other processes end those when a signal ends them."""

import os
import signal
import sys
import time
from concurrent.futures import Executor, Future
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from dynattn import DCFormerConfig
from dynattn.scripts.common.commands import IMPORTS
from dynattn.scripts.common.errors import StoppedError, UserError
from dynattn.scripts.common.number_ranges import check_rates
from dynattn.scripts.common.signals import SIGNALS
from dynattn.scripts.reproduce import study_runs
from dynattn.scripts.reproduce.quickstart import run_once
from dynattn.scripts.reproduce.study_runs import _as_finished, worker_pool

# In the place of Python: asks its parent to stop, and says that it has been asked in turn.
STOPS_ITS_PARENT = """#!/bin/sh
trap 'touch "$0.asked"; exit 143' TERM
kill -TERM $PPID
while :; do sleep 0.05; done
"""


def test_the_quickstart_passes_a_signal_on_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command = tmp_path / "python"
    command.write_text(STOPS_ITS_PARENT)
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StoppedError, match="stopped by SIGTERM; run this again to go on from there"):
        run_once(tmp_path / "result.json", ["pretrain"])
    assert (tmp_path / "python.asked").exists()
    assert signal.getsignal(signal.SIGTERM) == before


class Starting(Executor):
    """Notes which signals a process that is started for an item holds back."""

    def submit(self, *_: Any) -> Future[Any]:  # type: ignore[override]
        held_back = Future[Any]()
        held_back.set_result(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return held_back


def test_ctrl_c_does_not_reach_processes_that_are_just_started():
    assert [held_back >= {*SIGNALS} for _, held_back in _as_finished(Starting(), 1, abs, [1, 2])] == [True, True]


def test_processes_of_a_study_import_the_modules_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "of_the_user.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(IMPORTS, "of_the_user")
    monkeypatch.setattr(study_runs, "end_with_parent", lambda: None)  # which this process has not
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    study_runs._prepare_worker()
    assert sys.modules.pop("of_the_user")


@pytest.mark.slow
def test_processes_of_a_study_end_with_it():
    started = time.monotonic()
    with pytest.raises(StoppedError, match="stopped by SIGTERM; finished runs are kept"), worker_pool(2) as results_of:
        assert sorted(results_of(abs, [-1, -2, -3])) == [(-3, 3), (-2, 2), (-1, 1)]
        waiting = results_of(time.sleep, [600, 600])
        os.kill(os.getpid(), signal.SIGTERM)
        next(iter(waiting))
    assert time.monotonic() - started < 300
    assert not active_children()


@pytest.mark.slow
def test_runs_beside_one_that_fails_are_kept():
    kept: list[tuple[list[float], None]] = []
    with pytest.raises(UserError, match="must be one or more positive numbers"), worker_pool(2) as results_of:
        for found in results_of(check_rates, [[0.0], [0.1]]):
            kept.append(found)
    assert kept == [([0.1], None)]


@pytest.mark.slow
def test_errors_of_a_worker_are_told_whatever_their_class():
    # What a wrong configuration raises cannot be made from what `pickle` keeps of it.
    with pytest.raises(RuntimeError, match=r"compose_rank \(99\) must be from 1"), worker_pool(2) as results_of:
        list(results_of(DCFormerConfig.from_dict, [{"compose_rank": 99}]))
