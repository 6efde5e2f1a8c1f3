"""Dry runs: memory against measured peaks, operations against the model's, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.training import parse

from dynattn import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.common.flops import ModelFlops
from dynattn.scripts.common.measuring import peak_memory
from dynattn.scripts.pretrain.main import RECIPES, main
from dynattn.scripts.pretrain.planning.dry_run import RECORDED_RATIO, chunk_bytes, estimate
from dynattn.scripts.pretrain.planning.hardware import GPUS, parse_cluster
from dynattn.scripts.pretrain.planning.memory import engine_memory, rehearse

RECORDS = Path(__file__).parents[4] / "model_cards" / "records"
SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4096}
MODELS = {
    "dcformer": lambda: DCFormerForCausalLM(DCFormerConfig(**SHAPE, intermediate_size=768)),
    "dcpythia": lambda: DCPythiaForCausalLM(DCPythiaConfig(**SHAPE, intermediate_size=1024)),
    "plain": lambda: DCFormerForCausalLM(
        DCFormerConfig(**SHAPE, intermediate_size=768, compose_pre=False, compose_post=False)
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "length"), [(1, 1024), (4, 512)])
def test_memory_is_that_of_a_measured_update_within_a_tenth(name: str, batch: int, length: int):
    model = MODELS[name]().train()
    ids = torch.randint(SHAPE["vocab_size"], (batch, length))

    def update() -> None:
        model(input_ids=ids, labels=ids, skip_logits=True, use_cache=False).loss.backward()

    def first() -> None:
        model.zero_grad()
        update()

    update()  # compiles what is compiled once
    workspace = chunk_bytes(model.config, length)
    found = rehearse(MODELS[name], batch, length, bf16=False, workspace=workspace)
    measured = {"peak": peak_memory(first, torch.device("cpu"))}
    # Of the first update the old gradients were freed at its start, which the profiler counts, too.
    measured["peak"] += found.weights
    measured["activations"] = peak_memory(update, torch.device("cpu"))
    print(name, batch, length, measured, found)
    assert found.peak == pytest.approx(measured["peak"], rel=0.1)
    assert found.activations == pytest.approx(measured["activations"], rel=0.1)


def test_checkpointing_and_sharding_need_less():
    def checkpointed() -> Any:
        model = MODELS["dcformer"]()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    plain, saving = (rehearse(build, 1, 256, bf16=False) for build in (MODELS["dcformer"], checkpointed))
    assert saving.activations < 0.7 * plain.activations
    weights = sum(weight.numel() * 4 for weight in MODELS["dcformer"]().parameters())
    assert plain.weights == weights
    ddp, zero1, fsdp = (engine_memory(n, plain, 16, 8, bf16=False) for n in ("ddp", "zero1", "fsdp2"))
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (weights, weights, 2 * weights)
    assert zero1.optimizer == 2 * weights // 16
    assert fsdp.weights == weights // 16
    assert engine_memory("hsdp", plain, 16, 8, bf16=False).weights == weights // 8


def test_operations_and_the_share_of_composition_are_the_models():
    arguments = parse("tiny.yaml", "--output", "x")
    found = estimate(arguments, *parse_cluster("h100:2"))
    with torch.device("meta"):
        models = [
            DCFormerForCausalLM(DCFormerConfig.from_size("tiny", **changes))
            for changes in ({}, {"compose_pre": False, "compose_post": False})
        ]
    composed, plain = (ModelFlops.of(model).training(torch.arange(256)) / 256 for model in models)
    assert found.flops == composed
    assert found.composition_share == pytest.approx(1 - plain / composed)
    assert found.tokens_per_update == 8 * 256 * 2
    assert found.parameters.total == models[0].num_parameters()
    assert found.days == pytest.approx(300 * 8 * 256 * 2 / found.tokens_per_second / 86400)


def test_the_ratio_is_the_recorded_one():
    record = json.loads((RECORDS / "benchmark-cpu" / "training-2048" / "record.json").read_text())
    ratios = {row["name"]: row["ratio"] for row in record["cases"][0]["rows"]}
    assert pytest.approx(ratios["chunked-stepwise"], abs=0.005) == RECORDED_RATIO


def test_the_command_prints_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["tiny.yaml", "--output", str(tmp_path / "run"), "--dry_run", "--on", "a100:4", "--price_per_gpu_hour=2"]
    assert main(options) == 0
    told = capsys.readouterr().out
    for expected in (
        "parameters",
        "for composition",
        "fsdp2",
        "an estimate",
        "not measured on a GPU",
        "GPU hours at 2",
    ):
        assert expected in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("on", ["h100", "h100:0", "h100:-1", "tpu:4", ""])
def test_hardware_that_is_not_known_is_refused(on: str):
    with pytest.raises(UserError, match=r"must be NAME:COUNT like h100:64, with a name of a100"):
        parse_cluster(on)
    assert parse_cluster("H200:64") == (GPUS["h200"], 64)


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.yaml")))
def test_every_recipe_is_valid_and_names_what_exists(recipe: str):
    arguments = parse(recipe)
    assert arguments.max_steps
    if arguments.model_size and arguments.model_type:
        sizes = {"dcformer": DCFormerConfig, "dcpythia": DCPythiaConfig}
        assert arguments.model_type == "rcmha" or arguments.model_size in sizes[arguments.model_type].sizes
