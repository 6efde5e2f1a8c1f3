"""Bad updates: named with layer and documents, kept, and then skipped, rolled back or the end of the run."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.training import LLAMA, curve, run, run_forked
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain.engines.interface import Engine
from dynattn.scripts.pretrain.guard import ENOUGH, DivergedError, find_fault, find_layer
from dynattn.scripts.pretrain.outputs import checkpoint
from dynattn.scripts.pretrain.trainer import Trainer

BAD = 7


def test_a_spike_is_far_above_the_losses_before_it():
    recent = [3.0 + 0.1 * (-1) ** n for n in range(ENOUGH)]
    assert find_fault(3.3, 1.0, recent, threshold=4.0) is None
    assert find_fault(3.6, 1.0, recent, threshold=None) is None
    assert find_fault(3.6, 1.0, recent[1:], threshold=4.0) is None
    assert "loss nan" in str(find_fault(math.nan, 1.0, recent, threshold=None))
    assert "more than 4 standard deviations above 3 +- 0.1" in str(find_fault(3.6, 1.0, recent, threshold=4.0))
    assert "gradient norm inf" in str(find_fault(3.0, math.inf, recent, threshold=None))


def test_the_innermost_module_that_fails_is_named(corpus: Path, tmp_path: Path):
    model = LlamaForCausalLM.from_pretrained(run(tmp_path / "run", corpus, max_steps=1, warmup_steps=0).model)
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    model(**batch).loss.backward()
    assert "the largest" in find_layer(model, lambda b: model(**b), [batch])
    model.model.layers[0].mlp.up_proj.weight.grad[0, 0] = math.nan
    assert find_layer(model, lambda b: model(**b), [batch]) == "the gradient of model.layers.0.mlp.up_proj.weight"
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = math.nan
    assert find_layer(model, lambda b: model(**b), [batch]) == "the output of model.layers.1.mlp.up_proj"


def test_a_compiled_module_that_fails_is_named(corpus: Path, tmp_path: Path):
    model = LlamaForCausalLM.from_pretrained(run(tmp_path / "run", corpus, max_steps=1, warmup_steps=0).model)
    model.compile(backend="eager")
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    with torch.no_grad():
        model(**batch)  # compiles it, as a validation before the bad update does
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = math.nan
    assert find_layer(model, lambda b: model(**b), [batch]) == "the output of model.layers.1.mlp.up_proj"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sequences of each update in the order in which they are read; those of update 7 make the loss infinite."""
    batches: list[list[int]] = []
    usual = Trainer._accumulate

    def accumulate(trainer: Trainer, micro_batches: Any) -> torch.Tensor:
        data_step = trainer.progress.step + trainer.progress.skipped
        batches.append(trainer.plan.order[data_step].tolist())
        loss = usual(trainer, micro_batches)
        return loss * math.inf if data_step == BAD - 1 else loss

    monkeypatch.setattr(Trainer, "_accumulate", accumulate)
    return batches


def check_kept(output: Path) -> None:
    kept = output / "incidents" / f"update-{BAD:06d}"
    facts = json.loads((kept / "update-00000.json").read_text())
    assert facts["step"] == BAD
    assert facts["documents"]
    assert all(name.startswith("document ") for name in facts["documents"])
    assert load_file(kept / "batch-00000.safetensors")["0.input_ids"].shape == (4, 32)


