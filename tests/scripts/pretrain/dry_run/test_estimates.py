"""Dry runs: memory against measured peaks, operations against the model's, and what is refused."""

import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.training import parse
from transformers import CONFIG_MAPPING, LlamaConfig

from dynattn import (
    DCFormerConfig,
    DCFormerForCausalLM,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    keep_attention_outputs,
)
from dynattn.configuration.mixers import MIXERS, NO_COMPOSITION
from dynattn.modeling.common.activation_checkpointing import checkpoint_activations
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.common.flops import ModelFlops
from dynattn.scripts.common.measuring import peak_memory
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.tokenizer import train_bpe
from dynattn.scripts.pretrain.dry_run.estimates import (
    ENGINES,
    RECORDED_MFU,
    RECORDED_RATIO,
    Estimate,
    chunk_bytes,
    dry_run,
    expected_vocabulary,
    period_of,
    plain_flops,
    possible_engines,
)
from dynattn.scripts.pretrain.dry_run.hardware import GPUS, parse_cluster
from dynattn.scripts.pretrain.dry_run.memory import (
    EngineMemory,
    Peaks,
    Rehearsal,
    StorageTracker,
    engine_memory,
    rehearse,
)
from dynattn.scripts.pretrain.engines.interface import BUCKET_ELEMENTS
from dynattn.scripts.pretrain.main import RECIPES, main
from dynattn.scripts.pretrain.model import build_model
from dynattn.scripts.pretrain.model_config import plan_config

RECORDS = Path(__file__).parents[4] / "model_cards" / "records"
LAYERS = 4
SHAPE = {"hidden_size": 256, "num_attention_heads": 8, "vocab_size": 4096}


def dcformer(layers: int = LAYERS, **changes: Any) -> DCFormerForCausalLM:
    return DCFormerForCausalLM(DCFormerConfig(**SHAPE, intermediate_size=768, num_hidden_layers=layers, **changes))


def dcpythia(layers: int = LAYERS) -> DCPythiaForCausalLM:
    return DCPythiaForCausalLM(DCPythiaConfig(**SHAPE, intermediate_size=1024, num_hidden_layers=layers))


def model_parameters(config: Any) -> int:
    with torch.device("meta"):
        return DCFormerForCausalLM(config).num_parameters()


def checkpointed(layers: int = LAYERS) -> DCFormerForCausalLM:
    model = dcformer(layers)
    checkpoint_activations(model, use_reentrant=False, context_fn=keep_attention_outputs)
    return model


MODELS: dict[str, Callable[..., Any]] = {
    "dcformer": dcformer,
    "dcpythia": dcpythia,
    "plain": partial(dcformer, compose_pre=False, compose_post=False),
    "checkpointed": checkpointed,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1024), (4, 512)])
def test_memory_is_that_of_a_measured_update_within_a_tenth(name: str, batch: int, length: int, bf16: bool):
    model = MODELS[name]().train()
    ids = torch.randint(SHAPE["vocab_size"], (batch, length))

    def update() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids, skip_logits=True, use_cache=False).loss
        loss.backward()

    update()  # compiles what is compiled once
    workspace = chunk_bytes(model.config, length)
    found = rehearse(MODELS[name], LAYERS, batch, length, bf16=bf16, workspace=workspace)
    model.zero_grad()
    measured = {name: peak_memory(update, torch.device("cpu")) for name in ("peak", "activations")}
    print(name, batch, length, measured, found)
    assert found.peak == pytest.approx(measured["peak"], rel=0.1)
    assert found.activations == pytest.approx(measured["activations"], rel=0.1)


