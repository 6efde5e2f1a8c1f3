"""Workers end with the process that they work for."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

PROGRAM = """
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from dynattn.scripts.common.workers import end_with_parent

pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent)
assert pool.submit(os.getpid).result() != os.getpid()
os._exit(75)
"""


def test_workers_end_with_a_parent_that_skips_its_clean_up() -> None:
    """Else the worker would keep open what its parent printed to, and a pipe would wait for it for ever."""
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, start_new_session=True)
    try:
        parent.communicate(timeout=20)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
    assert parent.returncode == 75
