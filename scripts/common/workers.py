"""Processes that work for another one."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import UserError


def end_with_parent() -> None:
    """Makes this process, a worker of `multiprocessing`, end as soon as its parent has ended, in whatever way.

    Workers of a parent that skips its clean-up would wait for work for ever, and keep open where their parent printed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

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