@pytest.mark.parametrize("name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "plain")])
def test_layers_that_repeat_are_arithmetic(name: str):
    """Models of one and two periods tell what all layers together would have."""
    whole, short = (
        rehearse(MODELS[name], 6, 2, 128, bf16=False, workspace=1 << 20, period=period) for period in (None, 2)
    )
    assert (short.weights, short.largest_layer) == (whole.weights, whole.largest_layer)
    assert short.peak == pytest.approx(whole.peak, rel=0.01)
    assert short.activations == pytest.approx(whole.activations, rel=0.01)


def test_what_is_freed_counts_in_the_peak_alone():
    known = torch.zeros(50)
    with StorageTracker([known], workspace=0) as tracker:
        first = known.repeat(20)
        view, second = first[10:], first + 1
        del first, view
        third = second[:10] + known[:10]
    assert (tracker.live, tracker.peak) == (4 * (len(second) + len(third)), 4 * 2000)


def test_a_rehearsal_in_bf16_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counted = [rehearse(build, 1, 1, 16, bf16=True).peak for build in (dcformer, checkpointed)]
    assert counted[0] != counted[1]


def test_kinds_of_layers_repeat_or_do_not():
    assert period_of(DCFormerConfig.from_size("6.9b")) == 2
    assert period_of(DCFormerConfig.from_size("8b")) == 4
    assert period_of(LlamaConfig(num_hidden_layers=5)) == 1
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    assert period_of(DCFormerConfig.from_size("tiny", num_hidden_layers=3, layer_types=kinds)) == 3


@pytest.mark.slow
def test_the_largest_recipe_takes_seconds(capsys: pytest.CaptureFixture[str]):
    """Of processor time: the machine may be busy with other work."""
    begun = time.process_time()
    assert main(["dcformer-6.9b.yaml", "--dry_run", "--on", "h100:64"]) == 0
    assert time.process_time() - begun < 30
    assert "64 x H100" in capsys.readouterr().out


def test_checkpointing_and_sharding_need_less():
    plain, saving = (rehearse(build, 2, 1, 256, bf16=False) for build in (dcformer, checkpointed))
    assert saving.activations < 0.7 * plain.activations
    weights = sum(weight.numel() * 4 for weight in dcformer(2).parameters())
    assert plain.weights == weights
    ddp, zero1, zero2, zero3, fsdp = (
        engine_memory(n, plain, 16, 8, bf16=False, optimizer=2 * weights)
        for n in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    )
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (weights, weights, 2 * weights)
    # DeepSpeed's optimizer has its own copy of the weights that it updates.
    assert zero1.optimizer == zero2.optimizer == zero3.optimizer == 2 * weights // 16 + weights // 16
    assert [zero.gradients for zero in (zero1, zero2, zero3)] == [weights, weights // 16, weights // 16]
    assert [zero.weights for zero in (zero1, zero2, zero3)] == [weights, weights, weights // 16]
    assert fsdp.weights == weights // 16
    layers = 3 * plain.largest_layer
    assert weights < BUCKET_ELEMENTS * 4
    assert [zero.buffers for zero in (zero1, zero2, zero3)] == [weights, weights, weights + layers]
    assert (ddp.buffers, fsdp.buffers) == (weights, layers)
    assert engine_memory("fsdp2", plain, 16, 8, bf16=True, optimizer=2 * weights).buffers == layers // 2
    assert engine_memory("hsdp", plain, 16, 2, bf16=False, optimizer=2 * weights).weights == weights // 2
    hsdp = engine_memory("hsdp", plain, 16, 8, bf16=False, optimizer=3 * weights)
    assert (hsdp.weights, hsdp.optimizer) == (weights // 8, 3 * weights // 8)


def test_a_single_process_of_any_engine_needs_the_same():
    passes = Rehearsal(weights=100, largest_layer=10, casts=15, first=Peaks(150, 0, 0), second=Peaks(30, 40, 35))
    needed = {engine_memory(name, passes, 1, 1, bf16=True, optimizer=200) for name in ENGINES}
    assert needed == {EngineMemory(weights=100, gradients=100, optimizer=200, buffers=0, activations=50)}


@pytest.mark.slow
def test_recipes_change_memory_and_time():
    """Muon keeps one moment of a matrix, an average is as large as the weights, and a sweep is several runs."""
    cluster = parse_cluster("h100:2")
    plain, muon, average, sweep = (
        Estimate(parse("tiny.yaml", "--output", "x", "--sequence_length", "64", *options), *cluster)
        for options in ((), ("--optimizer", "muon"), ("--ema_decay", "0.9"), ("--sweep", "lr=1e-4:1e-2:7"))
    )
    weights = plain.memory["ddp"].weights
    assert plain.memory["ddp"].optimizer == 2 * weights
    assert weights < muon.memory["ddp"].optimizer < 2 * weights
    assert average.memory["ddp"].optimizer == 3 * weights
    assert sweep.days == pytest.approx(7 * (plain.days or 0))


def test_operations_and_the_share_of_composition_are_the_models():
    arguments = parse("tiny.yaml", "--output", "x")
    found = Estimate(arguments, *parse_cluster("h100:2"))
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


def test_memory_is_that_of_the_implementation_that_was_asked_for():
    small = ("tiny.yaml", "--output", "x", "--batch_size", "2", "--model_config", '{"num_hidden_layers": 1}')
    default, eager, kernels = (
        Estimate(parse(*small, *options), *parse_cluster("h100:1")).memory["ddp"].activations
        for options in ((), ("--attn_implementation", "eager"), ("--attn_implementation", "triton"))
    )
    assert kernels == default < eager / 2
    with pytest.raises(UserError, match=r"cannot build the model 'dcformer': .*sdpa"):
        dry_run(parse("tiny.yaml", "--output", "x", "--attn_implementation", "sdpa"))


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_plain_model_has_nothing_of_a_mixer(mixer: str):
    config = DCFormerConfig.from_size("tiny", mixer=mixer)
    uncomposed = DCFormerConfig.from_size("tiny", **NO_COMPOSITION)
    assert plain_flops(config, 64) == plain_flops(uncomposed, 64)


def test_the_vocabulary_is_the_one_that_the_run_would_make(tmp_path: Path):
    """A run fits a new model to its tokenizer, whose size often is most of a small model's parameters."""

    def embeddings(*options: str) -> int:
        config = plan_config(arguments := parse("--output", "x", *options), expected_vocabulary(arguments))
        assert Estimate(arguments, *parse_cluster("h100:1")).parameters.total == model_parameters(config)
        return config.vocab_size

    train_bpe([["a"]], 300).save_pretrained(tmp_path)
    assert embeddings("tiny.yaml") == 2048
    assert embeddings("--vocab_size", "5000") == 5056
    assert embeddings("--vocab_size", "5000", "--model_config", '{"vocab_size": 6000}') == 6000
    assert embeddings("--tokenizer", str(tmp_path)) == 320
    assert expected_vocabulary(parse("405m.yaml", "--output", "x")) == {}


@pytest.mark.parametrize("kind", ["glm4", "modernbert-decoder"])
def test_a_small_vocabulary_holds_the_padding_of_a_type_whose_own_is_larger(kind: str):
    """The table of embeddings of these types refuses a row for padding that it does not have."""
    sizes = '{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}'
    arguments = parse("--output", "x", "--model_type", kind, "--model_config", sizes, "--tokenizer", "bpe")
    build_model(arguments, plan_config(arguments, expected_vocabulary(arguments)), on_meta=True)


def test_speed_is_as_recorded_on_a_gpu():
    record = json.loads((RECORDS / "benchmark-gpu" / "h100" / "training-405m" / "record.json").read_text())
    composed, plain = record["cases"][0]["rows"]
    assert composed["ratio"] == pytest.approx(RECORDED_RATIO, abs=0.005)
    assert plain["flops_per_second"] / GPUS["h100"].bfloat16_rate == pytest.approx(RECORDED_MFU, abs=0.005)


def test_the_command_prints_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["tiny.yaml", "--output", str(tmp_path / "run"), "--dry_run", "--on", "a100:4", "--price_per_gpu_hour=2"]
    assert main(options) == 0
    told = capsys.readouterr().out
    for expected in (
        "parameters",
        "for composition",
        "fsdp2",
        "an estimate",
        "as one H100 took",
        "GPU hours at 2",
    ):
        assert expected in told
    assert not (tmp_path / "run").exists()


def test_gpus_that_share_sequences_need_less_memory_and_make_smaller_updates():
    alone, shared = (
        Estimate(parse("tiny.yaml", "--output", "x", "--context_processes", count), *parse_cluster("h100:4"))
        for count in ("1", "4")
    )
    assert alone.tokens_per_update == 4 * shared.tokens_per_update
    assert 0.25 < shared.memory["fsdp2"].activations / alone.memory["fsdp2"].activations < 0.5
    assert shared.memory["fsdp2"].weights == alone.memory["fsdp2"].weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context_processes", "3"], "context_processes=3 does not divide the 4 GPUs"),
        (["--context_processes", "4", "--sequence_length", "100"], "cut sequences into 8 chunks, and 100 tokens"),
        (
            ["--context_processes", "4", "--length_warmup_steps", "2", "--shortest_length", "4"],
            "cut sequences into 8 chunks, and 4 tokens",
        ),
        (
            ["--context_processes", "2", "--model_type", "rcmha", "--model_size", "tiny"],
            "cannot share sequences of RCMHAForCausalLM",
        ),
    ],
)
def test_gpus_that_cannot_share_sequences_are_refused(options: list[str], message: str):
    with pytest.raises(UserError, match=message):
        Estimate(parse("tiny.yaml", "--output", "x", *options), *parse_cluster("h100:4"))


def test_models_whose_operations_are_not_known_are_refused():
    with pytest.raises(UserError, match="a dry run counts operations, but operations of 'gpt2' are not known"):
        dry_run(PretrainArguments(output="x", model_type="gpt2"))


def test_engines_that_cannot_make_the_run_are_left_out_or_refused(capsys: pytest.CaptureFixture[str]):
    averaged = ["tiny.yaml", "--output", "x", "--dry_run", "--sequence_length=16", "--ema_decay=0.9"]
    assert main([*averaged, "--on", "h100:2"]) == 0
    told = capsys.readouterr().out
    assert "  zero1, zero2, zero3 cannot run this: ema_decay=0.9 averages weights" in told and "\n  zero2 " not in told
    assert "zero2" in possible_engines(parse(*averaged), 1)
    for options in ((), ("--optimizer", "muon"), ("--compile",)):
        assert ("zero2" in possible_engines(parse("tiny.yaml", "--output", "x", *options), 2)) == (not options)
    sharded = possible_engines(parse("tiny.yaml", "--output", "x", "--z_loss", "1e-4"), 2)
    assert "zero2" in sharded and "zero3" not in sharded
    with pytest.raises(UserError, match=r"ema_decay=0.9 averages .* \(engine=zero3\); leave it out, or"):
        dry_run(parse(*averaged, "--engine", "zero3", "--on", "h100:2"))


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
        assert arguments.model_size in CONFIG_MAPPING[arguments.model_type].sizes
