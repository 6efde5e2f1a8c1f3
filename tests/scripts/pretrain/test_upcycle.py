"""Continuing an upcycled checkpoint: a learning rate of the composition's own, and parent weights that wait."""

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import assert_same_weights, weights_of
from cases.training import call, parse, saved_tensors
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.convert import NEOX, UpcycleArguments, upcycle_checkpoint
from dynattn.scripts.pretrain import PretrainArguments, Result, pretrain
from dynattn.scripts.pretrain.model import composition_weights
from dynattn.scripts.pretrain.optimizer import build_optimizer
from dynattn.scripts.pretrain.outputs.metrics import read_metrics
from dynattn.scripts.pretrain.schedule import RateSchedule, group_schedules, prepare_update

NEOX_CONFIG = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
RUN: dict[str, Any] = {
    "sequence_length": 32,
    "batch_size": 4,
    "max_steps": 7,
    "warmup_steps": 2,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "validation_share": 0.1,
    "log_every": 1,
    "eval_every": 4,
    "save_every": 1,
    "keep_checkpoints": 0,
}
FROZEN = 4
COMPOSITION = ".composition."


@pytest.fixture(scope="module")
def parent(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-NeoX after one update."""
    options = {"model_type": "gpt_neox", "model_config": NEOX_CONFIG, "vocab_size": 300, "max_steps": 1}
    return run(tmp_path_factory.mktemp("runs") / "parent", corpus, **options, warmup_steps=0).model


@pytest.fixture(scope="module")
def upcycled(parent: Path) -> Path:
    destination = parent.with_name("upcycled")
    upcycle_checkpoint(UpcycleArguments(source=str(parent), destination=str(destination)), NEOX)
    return destination


@pytest.fixture(scope="module")
def frozen_first(upcycled: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    output = tmp_path_factory.mktemp("runs") / "frozen_first"
    return run(output, corpus, init_from=str(upcycled), freeze_parent_steps=FROZEN)


def run(output: Path, corpus: Path, **changes: Any) -> Result:
    return pretrain(PretrainArguments(**{"output": str(output), "dataset": str(corpus), **RUN, **changes}))


def weights_after(result: Result, step: int) -> dict[str, Tensor]:
    return saved_tensors(result.output, step, "model.")


def train_lines(result: Result) -> list[dict[str, Any]]:
    return read_metrics(result.output / "metrics.jsonl", "train")


def formula(step: int, peak: float, begin: int = 0) -> float:
    """The schedule of `RUN`: two updates of warmup from `begin`, a cosine from update 2 to the last."""
    cosine = (1 + math.cos(math.pi * max(0, step - 2) / (7 - 1 - 2))) / 2
    return peak * (0.1 + 0.9 * cosine) * min(1.0, max(0, step - begin + 1) / 2)


def test_frozen_weights_stay_bit_for_bit_and_then_move(frozen_first: Result, upcycled: Path):
    before = load_file(upcycled / "model.safetensors")
    parents = {name for name in before if COMPOSITION not in name}
    assert 0 < len(parents) < len(before)
    for step in range(1, FROZEN + 1):
        after = weights_after(frozen_first, step)
        assert {name for name in before if torch.equal(before[name], after[name])} == parents
    after = weights_after(frozen_first, FROZEN + 1)
    assert not {name for name in parents if torch.equal(before[name], after[name])}


def test_moments_of_frozen_weights_begin_with_their_first_update(frozen_first: Result):
    weights = set(weights_after(frozen_first, 7))
    composition = {name for name in weights if COMPOSITION in name}
    for step, expected in {FROZEN: dict.fromkeys(composition, FROZEN), 7: dict.fromkeys(weights, 7 - FROZEN)}.items():
        state = saved_tensors(frozen_first.output, step, "optimizer.")
        made = {name.removesuffix(".step"): int(count) for name, count in state.items() if name.endswith(".step")}
        assert made == expected | dict.fromkeys(composition, step)


@pytest.mark.parametrize("step", [1, FROZEN - 1, FROZEN, FROZEN + 1])
def test_resuming_around_the_freeze_repeats_the_uninterrupted_run(
    step: int, frozen_first: Result, upcycled: Path, corpus: Path, tmp_path: Path
):
    checkpoint = frozen_first.output / "checkpoints" / f"step-{step:06d}"
    options = {"init_from": str(upcycled), "freeze_parent_steps": FROZEN, "resume": str(checkpoint)}
    resumed = run(tmp_path / "run", corpus, **options)
    assert_same_weights(weights_of(resumed.model), weights_of(frozen_first.model))
    names = ("step", "loss", "grad_norm", "learning_rate", "composition_learning_rate")
    tail = [[line[name] for name in names] for line in train_lines(frozen_first)[step:]]
    assert [[line[name] for name in names] for line in train_lines(resumed)] == tail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze_parent_steps": 3}, r"freeze_parent_steps \(was 4, is 3\)"),
        ({"composition_learning_rate": 2e-2}, r"composition_learning_rate \(was None, is 0.02\)"),
        ({"init_from": "a copy"}, r"init_from \(was .+/upcycled, is .+/other\)"),
    ],
)
def test_a_run_resumes_only_with_its_own_freeze_and_rates(
    changes: dict[str, Any], message: str, frozen_first: Result, upcycled: Path, corpus: Path, tmp_path: Path
):
    checkpoint = str(frozen_first.output / "checkpoints" / "step-000002")
    if "init_from" in changes:
        changes = {"init_from": str(shutil.copytree(upcycled, tmp_path / "other"))}
    options = {"init_from": str(upcycled), "freeze_parent_steps": FROZEN, "resume": checkpoint}
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", corpus, **{**options, **changes})


def test_a_run_resumes_although_its_parent_has_moved_with_it(
    frozen_first: Result, upcycled: Path, corpus: Path, tmp_path: Path
):
    moved = shutil.copytree(upcycled, tmp_path / upcycled.parent.name / upcycled.name)
    checkpoint = str(frozen_first.output / "checkpoints" / "step-000002")
    options = {"init_from": str(moved), "freeze_parent_steps": FROZEN, "resume": checkpoint}
    assert run(tmp_path / "run", corpus, **options).steps == frozen_first.steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_from": "model"}, "--overwrite would delete init_from="),
        ({"init_from": "checkpoints/step-000002"}, "--overwrite would delete init_from="),
        ({"tokenizer": "model"}, "--overwrite would delete tokenizer="),
        ({"trackers": ["trackio"]}, "trackers: trackio is not installed; `pip install trackio`, or leave it out"),
    ],
)
def test_overwriting_keeps_the_earlier_run_if_the_next_one_needs_it_or_cannot_begin(
    options: dict[str, Any], message: str, frozen_first: Result, upcycled: Path, corpus: Path, tmp_path: Path
):
    earlier = shutil.copytree(frozen_first.output, tmp_path / "run")
    options = {name: str(earlier / value) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(UserError, match=message):
        run(earlier, corpus, overwrite=True, **{"init_from": str(upcycled), **options})
    assert (earlier / "model" / "model.safetensors").exists()


def test_overwriting_removes_the_link_that_a_model_is_and_not_what_it_leads_to(
    frozen_first: Result, upcycled: Path, corpus: Path, tmp_path: Path
):
    earlier, elsewhere = shutil.copytree(frozen_first.output, tmp_path / "run"), tmp_path / "elsewhere"
    (earlier / "model").rename(elsewhere)
    (earlier / "model").symlink_to(elsewhere, target_is_directory=True)
    run(earlier, corpus, init_from=str(upcycled), overwrite=True)
    assert not (earlier / "model").is_symlink() and (elsewhere / "model.safetensors").exists()


def test_frozen_weights_warm_up_when_they_begin_to_learn(frozen_first: Result):
    lines = train_lines(frozen_first)
    expected = [0.0 if step < FROZEN else formula(step, 1e-2, begin=FROZEN) for step in range(7)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(expected)
    assert [line["composition_learning_rate"] for line in lines] == pytest.approx([formula(s, 1e-2) for s in range(7)])


def test_the_schedule_starts_anew_and_multiplies_both_rates(upcycled: Path, corpus: Path, tmp_path: Path):
    result = run(tmp_path / "run", corpus, init_from=str(upcycled), composition_learning_rate=5e-2)
    lines = train_lines(result)
    assert [line["learning_rate"] for line in lines] == pytest.approx([formula(step, 1e-2) for step in range(7)])
    assert [line["composition_learning_rate"] for line in lines] == pytest.approx([formula(s, 5e-2) for s in range(7)])


def test_each_weight_moves_by_its_own_rate(upcycled: Path, corpus: Path, tmp_path: Path):
    """Adam's first update moves every weight that has a gradient by the learning rate.

    An identity lets none through to the composition's first layer.
    """
    options = {
        "init_from": str(upcycled),
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "max_steps": 1,
        "adam_epsilon": 1e-30,
    }
    result = run(tmp_path / "run", corpus, **options, learning_rate=1e-3, composition_learning_rate=1e-2)
    before, after = load_file(upcycled / "model.safetensors"), weights_after(result, 1)
    for name in (name for name in before if not name.endswith("hidden_weight")):
        moved = (after[name] - before[name]).abs().max().item()
        assert moved == pytest.approx(1e-2 if COMPOSITION in name else 1e-3, rel=1e-3), name


def test_freezing_is_two_optimizers_of_which_one_begins_later(upcycled: Path):
    """Against AdamW as it is: over the composition alone at first, and a new one over the parent's weights later."""
    arguments = PretrainArguments(output="x", freeze_parent_steps=2, composition_learning_rate=3e-3, warmup_steps=0)
    schedule = RateSchedule(1e-3, warmup_steps=0, max_steps=4, min_ratio=1.0, first_step=2)
    model = AutoModelForCausalLM.from_pretrained(upcycled)
    twin = copy.deepcopy(model)
    optimizer, schedules = build_optimizer(model, arguments), group_schedules(schedule, arguments)
    composition = {id(weight) for weight in composition_weights(twin)}
    embeddings = {id(twin.get_input_embeddings().weight)}
    parents = [weight for weight in twin.parameters() if id(weight) not in composition]
    decayed = [weight for weight in parents if weight.ndim == 2 and id(weight) not in embeddings]
    rest = [weight for weight in parents if weight.ndim == 1 or id(weight) in embeddings]
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
    early = torch.optim.AdamW(composition_weights(twin), lr=3e-3, weight_decay=0.1, **settings)
    late = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                             lr=1e-3, **settings)  # fmt: skip
    for step in range(4):
        for one in (model, twin):
            backward(one, step)
        prepare_update(optimizer, schedules, step)
        optimizer.step()
        for other in (early, late)[: 1 if step < 2 else 2]:
            other.step()
        for one in (model, twin):
            one.zero_grad()
        for (name, weight), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(weight, expected), (step, name)


