"""The recipes of today together: a run with all of them resumes bit for bit, and every engine makes its curve."""

from pathlib import Path
from typing import Any

import pytest
from cases.training import RUN, curve, killed_run, run, run_forked, saved_tensors, without_timing

RECIPE: dict[str, Any] = {
    **RUN,
    "model_type": "dcformer",
    "model_size": "tiny",
    "model_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "use_qk_norm": False},
    "optimizer": "muon",
    "z_loss": 1e-3,
    "ema_decay": 0.8,
    "base_width": 16,
    "length_warmup_steps": 8,
    "schedule": "wsd",
    "composition_learning_rate": 5e-3,
}


def losses(output: Path) -> list[float]:
    """Of all updates, validations and averages."""
    return [loss for line in curve(output, "loss", "average_loss") for loss in line if loss is not None]


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("straight") / "run", corpus, **RECIPE).output


def test_all_recipes_together_resume_bit_for_bit(straight: Path, corpus: Path, tmp_path: Path):
    output = tmp_path / "run"
    killed_run(output, corpus, 6, **RECIPE)
    run(output, corpus, **RECIPE)
    assert without_timing(output) == without_timing(straight)
    for prefix in ("model.", "optimizer.", "average."):
        expected = saved_tensors(straight, 12, prefix)
        assert expected
        found = saved_tensors(output, 12, prefix)
        assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_all_recipes_together_make_one_curve_in_two_processes(
    engine: str, straight: Path, corpus: Path, tmp_path: Path
):
    """Muon orthogonalizes in bf16, which has 8 bits: sums in another order may change the last bit of an update."""
    run_forked(2, tmp_path / "run", corpus, **RECIPE | {"batch_size": 2, "engine": engine})
    one, two = (losses(output) for output in (straight, tmp_path / "run"))
    assert two == pytest.approx(one, rel=2**-8)


@pytest.mark.slow
def test_shards_with_all_recipes_resume_in_one_piece(straight: Path, corpus: Path, tmp_path: Path):
    output = tmp_path / "run"
    run_forked(2, output, corpus, **RECIPE | {"batch_size": 2, "engine": "fsdp2", "max_steps": 12})
    elsewhere = tmp_path / "elsewhere"
    run(elsewhere, corpus, **RECIPE | {"resume": str(output / "checkpoints" / "step-000008")})
    expected = [loss for (loss,) in curve(straight, "loss", split="train")][8:]
    assert [loss for (loss,) in curve(elsewhere, "loss", split="train")] == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adamw"}, r"optimizer \(was muon, is adamw\)"),
        ({"z_loss": 0.0}, r"z_loss \(was 0.001, is 0.0\)"),
        ({"length_warmup_steps": 0}, r"length_warmup_steps \(was 8, is 0\)"),
    ],
)
def test_a_run_resumes_only_with_its_recipe(straight: Path, corpus: Path, tmp_path: Path, changes: Any, message: str):
    resume = {"resume": str(straight / "checkpoints" / "step-000008")}
    with pytest.raises(Exception, match=message):
        run(tmp_path / "run", corpus, **{**RECIPE, **resume, **changes})


def test_a_stable_run_may_be_told_late_when_to_end(corpus: Path, tmp_path: Path):
    """Its learning rates so far are those of the shorter run, which it then is bit for bit."""
    short = {**RUN, "schedule": "wsd", "decay_share": 0.25}
    expected = run(tmp_path / "expected", corpus, **short).output
    killed_run(tmp_path / "run", corpus, 6, **short | {"max_steps": 1000, "decay_share": 0.2})
    run(tmp_path / "run", corpus, **short)
    assert curve(tmp_path / "run", "step", "loss") == curve(expected, "step", "loss")


def test_z_loss_is_refused_by_models_that_do_not_know_it(corpus: Path, tmp_path: Path):
    with pytest.raises(Exception, match="z_loss is part of the loss of this package's models, and this is a llama"):
        run(tmp_path / "run", corpus, z_loss=1e-4)
