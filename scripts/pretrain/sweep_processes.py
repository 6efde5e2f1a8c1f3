"""Makes several runs of a sweep at the same time, each in a process of its own."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ..common.errors import StoppedError, UserError
from ..common.signals import SIGNALS, signals_received

Answer = TypeVar("Answer")

THREADS, DEVICES = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"


class Job(NamedTuple, Generic[Answer]):
    """The work of one process.

    Attributes:
        work: the function that it calls; the function and its return value, the answer, must be picklable.
        log: the file to which everything that it prints is redirected.
    """

    work: Callable[[], Answer]
    log: Path


class Place(NamedTuple):
    """A running process, the job that it does, and the pipe that its answer comes from.

    Attributes:
        number: the place of the process among those that run at the same time, counted from 0.
        name: the name of its job.
    """

    number: int
    name: float
    process: BaseProcess
    answers: Connection


def run_jobs(jobs: Mapping[float, Job[Answer]], at_once: int) -> Iterator[tuple[float, Answer]]:
    """Runs the jobs, `at_once` of them at a time, and yields the name and the answer of each job that ends.

    A signal is passed on to all processes. After a job was stopped or has failed, no further job begins, and those that
    run are waited for.

    Raises:
        StoppedError: a job was stopped, or this process was asked to stop.
        UserError: a job raised it, or its process died.
    """
    waiting, working, failures = list(jobs), list[Place](), list[BaseException]()
    with signals_received(lambda number: pass_on(number, working)) as requested:
        while working or (waiting and not failures and not requested):
            free = [number for number in range(at_once) if number not in {place.number for place in working}]
            if waiting and free and not failures and not requested:
                name = waiting.pop(0)
                working.append(start(free[0], at_once, name, jobs[name]))
                if requested:  # the signal came while the process was started, so it has not got it
                    pass_on(requested[0], working[-1:])
                continue
            ready = wait([place.answers for place in working])
            for place in [place for place in working if place.answers in ready]:
                working.remove(place)
                answer, failure = outcome(place, jobs[place.name].log)
                if failure is None:
                    yield place.name, answer
                else:
                    failures.append(failure)
    if requested:
        raise StoppedError(requested[0], "what has begun is saved, and the same command goes on with the sweep")
    for kind in (StoppedError, UserError):
        if found := [failure for failure in failures if isinstance(failure, kind)]:
            raise found[0]


def start(number: int, at_once: int, name: float, job: Job[Any]) -> Place:
    """Starts a process for a job, with a share of the cores, and with one GPU if there are several."""
    answers, ending = multiprocessing.Pipe(duplex=False)
    # A process that is forked after PyTorch has used its threads can hang.
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(job, ending))
    with environment(share_of(number, at_once, os.environ, os.cpu_count() or 1)):
        process.start()
    ending.close()
    return Place(number, name, process, answers)


def share_of(number: int, at_once: int, variables: Mapping[str, str], cores: int) -> dict[str, str]:
    """Environment variables that give process `number` of `at_once` its number of threads and its GPU.

    A number of threads in `variables`, the present environment, is kept. The GPUs are those of CUDA_VISIBLE_DEVICES, or
    all of them if it is not set.
    """
    share = {} if THREADS in variables else {THREADS: str(max(1, cores // at_once))}
    named = variables.get(DEVICES)
    devices = [str(index) for index in range(gpu_count())] if named is None else [d for d in named.split(",") if d]
    return share | ({DEVICES: devices[number % len(devices)]} if len(devices) > 1 else {})


def gpu_count() -> int:
    """GPUs that PyTorch sees."""
    import torch  # here, because torch is slow to import and only a sweep with several workers needs it in this module

    return torch.cuda.device_count()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables during the block, for processes that are started in it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def pass_on(number: int, places: list[Place]) -> None:
    """Sends a signal to the processes of some places."""
    for place in places:
        if place.process.pid is not None and place.process.is_alive():
            os.kill(place.process.pid, number)


def outcome(place: Place, log: Path) -> tuple[Any, BaseException | None]:
    """The answer of a job and None, or None and the error with which it failed."""
    answered = None
    with suppress(EOFError):  # the process died without an answer
        answered = place.answers.recv()
    place.process.join()
    if answered is not None:
        return answered
    status = place.process.exitcode
    if status is not None and -status in SIGNALS:
        return None, StoppedError(-status, "the same command goes on with the sweep")
    return None, UserError(f"the run of {place.name:g} ended with status {status}; {log} has what it printed")


def _work(job: Job[Any], answers: Connection) -> None:
    """Runs in the process of a job: redirects its output to the log, does the work, and sends the answer."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        answers.send((job.work(), None))
    except (UserError, StoppedError) as failure:
        answers.send((None, failure))
