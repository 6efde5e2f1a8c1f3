"""Processes that share sequences (`context_processes`) make the curve of one process that reads them whole."""

from pathlib import Path
from typing import Any

import pytest
from cases.training import RUN, curve, killed_after, losses, run, run_forked

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain.outputs.metrics import read_metrics

DCFORMER = {
    **RUN,
    "model_type": "dcformer",
    "model_size": "tiny",
    "model_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
    },
    "batch_size": 8,
    "max_steps": 8,
    "eval_every": 8,
}

# The loss without that of the router, which is computed for each process's tokens alone.
MIXTRAL = {
    **RUN["model_config"],
    "num_key_value_heads": 1,
    "attention_dropout": 0,
    "num_local_experts": 2,
    "output_router_logits": False,
    "max_position_embeddings": 64,
    "composed_heads": {"compose_rank": 1},
}


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    return run(tmp_path_factory.mktemp("alone") / "run", corpus, **DCFORMER).output


@pytest.fixture(scope="module")
def noise(alone: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """What it changes to add up the same gradients in another order, in one process."""
    changes = {"batch_size": 1, "gradient_accumulation_steps": 8}
    other = run(tmp_path_factory.mktemp("noise") / "run", corpus, **{**DCFORMER, **changes}).output
    return abs(losses(other) - losses(alone)).max()


def health(output: Path) -> dict[str, Any]:
    """The last measurement of the composition in a run's metrics."""
    return [line for line in read_metrics(output / "metrics.jsonl") if line["split"] == "composition"][-1]


def test_two_processes_that_share_sequences_make_the_curve_of_one(
    alone: Path, noise: float, corpus: Path, tmp_path: Path
):
    output = tmp_path / "run"
    run_forked(2, output, corpus, **{**DCFORMER, "context_processes": 2})
    assert 0 < noise < 1e-4
    assert abs(losses(output) - losses(alone)).max() < 4 * noise
    assert curve(output, "step", "split", "tokens") == curve(alone, "step", "split", "tokens")
    assert health(output) == pytest.approx(health(alone), abs=1e-3)
    told = output.with_name("run-0.txt").read_text()
    assert "engine: ddp, 2 processes on cpu, every process holds all weights, sequences in 2 parts" in told


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3"])
def test_groups_of_processes_work_with_every_engine(
    engine: str, alone: Path, noise: float, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two groups of two, each of which reads other sequences."""
    changes: dict[str, Any] = {"context_processes": 2, "batch_size": 2, "gradient_accumulation_steps": 2}
    if engine == "hsdp":
        changes["shard_processes"] = 2
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the engines zero1 to zero3 need the extra `deepspeed`")
        monkeypatch.setattr("dynattn.scripts.pretrain.engines.zero.PERSISTENT_ELEMENTS", 0)
    run_forked(4, tmp_path / "run", corpus, **{**DCFORMER, **changes, "engine": engine})
    assert abs(losses(tmp_path / "run") - losses(alone)).max() < 4 * noise


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"length_warmup_steps": 4, "shortest_length": 8},
        {"position_sampling": "subset", "position_limit": 64},
        {"packing": "anchor"},
        {"packing": "best_fit"},
        {"gradient_checkpointing": True, "engine": "fsdp2"},
        {"compile": True, "max_steps": 2, "warmup_steps": 1, "eval_every": 2},
        {"model_type": "mixtral", "model_size": None, "model_config": MIXTRAL, "engine": "fsdp2"},
        {"model_type": "mixtral", "model_size": None, "model_config": MIXTRAL, "gradient_checkpointing": True},
        {"on_bad_update": "skip", "z_loss": 1e-4, "ema_decay": 0.9},
    ],
    ids=str,
)
def test_other_options_go_with_shared_sequences(changes: dict[str, Any], corpus: Path, tmp_path: Path):
    longer = {**DCFORMER["model_config"], "max_position_embeddings": 64}
    settings = {**DCFORMER, "model_config": longer, **changes}
    run_forked(2, tmp_path / "shared", corpus, **{**settings, "context_processes": 2})
    whole = run(tmp_path / "whole", corpus, **{**settings, "engine": "ddp"}).output
    assert abs(losses(tmp_path / "shared") - losses(whole)).max() < 1e-4


def test_a_run_in_one_process_goes_on_in_two_that_share_sequences(
    alone: Path, noise: float, corpus: Path, tmp_path: Path
):
    output = tmp_path / "run"
    with killed_after(5):
        run(output, corpus, **{**DCFORMER, "save_every": 2})
    run_forked(2, output, corpus, **{**DCFORMER, "save_every": 2, "context_processes": 2})
    assert "context_processes (was 1, is 2)" in output.with_name("run-0.txt").read_text()
    assert abs(losses(output) - losses(alone)).max() < 4 * noise


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "masked_lm", "model_type": "dcmodernbert"}, "context_processes is for objective=causal_lm"),
        ({"carry_memory": True, "model_type": "rcmha", "mask_documents": False}, "carry_memory needs whole sequences"),
        ({"context_processes": 0}, "context_processes=0"),
        ({}, "context_processes=2 does not divide the number of processes, 1"),
    ],
    ids=str,
)
def test_what_cannot_share_sequences_is_refused(changes: dict[str, Any], message: str, corpus: Path, tmp_path: Path):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", corpus, **{"context_processes": 2, "model_config": None, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 30}, "context_processes=2 cut sequences into 4 chunks, and 30 tokens cannot be"),
        ({"length_warmup_steps": 4, "shortest_length": 2}, "and 2 tokens cannot be"),
        (
            {"model_type": "llama", "model_size": None, "model_config": RUN["model_config"]},
            "cannot share sequences of LlamaForCausalLM",
        ),
        ({"model_config": {"position_scheme": "carope"}}, "without CARoPE"),
    ],
    ids=str,
)
def test_models_and_lengths_that_cannot_be_divided_are_refused(
    changes: dict[str, Any], message: str, corpus: Path, tmp_path: Path
):
    with pytest.raises(AssertionError, match=message):
        run_forked(2, tmp_path / "run", corpus, **{**DCFORMER, **changes, "context_processes": 2})
