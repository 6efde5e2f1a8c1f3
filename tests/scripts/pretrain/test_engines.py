"""Engines: every split of a run into processes, accumulation and batches, sharded or not, makes the same curve."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.training import RUN, curve, killed_after, losses, run, run_forked
from safetensors.torch import load_file

from dynattn.scripts.pretrain.consolidate import ConsolidateArguments, consolidate

ZERO = ("zero1", "zero2", "zero3")
DCFORMER = {
    **RUN,
    "model_type": "dcformer",
    "model_size": "tiny",
    "model_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "batch_size": 8,
    "max_steps": 8,
    "eval_every": 8,
}


def split(processes: int, accumulation: int = 1) -> dict[str, Any]:
    """Updates of eight sequences, whatever the number of processes and of forward passes."""
    return {"batch_size": 8 // processes // accumulation, "gradient_accumulation_steps": accumulation}


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process and one forward pass."""
    return run(tmp_path_factory.mktemp("alone") / "run", corpus, **DCFORMER).output


@pytest.fixture(scope="module")
def noise(alone: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """What it changes to add up the same gradients in another order, in one process."""
    folder = tmp_path_factory.mktemp("noise")
    others = [run(folder / f"{n}", corpus, **{**DCFORMER, **split(1, n)}).output for n in (2, 8)]
    return max(abs(losses(other) - losses(alone)).max() for other in others)


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs in several processes with an engine; in stage 3 of ZeRO small weights are sharded, too."""

    def run_sharded(engine: str, processes: int, output: Path, corpus: Path, **changes: Any) -> None:
        if engine in ZERO:
            # Imported here, DeepSpeed is there in all processes, which are copies of this one.
            pytest.importorskip("deepspeed", reason="the engines zero1 to zero3 need the extra `deepspeed`")
            monkeypatch.setattr("dynattn.scripts.pretrain.engines.zero.PERSISTENT_ELEMENTS", 0)
        changes = {**DCFORMER, **split(processes), "engine": engine, **changes}
        run_forked(processes, output, corpus, **changes)

    return run_sharded


def test_two_processes_with_shards_make_the_curve_of_one(alone: Path, noise: float, corpus: Path, tmp_path: Path):
    run_forked(2, tmp_path / "run", corpus, **{**DCFORMER, **split(2), "engine": "fsdp2"})
    assert 0 < noise < 1e-4
    assert abs(losses(tmp_path / "run") - losses(alone)).max() < 4 * noise
    assert curve(tmp_path / "run", "step", "split", "tokens") == curve(alone, "step", "split", "tokens")
    one, two = (load_file(output / "model" / "model.safetensors") for output in (alone, tmp_path / "run"))
    assert {name: weight.shape for name, weight in one.items()} == {name: weight.shape for name, weight in two.items()}


def test_weights_in_shards_resume_in_one_piece_and_back(alone: Path, noise: float, corpus: Path, tmp_path: Path):
    """Two processes, one, two: each continues what the other kind has saved, after a kill."""
    output = tmp_path / "run"
    with killed_after(5):
        run(output, corpus, **{**DCFORMER, "save_every": 2})
    run_forked(2, output, corpus, **{**DCFORMER, **split(2), "save_every": 2, "engine": "fsdp2", "max_steps": 8})
    told = output.with_name("run-0.txt").read_text()
    assert "resuming from" in told
    assert "changed since it was saved: engine (was ddp, is fsdp2), processes (was 1, is 2), batch_size (was 8" in told
    assert "engine: fsdp2, 2 processes on cpu, weights, gradients and optimizer state in 2 shards" in told
    assert abs(losses(output) - losses(alone)).max() < 4 * noise
    elsewhere = tmp_path / "elsewhere"
    run(elsewhere, corpus, **{**DCFORMER, "resume": str(output / "checkpoints" / "step-000006")})
    assert abs(losses(elsewhere) - losses(alone)[6:]).max() < 4 * noise


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "hsdp", *ZERO])
@pytest.mark.parametrize(("processes", "accumulation"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_every_split_makes_the_same_curve(
    engine: str,
    processes: int,
    accumulation: int,
    alone: Path,
    noise: float,
    corpus: Path,
    tmp_path: Path,
    sharded: Callable[..., None],
):
    changes = split(processes, accumulation)
    if engine == "hsdp":
        changes["shard_processes"] = processes // 2
    sharded(engine, processes, tmp_path / "run", corpus, **changes)
    assert abs(losses(tmp_path / "run") - losses(alone)).max() < 4 * noise


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp2", *ZERO])
def test_compute_in_bf16_keeps_float32_weights(
    sharding: str, corpus: Path, tmp_path: Path, sharded: Callable[..., None]
):
    for engine in ("ddp", sharding):
        sharded(engine, 2, tmp_path / engine, corpus, mixed_precision="bf16")
        saved = {
            name: tensor.dtype
            for file in (tmp_path / engine / "checkpoints" / "step-000008" / "tensors").iterdir()
            for name, tensor in load_file(file).items()
        }
        assert set(saved.values()) == {torch.float32}
    # bf16 has 8 bits: losses of about 5 are sums of values that are off by up to 2**-9 of themselves.
    assert abs(losses(tmp_path / "ddp") - losses(tmp_path / sharding)).max() < 5 * 2**-9


@pytest.mark.slow
def test_checkpointed_activations_in_shards_change_nothing(noise: float, alone: Path, corpus: Path, tmp_path: Path):
    run_forked(2, tmp_path / "run", corpus, **DCFORMER | split(2), engine="fsdp2", gradient_checkpointing=True)
    assert abs(losses(tmp_path / "run") - losses(alone)).max() < 4 * noise


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", *ZERO])
def test_shards_resume_bit_for_bit_and_become_a_model(
    engine: str, corpus: Path, tmp_path: Path, sharded: Callable[..., None]
):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    sharded(engine, 2, whole, corpus, save_every=2)
    saved = whole / "checkpoints" / "step-000004"
    sharded(engine, 2, resumed, corpus, resume=str(saved))
    assert curve(resumed, "step", "loss", "grad_norm") == curve(whole, "step", "loss", "grad_norm")[4:]
    consolidate(ConsolidateArguments(str(resumed), str(tmp_path / "model")))
    models = [load_file(folder / "model.safetensors") for folder in (whole / "model", tmp_path / "model")]
    for name, weight in models[0].items():
        assert torch.equal(weight, models[1][name]), name


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("ddp", "zero3"), ("zero1", "fsdp2"), ("zero3", "zero2")])
def test_shards_of_one_engine_become_those_of_another(
    first: str,
    second: str,
    alone: Path,
    noise: float,
    corpus: Path,
    tmp_path: Path,
    sharded: Callable[..., None],
):
    """From four processes to two, and from there to one."""
    sharded(first, 4, tmp_path / "first", corpus, save_every=2)
    saved = str(tmp_path / "first" / "checkpoints" / "step-000004")
    sharded(second, 2, tmp_path / "second", corpus, save_every=2, resume=saved)
    saved = str(tmp_path / "second" / "checkpoints" / "step-000006")
    run(tmp_path / "third", corpus, **{**DCFORMER, "resume": saved})
    assert abs(losses(tmp_path / "second") - losses(alone)[4:]).max() < 4 * noise
    assert abs(losses(tmp_path / "third") - losses(alone)[6:]).max() < 4 * noise