def test_by_default_the_run_stops_and_says_what_was_wrong(corpus: Path, tmp_path: Path, seen: list[list[int]]):
    wrong = r"update 7 has loss inf .* first in the gradient of .*document .* is kept in"
    with pytest.raises(UserError, match=rf"{wrong} .* last good checkpoint is .*step-000004"):
        run(tmp_path / "run", corpus)
    check_kept(tmp_path / "run")
    assert len(seen) == BAD
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_gradient_where_a_fault_began_is_named(
    value: float, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usual, name = Trainer._accumulate, "model.layers.0.mlp.up_proj.weight"

    def accumulate(trainer: Trainer, batches: Any) -> torch.Tensor:
        loss = usual(trainer, batches)
        trainer.accelerator.unwrap_model(trainer.model).get_parameter(name).grad[0, 0] = value
        return loss

    monkeypatch.setattr(Trainer, "_accumulate", accumulate)
    with pytest.raises(UserError, match=rf"gradient norm {value}, first in the gradient of {name};"):
        run(tmp_path / "run", corpus)


def test_metrics_of_an_update_that_was_not_made_are_json(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Engine, "clip", lambda *_: torch.tensor(math.inf))
    options: dict[str, Any] = {"on_bad_update": "skip", "max_steps": 2, "warmup_steps": 0}
    lines = (run(tmp_path / "run", corpus, **options).output / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    assert [line["grad_norm"] for line in found if line["split"] == "train"] == [None, None]


def test_a_skipped_update_changes_nothing(corpus: Path, tmp_path: Path, seen: list[list[int]]):
    result = run(tmp_path / "run", corpus, on_bad_update="skip")
    check_kept(tmp_path / "run")
    losses = curve(result.output, "step", "loss", split="train")
    assert [step for step, _ in losses] == list(range(1, 13))
    assert [step for step, loss in losses if loss is None] == [BAD]
    assert result.train_loss is not None
    assert math.isfinite(result.train_loss)
    with pytest.raises(UserError, match="training stopped"):
        run(tmp_path / "strict", corpus, on_bad_update="skip", max_bad_updates=0)


def test_a_rollback_goes_on_behind_the_bad_batch(corpus: Path, tmp_path: Path, seen: list[list[int]]):
    """The newest checkpoint is that of update 4; updates 5 and 6 are made again, with other data."""
    result = run(tmp_path / "run", corpus, on_bad_update="rollback")
    check_kept(tmp_path / "run")
    assert result.steps == 12
    steps = [step for (step,) in curve(result.output, "step", split="train")]
    assert steps == list(range(1, 13))
    found = list(seen)
    seen.clear()
    run(tmp_path / "whole", corpus, on_bad_update="skip", max_steps=BAD + 8)  # every update reads the next data
    assert found == seen
    assert math.isfinite(result.validation_loss)


def test_the_same_update_may_be_bad_again_with_other_data(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Update 7 is bad with the data of 7; it is made again with that of 10, which is bad, too."""
    usual = Trainer._accumulate

    def accumulate(trainer: Trainer, batches: Any) -> torch.Tensor:
        return usual(trainer, batches) * (math.inf if trainer.progress.data_step + 1 in (7, 10) else 1.0)

    monkeypatch.setattr(Trainer, "_accumulate", accumulate)
    run(tmp_path / "run", corpus, on_bad_update="rollback")
    folders = sorted((tmp_path / "run" / "incidents").iterdir())
    assert [folder.name for folder in folders] == ["update-000007", "update-000007-data-000010"]
    one, two = (load_file(folder / "batch-00000.safetensors")["0.input_ids"] for folder in folders)
    assert not torch.equal(one, two)


def test_a_rollback_stays_on_the_line_that_an_earlier_checkpoint_began(
    interrupted: Path, corpus: Path, tmp_path: Path, seen: list[list[int]]
):
    """The run had saved update 8 before it went back to update 4, and update 7 is bad."""
    output = Path(shutil.copytree(interrupted, tmp_path / "run"))
    resume = str(output / "checkpoints" / "step-000004")
    run(output, corpus, resume=resume, on_bad_update="rollback")
    assert [step for (step,) in curve(output, "step", split="train")] == list(range(1, 13))
    assert len(seen) == 3 + 8
    progress = checkpoint.read_state(output / "checkpoints" / "step-000012")["progress"]
    assert (progress["skipped"], progress["bad_updates"]) == (3, 1)


def test_nothing_to_roll_back_to_ends_the_run(corpus: Path, tmp_path: Path, seen: list[list[int]]):
    with pytest.raises(DivergedError, match="no checkpoint was saved to roll back to"):
        run(tmp_path / "run", corpus, on_bad_update="rollback", save_every=10)


@pytest.mark.parametrize(
    ("engine", "choice"), [("fsdp2", "skip"), pytest.param("zero3", "stop", marks=pytest.mark.slow)]
)
def test_a_bad_batch_of_one_process_ends_all_where_weights_are_shards(
    engine: str, choice: str, corpus: Path, tmp_path: Path
):
    """One process finds its first forward pass bad; the other, whose passes are good, has to join the search."""
    if engine == "zero3":
        pytest.importorskip("deepspeed", reason="the engines zero1 to zero3 need the extra `deepspeed`")
    usual = Trainer._accumulate

    def accumulate(trainer: Trainer, micro_batches: Any) -> torch.Tensor:
        loss = usual(trainer, micro_batches)
        is_bad = trainer.progress.data_step == BAD - 1 and trainer.accelerator.process_index == 0
        if is_bad:
            module = trainer.accelerator.unwrap_model(trainer.model).model.layers[0].mlp
            module.register_forward_hook(lambda *_: _[-1] * math.nan)
        return loss * math.inf if is_bad else loss

    options = {"engine": engine, "batch_size": 1, "gradient_accumulation_steps": 2, "on_bad_update": choice}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError) as caught:
        patch.setattr(Trainer, "_accumulate", accumulate)
        run_forked(2, tmp_path / "run", corpus, **options | {"max_bad_updates": 0})
    told = str(caught.value)
    assert told.count("update 7 has loss inf") >= 2
    assert told.count("first in the output of model.layers.0.mlp;") >= 2
    for process in (0, 1):
        facts = json.loads(
            (tmp_path / "run" / "incidents" / f"update-{BAD:06d}" / f"update-{process:05d}.json").read_text()
        )
        assert facts["layer"] == "the output of model.layers.0.mlp"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("choice", ["skip", "rollback"])
def test_runs_in_shards_go_on_after_a_bad_update_as_one_process_does(
    engine: str, choice: str, corpus: Path, tmp_path: Path
):
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the engines zero1 to zero3 need the extra `deepspeed`")
    usual = Trainer._accumulate

    def accumulate(trainer: Trainer, micro_batches: Any) -> torch.Tensor:
        loss = usual(trainer, micro_batches)
        return loss * math.inf if trainer.progress.data_step == BAD - 1 else loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_accumulate", accumulate)
        without_dropout = {"model_config": {**LLAMA, "attention_dropout": 0.0}, "on_bad_update": choice}
        alone = run(tmp_path / "alone", corpus, **without_dropout).output
        run_forked(2, tmp_path / "shards", corpus, **without_dropout, engine=engine, batch_size=2)
    one, two = (curve(output, "step", "loss", split="train") for output in (alone, tmp_path / "shards"))
    made = [step for step, loss in one if loss is not None]
    assert made == [step for step, loss in two if loss is not None]
    assert (BAD in made) == (choice == "rollback")
    # float32 has 24 bits; twelve updates of a small model carry an error on without making it grow much.
    assert [loss for _, loss in two if loss] == pytest.approx([loss for _, loss in one if loss], rel=2**-16)
