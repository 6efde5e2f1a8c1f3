"""What torchrun tells a process about itself, before anything that computes is imported."""

import os


def is_first_process() -> bool:
    """Whether this process is the first of a torchrun, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0
