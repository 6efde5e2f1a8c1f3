"""What torchrun says about a process in environment variables, read without importing torch."""

import os


def is_first_process() -> bool:
    """Whether this process is the first of a torchrun, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def is_only_process() -> bool:
    """Whether this process belongs to no torchrun, or to one of a single process."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1
