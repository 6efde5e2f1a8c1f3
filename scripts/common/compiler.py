"""Whether `torch.compile` finds the compiler that it needs."""

import os
import shutil

import torch

from .errors import UserError


def check_compiler(option: str, device: torch.device) -> None:
    """Raises UserError if models on `device` are to be compiled, as `option` says, and there is no C++ compiler.

    Without this check a run would end in an error from inside PyTorch, at its first update.
    """
    words = os.environ.get("CXX", "g++").split() or ["g++"]
    if device.type == "cpu" and shutil.which(words[0]) is None:
        raise UserError(f"{option} needs a C++ compiler, and {words[0]} was not found; install it, or set CXX")
