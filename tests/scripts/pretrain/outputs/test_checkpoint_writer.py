"""The files that hold the tensors of a checkpoint, and checkpoints that are written in the background."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from dynattn.scripts.pretrain.carried_memory import CarriedMemory
from dynattn.scripts.pretrain.outputs import training_state
from dynattn.scripts.pretrain.outputs.checkpoint_writer import CheckpointWriter
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


def test_a_checkpoint_is_complete_before_the_next_is_begun(tmp_path: Path):
    """Also if training never found it written in between, and in the background."""
    writer = CheckpointWriter(Accelerator(cpu=True), tmp_path, keep=0, in_background=True)
    for step in (4, 8):
        writer.write(step, {}, {"model.weight": torch.full((3,), step)}, CarriedMemory())
    writer.finish()
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000008"]
