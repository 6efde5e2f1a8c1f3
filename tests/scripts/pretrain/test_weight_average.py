"""The moving average of the weights: its values, its place in checkpoints, and the model that it becomes."""

import shutil
from pathlib import Path

import pytest
import torch
from cases.checkpoints import assert_same_weights, weights_of
from cases.training import curve, killed_run, run, saved_tensors
from safetensors.torch import load_file
from torch import nn

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain.consolidate import ConsolidateArguments, consolidate
from dynattn.scripts.pretrain.weight_average import WeightAverage


def test_the_average_is_that_of_the_formula_and_swaps_both_ways():
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    average = WeightAverage(model, 0.5)
    expected = model.weight.item()
    for step in range(12):
        nn.init.constant_(model.weight, step)
        average.update(model, step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert average.tensors["weight"].item() == pytest.approx(expected, rel=1e-14)
    with average.in_place(model):
        assert model.weight.item() == pytest.approx(expected, rel=1e-14)
    assert model.weight.item() == 11


def test_averages_are_saved_scored_resumed_and_exported(corpus: Path, tmp_path: Path):
    straight, output = tmp_path / "straight", tmp_path / "run"
    run(straight, corpus, ema_decay=0.5)
    killed_run(output, corpus, 10, ema_decay=0.5)
    run(output, corpus, ema_decay=0.5)
    averages = saved_tensors(output, 12, "average.")
    weights = saved_tensors(output, 12, "model.")
    exported, own = (load_file(output / name / "model.safetensors") for name in ("model_average", "model"))
    for name, expected in saved_tensors(straight, 12, "average.").items():
        assert torch.equal(averages[name], expected), name
        assert not torch.equal(averages[name], weights[name]), name
        assert torch.equal(exported[name], expected), name
        assert torch.equal(own[name], weights[name]), name
    last = curve(output, "average_loss", split="validation")[-1][0]
    assert f"{last:.4f}" in (output / "model_average" / "README.md").read_text()
    assert curve(output, "loss", "average_loss") == curve(straight, "loss", "average_loss")
    assert all(loss is not None for (loss,) in curve(output, "average_loss", split="validation"))
    consolidate(ConsolidateArguments(str(output), str(tmp_path / "average"), average=True))
    assert_same_weights(weights_of(tmp_path / "average"), exported)


def test_a_run_without_an_average_has_none(interrupted: Path, corpus: Path, tmp_path: Path):
    with pytest.raises(UserError, match="keeps no average; leave out --average"):
        consolidate(ConsolidateArguments(str(interrupted), str(tmp_path / "average"), average=True))
    with pytest.raises(UserError, match=r"this changed: ema_decay \(was None, is 0.9\)"):
        run(Path(shutil.copytree(interrupted, tmp_path / "run")), corpus, ema_decay=0.9)
