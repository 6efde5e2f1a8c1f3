"""Ends a run after its current update, with a checkpoint, when a signal asks for it or its time is over."""

import math
import os
import signal
import time
from types import FrameType
from typing import Any

from ..common.errors import StoppedError
from ..common.signals import SIGNALS, heard_signals

# A terminal sends its signal to all processes, and torchrun then passes it on to them once more.
SAME_REQUEST_SECONDS = 1.0


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP while the block runs, and knows when the time of the run is over.

    After `react(after_update=True)` the first signal only sets `requested`; before, it ends the block at once. A second
    signal has the effect that it had before the block. Signals that the process ignores, as under nohup, stay ignored,
    and outside the main thread, where Python allows no handlers, signals are left alone.

    Args:
        speaks: whether this is the process that prints messages. The others handle no signals before `react`:
            until then they wait for the first process, cannot react, and have to be ended by the signal itself.
        max_seconds: seconds after which the run should stop; None for no limit.

    Attributes:
        requested: number of the signal that asked the run to stop, 0 if none has.
        continuing: the command that goes on after a block that a signal has ended, in words.
    """

    def __init__(self, speaks: bool, max_seconds: float | None = None) -> None:
        self.speaks = speaks
        self._end = deadline_after(max_seconds)
        self.requested = 0
        self.continuing = "the same command"
        self._after_update = False
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

    def react(self, *, after_update: bool) -> None:
        """Chooses what a signal does from now on.

        Args:
            after_update: it sets `requested`, which the training loop reads after its update; else it ends the block.
        """
        self._install()
        self._after_update = after_update

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
        if not self._after_update:
            raise StoppedError(number, f"no update had been interrupted, and {self.continuing} continues the run")
        if self.speaks:
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: ending after this update, with a checkpoint; a second one ends at once\n".encode())


def deadline_after(seconds: float | None) -> float:
    """What `time.monotonic` will return in `seconds`; infinity for None, which is no limit."""
    return math.inf if seconds is None else time.monotonic() + seconds


def ignore_signals(worker: int = 0) -> None:
    """Makes a worker process ignore signals, which reach all processes of a run; the run itself ends its workers.

    Args:
        worker: the number that a data loader passes to each of its workers; it is not used.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