def backward(model: nn.Module, seed: int) -> None:
    ids = torch.randint(250, (2, 16), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()


def test_freezing_knows_accumulation(frozen_first: Result, upcycled: Path, corpus: Path, tmp_path: Path):
    options = {"init_from": str(upcycled), "freeze_parent_steps": FROZEN, "batch_size": 1}
    result = run(tmp_path / "run", corpus, **options, gradient_accumulation_steps=4)
    before, after = load_file(upcycled / "model.safetensors"), weights_after(result, FROZEN)
    assert all(torch.equal(before[name], after[name]) == (COMPOSITION not in name) for name in before)
    assert [line["loss"] for line in train_lines(result)] == pytest.approx(
        [line["loss"] for line in train_lines(frozen_first)], rel=1e-4
    )


@pytest.mark.slow
def test_freezing_knows_processes(frozen_first: Result, upcycled: Path, corpus: Path, tmp_path: Path):
    options = {**RUN, "output": tmp_path / "run", "dataset": corpus, "init_from": upcycled, "batch_size": 2}
    call({**options, "freeze_parent_steps": FROZEN}, processes=2)
    before, after = load_file(upcycled / "model.safetensors"), saved_tensors(tmp_path / "run", FROZEN, "model.")
    assert all(torch.equal(before[name], after[name]) == (COMPOSITION not in name) for name in before)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in train_lines(frozen_first)], rel=1e-4
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze_parent_steps": -1}, "freeze_parent_steps=-1 must be zero or more"),
        ({"composition_learning_rate": -1e-3}, "composition_learning_rate=-0.001 must be positive"),
        ({"composition_learning_rate": 0.0}, "composition_learning_rate=0.0 must be positive"),
        ({"freeze_parent_steps": 7}, "freeze_parent_steps=7 must be below the 7 updates of the run"),
        ({"freeze_parent_steps": 70, "max_steps": None, "epochs": 1}, "freeze_parent_steps=70 must be below the"),
        ({"sequence_length": 4096}, r"above the model's context of 2048 tokens \(max_position_embeddings\); lower it$"),
    ],
)
def test_impossible_values_are_told_before_anything_is_written(
    changes: dict[str, Any], message: str, upcycled: Path, corpus: Path, tmp_path: Path
):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", corpus, **{"init_from": str(upcycled), **changes})
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_model_is_told_before_the_data_is_read(
    upcycled: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, adapter = tmp_path / "earlier", shutil.copytree(upcycled, tmp_path / "adapter")
    shutil.copytree(upcycled, earlier / "model")
    (adapter / "config.json").rename(adapter / "adapter_config.json")
    with pytest.raises(UserError, match=r"the model of this run is in .+/earlier/model"):
        run(tmp_path / "run", corpus, init_from=str(earlier))
    with pytest.raises(UserError, match=r"adapter_config\.json\); merge it into its model"):
        run(tmp_path / "run", corpus, init_from=str(adapter))
    assert "tokenizing" not in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"freeze_parent_steps": 2}, {"composition_learning_rate": 1e-3}])
