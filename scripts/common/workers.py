"""Processes that work for another one."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from .errors import UserError
from .signals import SIGNALS, signals_held_back

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def submit(
    pool: Executor, function: Callable[Parameters, Returned], *args: Parameters.args, **options: Parameters.kwargs
) -> Future[Returned]:
    """Gives a call to a pool, which may start workers for it: they get no signal before they are ready for it."""
    with signals_held_back():
        return pool.submit(function, *args, **options)


def end_with_parent() -> None:
    """Makes this process, a worker of `multiprocessing`, end as soon as its parent has ended, in whatever way.

    Workers of a parent that skips its clean-up would wait for work for ever, and keep open where their parent printed.
    Ctrl-C, which a terminal sends to all processes, is left to the parent. Signals that `signals_held_back` kept from
    this process while it was started arrive now.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def own_messages() -> Iterator[None]:
    """Leaves of a UserError from a worker of a data loader its own message; PyTorch puts a traceback before it."""
    try:
        yield
    except UserError as error:
        *_, message = str(error).rpartition(f"{UserError.__module__}.{UserError.__qualname__}: ")
        raise UserError(message.rstrip()) from error
