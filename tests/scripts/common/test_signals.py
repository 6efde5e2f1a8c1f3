"""What happens to signals while a process is started."""

import signal
import subprocess
import sys

from dynattn.scripts.common.signals import SIGNALS, signals_held_back

HELD_BACK = "import signal, sys; sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"


def test_a_process_that_is_started_in_the_block_holds_signals_back():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with signals_held_back():
        assert subprocess.run([sys.executable, "-S", "-c", HELD_BACK]).returncode == len({*SIGNALS, *before})
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