@pytest.mark.parametrize("origin", ["parent", "uncomposed"])
def test_a_model_that_composes_nothing_is_refused(
    changes: dict[str, Any], origin: str, parent: Path, corpus: Path, tmp_path: Path
):
    off = {"model_type": "dcpythia", "model_config": {**NEOX_CONFIG, "compose_pre": False, "compose_post": False}}
    model = {"init_from": str(parent)} if origin == "parent" else {**off, "vocab_size": 300}
    fix = r"upcycle the checkpoint first \(with `dynattn convert`, or with dynattn.with_composed_heads if"
    with pytest.raises(UserError, match=f"are for models that compose heads, and this .* has no weights for .*{fix}"):
        run(tmp_path / "run", corpus, **model, **changes)
    assert not (tmp_path / "run").exists()


def test_the_shipped_recipe_trains(upcycled: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    options = {"init_from": upcycled, "dataset": corpus, "output": "run", "max_steps": 6, "sequence_length": 32}
    options |= {"freeze_parent_steps": 2, "warmup_steps": 2, "validation_share": 0.1}
    arguments = parse("upcycle.yaml", *(f"--{name}={value}" for name, value in options.items()))
    assert arguments.model_type is None
    result = pretrain(arguments)
    assert AutoModelForCausalLM.from_pretrained(result.model).config.model_type == "dcpythia"
    assert len(AutoTokenizer.from_pretrained(result.model)) == len(AutoTokenizer.from_pretrained(upcycled))
