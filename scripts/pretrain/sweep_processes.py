"""Makes several runs of a sweep at the same time, each in a process of its own."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from accelerate.utils import patch_environment

from ..common.errors import StoppedError, UserError
from ..common.signals import SIGNALS, heard_signals, signals_held_back, signals_received

Answer = TypeVar("Answer")

THREADS, DEVICES = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"


class SweepTask(NamedTuple, Generic[Answer]):
    """The work of one process.

    Attributes:
        work: the function that it calls; the function and its return value, the answer, must be picklable.
        log: the file to which everything that it prints is redirected.
    """

    work: Callable[[], Answer]
    log: Path


class Worker(NamedTuple):
    """A running process, the task that it does, and the pipe that its answer comes from.

    Attributes:
        slot: the place of the process among those that run at the same time, counted from 0.
        value: the value of the sweep that names its task.
    """

    slot: int
    value: float
    process: BaseProcess
    answers: Connection


def run_tasks(tasks: Mapping[float, SweepTask[Answer]], at_once: int) -> Iterator[tuple[float, Answer]]:
    """Runs tasks, `at_once` of them at a time, and yields the value and the answer of each task that ends.

    A signal is passed on to all processes. After a task was stopped or has failed, no further task begins, and those
    that run are waited for.

    Args:
        tasks: by the value of the sweep that each is for.

    Raises:
        StoppedError: a task was stopped, or this process was asked to stop.
        UserError: a task raised it, or its process died.
    """
    waiting, working, failures = list(tasks), list[Worker](), list[BaseException]()
    with signals_received(lambda number: forward_signal(number, working)) as requested:

        def may_start() -> bool:
            return bool(waiting) and not failures and not requested

        while working or may_start():
            free = sorted(set(range(at_once)) - {worker.slot for worker in working})
            if free and may_start():
                value = waiting.pop(0)
                working.append(start(free[0], at_once, value, tasks[value]))
                if requested:  # the signal came while the process was started, so it has not got it
                    forward_signal(requested[0], working[-1:])
                continue
            ready = wait([worker.answers for worker in working])
            for worker in [worker for worker in working if worker.answers in ready]:
                working.remove(worker)
                answer, failure = collect_answer(worker, tasks[worker.value].log)
                if failure is None:
                    yield worker.value, answer
                else:
                    failures.append(failure)
    if requested:
        raise StoppedError(requested[0], "what has begun is saved, and the same command goes on with the sweep")
    for kind in (StoppedError, UserError):
        if found := [failure for failure in failures if isinstance(failure, kind)]:
            raise found[0]


def start(slot: int, at_once: int, value: float, task: SweepTask[Any]) -> Worker:
    """Starts a process for a task, with a share of the cores, and with one GPU if there are several."""
    answers, ending = multiprocessing.Pipe(duplex=False)
    # A process that is forked after PyTorch has used its threads can hang.
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(task, ending))
    with patch_environment(**share_of(slot, at_once, os.environ, os.cpu_count() or 1)), signals_held_back():
        process.start()
    ending.close()
    return Worker(slot, value, process, answers)


def share_of(slot: int, at_once: int, variables: Mapping[str, str], cores: int) -> dict[str, str]:
    """Environment variables that give the process of a `slot` among `at_once` its number of threads and its GPU.

    A number of threads in `variables`, the present environment, is kept. The GPUs are those of CUDA_VISIBLE_DEVICES, or
    all of them if it is not set.
    """
    share = {} if THREADS in variables else {THREADS: str(max(1, cores // at_once))}
    named = variables.get(DEVICES)
    devices = (
        [str(index) for index in range(torch.cuda.device_count())]
        if named is None
        else [d for d in named.split(",") if d]
    )
    return share | ({DEVICES: devices[slot % len(devices)]} if len(devices) > 1 else {})


def forward_signal(number: int, workers: list[Worker]) -> None:
    """Sends a signal to the processes of some workers."""
    for worker in workers:
        if worker.process.pid is not None and worker.process.is_alive():
            os.kill(worker.process.pid, number)


def collect_answer(worker: Worker, log: Path) -> tuple[Any, BaseException | None]:
    """The answer of a task and None, or None and the error with which it failed."""
    answered = None
    with suppress(EOFError):  # the process died without an answer
        answered = worker.answers.recv()
    worker.process.join()
    if answered is not None:
        return answered
    status = worker.process.exitcode
    if status is not None and -status in SIGNALS:
        return None, StoppedError(-status, "the same command goes on with the sweep")
    return None, UserError(f"the run of {worker.value:g} ended with status {status}; {log} has what it printed")


def _work(task: SweepTask[Any], answers: Connection) -> None:
    """Runs in the process of a task: redirects its output to the log, does the work, and sends the answer."""
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with task.log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    for number in heard_signals():
        signal.signal(number, signal.SIG_DFL)  # it ends the process; Python's own action for SIGINT is a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        answers.send((task.work(), None))
    except (UserError, StoppedError) as failure:
        answers.send((None, failure))
