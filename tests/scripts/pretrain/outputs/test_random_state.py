"""Random numbers go on in a resumed run where they were."""

import random
from pathlib import Path

import numpy as np
import torch

from dynattn.scripts.pretrain.outputs.random_state import load_random_state, save_random_state


def draw() -> list[float]:
    """Normal numbers too, of which NumPy and Python make two at a time and keep one."""
    return [torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random(), random.gauss()]


def test_every_generator_goes_on(tmp_path: Path) -> None:
    draw()
    save_random_state(tmp_path / "state.safetensors", torch.device("cpu"))
    expected = draw()
    for device in ("cpu", "cuda"):  # a run without a device made the file, which says nothing about one
        load_random_state(tmp_path / "state.safetensors", torch.device(device))
        assert draw() == expected
