"""The files that hold the tensors of a checkpoint."""

from pathlib import Path

import pytest
import torch

from dynattn.scripts.pretrain.outputs import training_state
from dynattn.scripts.pretrain.outputs.training_state import storage_writer, whole_sizes


def test_tensors_lie_in_files_that_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process writes its share of every tensor, so that several may have larger tensors in a file."""
    monkeypatch.setattr(training_state, "FILE_BYTES", 100)
    tensors = {
        "a": torch.zeros(5, 3),
        "b": torch.zeros(30, dtype=torch.int16),
        "c": torch.zeros(20),
        "d": torch.ones(()),
    }
    sizes = whole_sizes(tensors)
    assert sizes == {"a": 60, "b": 60, "c": 80, "d": 4}
    assert storage_writer(tmp_path, sizes, 1).fqn_to_index_mapping == {"a": 1, "b": 1, "c": 2, "d": 3}
    assert storage_writer(tmp_path, sizes, 2).fqn_to_index_mapping == {"a": 1, "b": 1, "c": 1, "d": 2}
