"""Runs that end when the system asks them to: after their current update, with a checkpoint."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..common.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A terminal sends its signal to all processes, and torchrun then passes it on to them once more.
SAME_REQUEST_SECONDS = 1.0


class StopSignals:
    """Takes SIGINT, SIGTERM and SIGHUP while the block runs, and knows when the time of the run is over.

    The first one is a request that `requested` holds if `finish_updates` was called, and ends the block at once
    otherwise. A second one has the effect that it had before the block. Signals that the process ignores, as under
    nohup, stay ignored, and outside the main thread, where Python allows no handlers, signals are left alone.

    Args:
        speaks: whether this process tells what it does. Until `finish_updates`, the others are ended by a signal as if
            this class was not there: they wait for the first one, and cannot react.
        max_seconds: after which the run is to stop.
    """

    def __init__(self, speaks: bool, max_seconds: float | None = None) -> None:
        self.speaks = speaks
        self._end = math.inf if max_seconds is None else time.monotonic() + max_seconds
        self.requested = 0
        self._finishes_updates = False
        self._since = 0.0
        self._process = os.getpid()
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if self.speaks:
            self._install()
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked to stop, or its time is over."""
        return self.requested > 0 or time.monotonic() >= self._end

    def finish_updates(self, wanted: bool) -> None:
        """Whether a signal waits in `requested` from now on; with `wanted` false, it ends the block at once again."""
        self._install()
        self._finishes_updates = wanted

    def _install(self) -> None:
        for number in heard_signals():
            if number not in self._earlier:
                self._earlier[number] = signal.signal(number, self._receive)

    def _restore(self) -> None:
        while self._earlier:
            signal.signal(*self._earlier.popitem())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """The handler; it writes with `os.write`, because it may have interrupted another write."""
        if os.getpid() != self._process:
            return
        if self.requested:
            if time.monotonic() - self._since > SAME_REQUEST_SECONDS:
                self._restore()
                os.kill(os.getpid(), number)
            return
        self.requested, self._since = number, time.monotonic()
        if not self._finishes_updates:
            raise StoppedError(number, "no update had been interrupted, and the same command continues the run")
        if self.speaks:
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: ending after this update, with a checkpoint; a second one ends at once\n".encode())


def heard_signals() -> list[int]:
    """Those of `SIGNALS` that this process does not ignore; none outside the main thread, which alone has handlers."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


@contextmanager
def signals_received(receive: Callable[[int], object]) -> Iterator[list[int]]:
    """Calls `receive` with the number of each signal that comes while the block runs; yields the list of them.

    Signals that this process ignores, as under nohup, stay ignored, and outside the main thread all are left alone.
    """
    requested: list[int] = []

    def handle(number: int, _: object) -> None:
        requested.append(number)
        receive(number)

    earlier = {number: signal.signal(number, handle) for number in heard_signals()}
    try:
        yield requested
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def ignore_signals(worker: int) -> None:
    """Lets process `worker` of a data loader live until its run ends, when a signal goes to all processes at once."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
