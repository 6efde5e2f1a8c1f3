"""The runs of a study: each is made once, several at a time if asked for, and its result is stored in a file."""

import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice, takewhile
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Protocol

import torch

from ..common.atomic_file import read_json, without_nan, write_json
from ..common.commands import imported_modules
from ..common.environment import hardware, provenance, source_commit, versions
from ..common.errors import StoppedError, UserError
from ..common.signals import signals_received
from ..common.workers import end_with_parent, submit
from ..compare.study_folder import lock_of
from ..pretrain.data.documents import is_hub_name
from ..pretrain.stopping import deadline_after

Result = dict[str, Any]
ResultsOf = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[tuple[Any, Any]]]


class AnyRun(Protocol):
    """What decides a run.

    Attributes:
        cell: identifies the runs that share a learning rate, such as an arm and a task.
        file_name: of its result, inside the folder of runs; different for all runs of a study.
    """

    @property
    def cell(self) -> Hashable: ...

    @property
    def learning_rate(self) -> float: ...

    @property
    def file_name(self) -> str: ...


@dataclass
class StudyRuns:
    """Makes runs and keeps their results.

    Args:
        folder: holds the files; the folder above it is the study's, which is locked while runs are made.
        run_one: makes a run; a function of a module, so that other processes can call it.
        describe: returns the line to print for a result.
        workers: number of processes, each with one thread; with 1, runs are made in this process.
        max_seconds: no run starts after this many seconds; None for no limit.
        definition: what the names of a run stand for, in JSON types. It is stored with the result: a
            file with the same names but another definition belongs to another run.
    """

    folder: Path
    run_one: Callable[[Any], Result]
    describe: Callable[[Result], str]
    workers: int
    max_seconds: float | None
    definition: Callable[[Any], Mapping[str, Any]] = lambda run: {}

    def __post_init__(self) -> None:
        self.deadline = deadline_after(self.max_seconds)
        self._results: dict[str, Result] = {}
        source_commit()  # files of runs name it, and the checkout may have changed when they are written

    def make(self, runs: Iterable[AnyRun]) -> int:
        """Makes those that have no file, in their order, until the deadline; returns how many are left.

        Raises:
            UserError: another process makes runs of this study.
        """
        missing = self._missing(runs)
        if missing and self._is_in_time():
            with lock_of(self.folder.parent):
                missing = self._missing(missing)  # another process may have made some just before
                with worker_pool(self.workers) as results_of:
                    for run, result in results_of(self.run_one, takewhile(self._is_in_time, missing)):
                        self._keep(run, result)
        return len(self._missing(missing))

    def has(self, run: AnyRun) -> bool:
        """Whether the run is finished.

        Raises:
            UserError: it was made with another definition. Files of earlier versions may store none.
        """
        if not self._file(run).exists():
            return False
        now = self.definition(run)
        stored = self.read(run).get("definition", now) if now else now
        if changed := [name for name in now if stored.get(name) != now[name]]:
            raise UserError(
                f"{self._file(run)} was made with another {' and '.join(changed)}; give another --output, or remove "
                "the file to repeat the run"
            )
        return True

    def results(self, runs: Iterable[AnyRun]) -> list[Result]:
        """The results of those that are finished."""
        return [self.read(run) for run in runs if self.has(run)]

    def read(self, run: AnyRun) -> Result:
        """The result of a finished run, whose file does not change and is read once.

        Raises:
            UserError: its file is damaged.
        """
        if run.file_name not in self._results:
            self._results[run.file_name] = read_result(self._file(run))
        return self._results[run.file_name]

    def best_rates(self, runs: Sequence[AnyRun], merit: Callable[[Result], Any]) -> dict[Hashable, float]:
        """The learning rate of the best run of each cell, by a merit that is largest for it.

        A cell in which a run is not finished has no rate yet: that run could turn out to be the best.
        """
        unfinished = {run.cell for run in runs if not self.has(run)}
        best: dict[Hashable, AnyRun] = {}
        for run in runs:
            if run.cell not in unfinished:  # of equal ones the first is kept
                best[run.cell] = max(best.get(run.cell, run), run, key=lambda one: merit(self.read(one)))
        return {cell: run.learning_rate for cell, run in best.items()}

    def _missing(self, runs: Iterable[AnyRun]) -> list[AnyRun]:
        return [run for run in runs if not self.has(run)]

    def _is_in_time(self, _: AnyRun | None = None) -> bool:
        """Whether a run may start now, whichever it is."""
        return time.monotonic() < self.deadline

    def _keep(self, run: AnyRun, result: Result) -> None:
        self._file(run).parent.mkdir(parents=True, exist_ok=True)
        definition = self.definition(run)
        stored = {"definition": definition} if definition else {}
        machine = {"hardware": hardware(torch.device("cpu")), "versions": versions()}  # unless the run says another
        write_json(self._file(run), without_nan({**machine, **result, **stored, **provenance()}))
        print(f"{run.file_name.removesuffix('.json')}: {self.describe(result)}", flush=True)

    def _file(self, run: AnyRun) -> Path:
        return self.folder / run.file_name


