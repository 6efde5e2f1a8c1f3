"""What torchrun says about a process in environment variables, read without importing torch."""

import os


def is_first_process() -> bool:
    """Whether this process is the first of a torchrun, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0
