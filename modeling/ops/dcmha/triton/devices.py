"""What `dcmha_triton` asks about the device that it runs on."""

import sys

import torch

# The threads of a warp.
WARP = 32


def capability_of(device: torch.device) -> int:
    """Returns the compute capability, such as 90 for 9.0; on a CPU, which interprets the kernels, 80."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return 10 * major + minor


def shared_memory_of(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may have; on a CPU, which interprets the kernels, any number.

    PyTorch for AMD's GPUs tells only `shared_memory_per_block`, which is all that a program may have there.
    """
    if device.type != "cuda":
        return sys.maxsize
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
