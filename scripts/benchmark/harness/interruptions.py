"""Candidates that end the process: by a crash, by a kernel after which the device fails every call, or by hanging.

The unfinished record names under `running` the candidate that is being measured. If the process ends then, the next
process that continues the record tries the candidate again; after the second failure it leaves the candidate out of the
case and records the reason. A candidate after which the device fails every call, or whose first call does not return,
is left out at once.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...common.errors import first_line
from .process import DEVICE_LOST, DeviceLostError

# A candidate hangs if it takes more than this many times the budget of a first call to be prepared, called twice and
# checked.
BUDGETS_OF_A_HANG = 3
# A candidate is left out of a case after this many processes have ended while measuring it.
ATTEMPTS = 2
Record = dict[str, Any]


def check_device(device: torch.device, failure: str) -> None:
    """Raises DeviceLostError with this failure if the device fails every call from now on."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError(f"{failure}; the device is lost ({first_line(error)})") from error


def end_when_hanging(budget: float | None, note: Callable[[str], None]) -> threading.Timer | None:
    """Starts a timer that passes the failure to `note` and ends the process, whose main thread then hangs in a call.

    `budget` is the seconds that a first call may take. Without it there is no timer, and None is returned.
    """
    if budget is None:
        return None
    seconds = BUDGETS_OF_A_HANG * budget

    def give_up() -> None:
        note(f"it did not end within {seconds:g} s")
        sys.stdout.flush()
        os._exit(DEVICE_LOST)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    return timer


class Interruptions:
    """Keeps in a record what is measured, and what ended an earlier process.

    Args:
        record: the unfinished record; `running` and `interrupted` are kept in it.
        save: writes the record.
        budget: seconds that a candidate's first call may take; without it nothing is taken to hang.
    """

    def __init__(self, record: Record, save: Callable[[Record], None], budget: float | None) -> None:
        self.record, self.save, self.budget = record, save, budget
        self.timer: threading.Timer | None = None
        self.before = record.pop("running", None)
        if self.before is not None and self.before["attempts"] >= ATTEMPTS:
            self._leave_out(self.before, f"the process ended {ATTEMPTS} times while this was measured")

    def failures(self, case: Record, names: list[str]) -> dict[str, str]:
        """The candidates of a case that ended a process, with the reason; all of them where it is unknown which one."""
        found = [one for one in self.record.get("interrupted", []) if one["case"] == case]
        return {name: one["failure"] for one in found for name in names if one["name"] in (name, None)}

    def begin(self, case: Record, name: str | None) -> None:
        """Notes that a candidate will be prepared and checked next; `name` None: all candidates will be measured."""
        self._stop_timer()
        running = {"case": case, "name": name}
        before = self.before if self.before is not None and running.items() <= self.before.items() else None
        self.record["running"] = running | {"attempts": 1 if before is None else before["attempts"] + 1}
        self.save(self.record)
        if name is not None:
            self.timer = end_when_hanging(self.budget, self._blame_for_hanging)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes that a case is done, whatever ends it; if that is the loss of the device, says whose fault it is.

        A case that has come to its end is saved with its rows.
        """
        try:
            yield
        except DeviceLostError as error:
            self.blame(str(error))
            raise
        except BaseException:  # Ctrl-C, or a fault of this program: nothing is said against what was running
            self.stop()
            raise
        self._end()

    def stop(self) -> None:
        """Notes in the saved record, too, that nothing is measured any more."""
        self._end()
        self.save(self.record)

    def blame(self, failure: str) -> None:
        """Leaves what is running out of its case from now on."""
        self._leave_out(self.record["running"], failure)
        self.stop()

    def _blame_for_hanging(self, failure: str) -> None:
        name = self.record["running"]["name"]
        self.blame(failure)
        print(f"\n{name}: {failure}; --resume goes on without it")

    def _end(self) -> None:
        self._stop_timer()
        self.record.pop("running", None)

    def _leave_out(self, running: Record, failure: str) -> None:
        self.record.setdefault("interrupted", []).append(running | {"failure": failure})

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
