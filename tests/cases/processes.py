"""Ports and environments of processes that tests start, and groups of processes that are copies of the test's."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def torchrun_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun tells one of its processes in its environment."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in {**places, **address}.items()}


def in_processes(texts: Sequence[Path], work: Callable[[], None]) -> None:
    """Runs `work` in as many processes as there are `texts`, the files for what each of them prints.

    They are copies of this process in the environment that torchrun would give them.

    Raises:
        AssertionError: one of them fails; the message holds what all printed.
    """
    port, fork = free_port(), multiprocessing.get_context("fork")
    members = []
    for rank, text in enumerate(texts):
        environment = {**torchrun_environment(rank, len(texts), port), "ACCELERATE_USE_CPU": "true"}
        members.append(fork.Process(target=_run_as, args=(environment, text, work)))
    for member in members:
        member.start()
    for member in members:
        member.join(120)
        member.kill()  # It may wait for one that failed. Daemons would not need this, but may have no children.
        member.join()
    told = "\n".join(text.read_text() for text in texts)
    assert [member.exitcode for member in members] == [0] * len(texts), told


def _run_as(environment: dict[str, str], text: Path, work: Callable[[], None]) -> None:
    """`work` in the process that the variables of the environment describe."""
    os.environ.update(environment)
    with text.open("w") as file, redirect_stderr(file), redirect_stdout(file):
        try:
            work()
        except BaseException:
            traceback.print_exc()
            file.flush()
            os._exit(1)
