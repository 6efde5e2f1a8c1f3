"""Runs of a sweep at the same time, each in a process of its own."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ..common.errors import StoppedError, UserError
from .stopping import SIGNALS, signals_received

Answer = TypeVar("Answer")

THREADS, DEVICES = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"


class Job(NamedTuple, Generic[Answer]):
    """What one process does.

    Attributes:
        work: what it calls, which has to be picklable, as its answer does.
        log: the file that gets all it prints.
    """

    work: Callable[[], Answer]
    log: Path


class Place(NamedTuple):
    """A process that works, and where its answer comes from."""

    number: int
    name: float
    process: BaseProcess
    answers: Connection


def run_jobs(jobs: Mapping[float, Job[Answer]], at_once: int) -> Iterator[tuple[float, Answer]]:
    """Makes the jobs, `at_once` of them at a time, and yields each answer with the job's name as soon as it is there.

    A signal goes to all processes. When one of them was stopped or has failed, no other begins; those that work are
    waited for.

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
                if requested:  # while it was started, so that it did not hear of it
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
    """Starts a job in the place `number` of `at_once`, with its share of cores, and of GPUs if there are several."""
    answers, ending = multiprocessing.Pipe(duplex=False)
    # A process that is forked after PyTorch has used its threads can hang.
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(job, ending))
    with environment(share_of(number, at_once, os.environ, os.cpu_count() or 1)):
        process.start()
    ending.close()
    return Place(number, name, process, answers)


def share_of(number: int, at_once: int, variables: Mapping[str, str], cores: int) -> dict[str, str]:
    """The variables of the environment that give the place `number` of `at_once` its threads and its GPU.

    What `variables` say about threads stays. GPUs are those that they name, or, unless they hide them, by number.
    """
    share = {} if THREADS in variables else {THREADS: str(max(1, cores // at_once))}
    named = variables.get(DEVICES)
    devices = [str(index) for index in range(gpu_count())] if named is None else [d for d in named.split(",") if d]
    return share | ({DEVICES: devices[number % len(devices)]} if len(devices) > 1 else {})


def gpu_count() -> int:
    """GPUs that PyTorch sees."""
    import torch  # here, because the command line imports this module's neighbours before it is known to be needed

    return torch.cuda.device_count()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The variables are set during the block, for processes that start in it."""
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
    """The answer of a job, or how it failed."""
    answered = None
    with suppress(EOFError):  # it died
        answered = place.answers.recv()
    place.process.join()
    if answered is not None:
        return answered
    status = place.process.exitcode
    if status is not None and -status in SIGNALS:
        return None, StoppedError(-status, "the same command goes on with the sweep")
    return None, UserError(f"the run of {place.name:g} ended with status {status}; {log} has what it printed")


def _work(job: Job[Any], answers: Connection) -> None:
    """The job in its process: everything that is printed goes into its file, and the answer to the parent."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        answers.send((job.work(), None))
    except (UserError, StoppedError) as failure:
        answers.send((None, failure))
