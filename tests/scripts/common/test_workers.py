"""Workers end with the process that they work for, and their errors keep their messages."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from torch.utils.data import DataLoader, Dataset

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.common.workers import own_messages

PROGRAM = """
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from dynattn.scripts.common.workers import end_with_parent

pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent)
assert pool.submit(os.getpid).result() != os.getpid()
os._exit(75)
"""
# Ctrl-C reaches a worker that is just being started; then its parent ends it.
INTERRUPTED = """
import os, signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from dynattn.scripts.common.signals import signals_held_back
from dynattn.scripts.common.workers import end_with_parent

with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
    with signals_held_back():
        answer = pool.submit(abs, -75)
    (worker,) = active_children()
    os.kill(worker.pid, signal.SIGINT)
    print(answer.result())
    worker.terminate()
print(worker.exitcode)
"""


def test_workers_leave_ctrl_c_to_their_parent_which_ends_them() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (ended.stdout.split(), ended.stderr) == (["75", str(-signal.SIGTERM)], "")


def test_workers_end_with_a_parent_that_skips_its_clean_up() -> None:
    """Else the worker would keep open what its parent printed to, and a pipe would wait for it for ever."""
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, start_new_session=True)
    try:
        parent.communicate(timeout=20)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
    assert parent.returncode == 75


class Unreadable(Dataset[int]):
    """A data set that cannot be read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise UserError("the file is damaged;\ncopy it again")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_data_loader_has_no_more_than_its_own_message(workers: int) -> None:
    with pytest.raises(UserError) as raised, own_messages():
        next(iter(DataLoader(Unreadable(), num_workers=workers)))
    assert str(raised.value) == "the file is damaged;\ncopy it again"
