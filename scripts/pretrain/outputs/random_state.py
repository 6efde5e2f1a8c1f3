"""The state of all random generators of a process, as tensors and JSON."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file


def random_state_file(folder: Path, process: int) -> Path:
    """The file in the folder of a checkpoint in which one process stores its random state."""
    return folder / f"random-{process:05d}.safetensors"


def save_random_state(file: Path, device: torch.device) -> None:
    """Writes the states of the generators of torch, of `device`, of NumPy and of Python."""
    kind, keys, *rest = np.random.get_state()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.array(keys))}
    if device.type != "cpu":
        tensors["device"] = torch.get_device_module(device).get_rng_state(device).cpu()
    save_file(tensors, file, {"python": json.dumps(random.getstate()), "numpy": json.dumps([kind, *rest])})


def load_random_state(file: Path, device: torch.device) -> None:
    """Restores what `save_random_state` wrote; a device keeps its state if the file is from a run without one.

    Raises:
        SafetensorError, KeyError, ValueError: the file holds something else.
    """
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (it is no mapping)
    kind, *rest = json.loads(metadata["numpy"])
    version, words, gauss = json.loads(metadata["python"])
    torch.set_rng_state(tensors["torch"])
    np.random.set_state((kind, tensors["numpy"].numpy(), *rest))
    random.setstate((version, tuple(words), gauss))
    if device.type != "cpu" and "device" in tensors:
        torch.get_device_module(device).set_rng_state(tensors["device"], device)
