"""What a process does when a signal asks it to end."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from .errors import StoppedError
from .launcher import is_only_process

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long a job may clean up after a signal.
GRACE_SECONDS = 10.0


def heard_signals() -> list[int]:
    """Those of `SIGNALS` that this process does not ignore; none outside the main thread, which alone has handlers."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


@contextmanager
def signals_received(receive: Callable[[int], object], signals: Collection[int] = SIGNALS) -> Iterator[list[int]]:
    """Calls `receive` with the number of each signal that arrives during the block, and yields the list of numbers.

    Signals that this process ignores, as under nohup, stay ignored, and outside the main thread all are left alone.
    """
    requested: list[int] = []

    def handle(number: int, _: object) -> None:
        requested.append(number)
        receive(number)

    earlier = {number: signal.signal(number, handle) for number in heard_signals() if number in signals}
    try:
        yield requested
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A process that is started in the block gets no signal before it unblocks or ignores it.

    A terminal sends its signal to all processes, and one that is just being started would end with a traceback, before
    it could ignore the signal or handle it. This process still gets signals if it has several threads.
    """
    # Python would start it with the first process, and let SIGINT and SIGTERM through after that.
    resource_tracker.ensure_running()
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


@contextmanager
def signals_end_the_block() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise StoppedError in the block, so that it removes what it has begun to write.

    If the block has not ended `GRACE_SECONDS` later, or at a second signal, the process ends at once: an exception is
    lost where Python calls back, as from a weak reference. Processes that are forked in the block end at the first.
    Python itself raises KeyboardInterrupt for SIGINT. Nothing changes for the processes of a torchrun: one that waits
    for another cannot react, and has to be ended by the signal itself.
    """
    process, timers = os.getpid(), list[threading.Timer]()

    def stop(number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:
            os.kill(os.getpid(), number)
        timers.append(threading.Timer(GRACE_SECONDS, os.kill, [process, number]))
        timers[-1].daemon = True
        timers[-1].start()
        raise StoppedError(number)

    with signals_received(stop, (signal.SIGTERM, signal.SIGHUP) if is_only_process() else ()):
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