def read_result(path: Path) -> Result:
    """The result in the file of a finished run; raises UserError if it is damaged."""
    return read_json(path, "remove it to repeat the run")


def chosen(noun: str, names: Sequence[str] | None, known: Mapping[str, Any]) -> list[str]:
    """The names, each of them once, or all known ones if none are given.

    Raises:
        UserError: one is not known.
    """
    if unknown := sorted(set(names or ()) - set(known)):
        raise UserError(f"{noun}s {unknown} do not exist; choose from {', '.join(known)}")
    return list(dict.fromkeys(names or known))


def text_name(text: str | None) -> str | None:
    """What commands in records call a text: its name on the Hub, or that of its file, in whatever folder this lies."""
    return text if text is None or is_hub_name(text) else Path(text).name


@contextmanager
def worker_pool(workers: int) -> Iterator[ResultsOf]:
    """A function that calls another one for every item, in several processes, each with one thread.

    It yields items and results in the order in which they are finished. With one worker it calls in this process.
    """
    if workers == 1:
        torch.set_num_threads(1)
        yield lambda function, items: ((item, function(item)) for item in items)
        return
    # Processes are started afresh: one that is forked hangs in libraries whose threads it does not have.
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_prepare_worker) as pool:
        try:
            with signals_received(_stop):
                yield partial(_as_finished, pool, workers)
        except StoppedError:
            for process in active_children():  # they would wait for work for ever, or delay the end
                process.terminate()
            raise


def _as_finished(
    pool: Executor, workers: int, function: Callable[[Any], Any], items: Iterable[Any]
) -> Iterator[tuple[Any, Any]]:
    """Items and results. An item is taken when a worker is free for it, so that `items` can end at a deadline.

    After a failure no further item is taken; it is raised when those that are running are finished.
    """
    left, failures = iter(items), list[BaseException]()
    running = {submit(pool, _call, function, item): item for item in islice(left, workers)}
    while running:
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            item = running.pop(future)
            if error := future.exception():
                failures.append(error)
            else:
                yield item, future.result()
        if not failures:
            running |= {submit(pool, _call, function, item): item for item in islice(left, len(finished))}
    if failures:
        raise failures[0]


def _call(function: Callable[[Any], Any], item: Any) -> Any:
    """Calls the function in a worker.

    Raises:
        UserError: raised by the function.
        RuntimeError: the function failed otherwise. The error itself is not raised: if its class cannot be sent to
            another process, all workers would end without its message.
    """
    try:
        return function(item)
    except UserError:
        raise
    except Exception as error:  # a study's function may fail with anything
        raise RuntimeError("".join(traceback.format_exception(error))) from None


def _stop(number: int) -> None:
    raise StoppedError(number, "finished runs are kept, and the same command makes the others")


def _prepare_worker() -> None:
    """Makes a fresh process one that makes runs as the first process does, with the modules of the user's."""
    end_with_parent()
    torch.set_num_threads(1)
    for name in imported_modules():
        import_module(name)
