"""What `dcmha_triton` asks about the device that it runs on."""

import sys

import torch

# The threads of a warp.
WARP = 32


def shared_memory_of(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may have; on a CPU, which interprets the kernels, any number.

    PyTorch for AMD's GPUs tells only `shared_memory_per_block`, which is all that a program may have there.
    """
    if device.type != "cuda":
        return sys.maxsize
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
