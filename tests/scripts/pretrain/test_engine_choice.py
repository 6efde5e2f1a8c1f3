"""Which engine a run uses: its own option, or what `accelerate launch` was configured for."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from accelerate import Accelerator
from cases.training import ENVIRONMENT, LLAMA, RUN, arguments, as_options, curve

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain.engines.choice import (
    build_engine,
    launched_engine,
    obstacle_to_zero,
    shards_of,
    warn_of_missing_processes,
)
from dynattn.scripts.pretrain.engines.fsdp import FSDPEngine
from dynattn.scripts.pretrain.engines.interface import Engine
from dynattn.scripts.pretrain.job import build_accelerator
from dynattn.scripts.pretrain.main import RECIPES
from dynattn.scripts.pretrain.outputs import checkpoint

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def processes(number: int) -> Accelerator:
    return cast("Accelerator", SimpleNamespace(num_processes=number, process_index=0, device=torch.device("cpu")))


@pytest.mark.parametrize(
    ("environment", "engine"),
    [
        ({}, None),
        ({"ACCELERATE_USE_FSDP": "false"}, None),
        (FSDP, "fsdp2"),
        ({**FSDP, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "hsdp"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "zero2"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3"),
    ],
)
def test_the_configuration_of_the_launcher_names_an_engine(environment: dict[str, str], engine: str | None):
    assert launched_engine(environment) == engine


def test_accumulation_of_the_launcher_divides_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Losses are divided here already, and Accelerate would divide them again."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    given = arguments(tmp_path, tmp_path)
    weight = torch.nn.Parameter(torch.ones(()))
    build_engine(given, build_accelerator(given), None).backward(3 * weight)
    assert weight.grad is not None and weight.grad.item() == 3


def test_engines_that_cannot_be_are_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="configured for FSDP 1; set fsdp_version: 2"):
        launched_engine({"ACCELERATE_USE_FSDP": "true"})
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true"}
    with pytest.raises(UserError, match="configured for zero_stage=0; give 1, 2 or 3, or --engine ddp"):
        launched_engine({**deepspeed, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"})
    with pytest.raises(UserError, match="configured for offload_param_device=cpu, which runs here do not read"):
        launched_engine({**deepspeed, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"})
    for name, value in (("GRADIENT_ACCUMULATION_STEPS", "4"), ("GRADIENT_CLIPPING", "1.0")):
        with pytest.raises(UserError, match=f"configured for {name.lower()}={value}, which runs here do not read"):
            launched_engine({**deepspeed, f"ACCELERATE_{name}": value})
    given = arguments(tmp_path, tmp_path, engine="ddp")
    with pytest.raises(UserError, match="engine=ddp, but `accelerate launch` is configured for fsdp2"):
        build_engine(given, processes(2), "fsdp2")
    for variable, value, told in (
        ("ACCELERATE_MIXED_PRECISION", "bf16", "mixed_precision=bf16, and the run for no; give --mixed_precision to"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend=inductor; leave it out, and give --compile to"),
    ):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=told):
            patch.setenv(variable, value)
            build_engine(given, processes(2), None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match="shard_processes=3 does not divide the 4 processes of engine=hsdp"):
        shards_of("hsdp", given, 4)
    with pytest.raises(UserError, match="engine=zero9 must be one of"):
        arguments(tmp_path, tmp_path, engine="zero9")


@pytest.mark.parametrize(
    ("engine", "number", "shards", "kind"),
    [
        ("ddp", 4, None, Engine),
        ("fsdp2", 1, None, Engine),
        ("fsdp2", 4, 4, FSDPEngine),
        ("hsdp", 4, 2, FSDPEngine),
    ],
)
def test_several_processes_share_weights_if_asked_to(
    engine: str, number: int, shards: int | None, kind: type[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    built = build_engine(arguments(tmp_path, tmp_path, engine=engine), processes(number), None)
    assert type(built) is kind
    assert getattr(built, "shards", None) == shards
    assert f"engine: {engine}, {number} process" in built.describe()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("optimizer", "muon"),
        ("ema_decay", 0.9),
        ("ema_decay", 0.0),
        ("freeze_parent_steps", 3),
        ("compile", True),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_by_name(option: str, value: Any, tmp_path: Path):
    given = arguments(tmp_path, tmp_path, engine="zero2", **{option: value})
    with pytest.raises(UserError, match=rf"{option}={value} .*\(engine=zero2\); leave it out, or use engine fsdp2"):
        build_engine(given, processes(2), None)
    assert type(build_engine(given, processes(1), None)) is Engine


def test_the_z_loss_is_refused_where_the_head_lies_in_shards(tmp_path: Path):
    """The loss with it reads the head's weight outside of the head, where stage 3 has not gathered it."""
    given = arguments(tmp_path, tmp_path, engine="zero3", z_loss=1e-4)
    with pytest.raises(UserError, match=r"z_loss=0.0001 needs the whole head, .*\(engine=zero3\); leave it out"):
        build_engine(given, processes(2), None)
    assert [obstacle_to_zero(name, given) for name in ("zero1", "zero2")] == [None, None]


def test_cuda_graphs_are_of_weights_that_stay_where_they_are(tmp_path: Path):
    on_gpu = cast("Accelerator", SimpleNamespace(num_processes=2, process_index=0, device=torch.device("cuda")))
    graphs = {"compile": True, "cuda_graphs": True}
    assert build_engine(arguments(tmp_path, tmp_path, **graphs), on_gpu, None).cuda_graphs
    with pytest.raises(UserError, match="engine=fsdp2 moves them; leave cuda_graphs out, or use ddp"):
        build_engine(arguments(tmp_path, tmp_path, engine="fsdp2", **graphs), on_gpu, None)


def test_passes_add_to_gradients_that_no_cuda_graph_overwrites(tmp_path: Path):
    engine = Engine("ddp", build_accelerator(arguments(tmp_path, tmp_path)), cuda_graphs=True)
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.frozen = torch.nn.Parameter(torch.ones(()), requires_grad=False)
    engine.begin_update(layer)
    ours = layer.weight.grad
    for value in (1.0, 2.0):
        engine.backward(layer(torch.full((2,), value)).sum())
    assert ours is not None and layer.weight.grad is ours
    assert ours.tolist() == [[3.0, 3.0]]
    assert layer.frozen.grad is None


def test_checkpoints_of_earlier_versions_are_refused_where_they_cannot_be_read(tmp_path: Path):
    (tmp_path / "optimizer.bin").touch()
    engine: Any = SimpleNamespace(name="zero1", reads_earlier_format=False)
    unused: Any = None
    with pytest.raises(UserError, match="is of an earlier version, which engine=zero1 does not read; resume it with"):
        checkpoint.load(engine, tmp_path, unused, unused, unused)


def test_an_engine_without_its_package_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.delitem(sys.modules, "dynattn.scripts.pretrain.engines.zero", raising=False)
    with pytest.raises(UserError, match=r"engine=zero1 needs DeepSpeed \(.*\): pip install .*, or use fsdp2"):
        build_engine(arguments(tmp_path, tmp_path, engine="zero1"), processes(2), None)


def test_a_launcher_that_starts_fewer_processes_than_asked_for_is_told(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        warn_of_missing_processes(processes(1), {})
        warn_of_missing_processes(processes(2), {"MASTER_PORT": "29500", "WORLD_SIZE": "2"})
        assert not caplog.text
        warn_of_missing_processes(processes(1), {"MASTER_PORT": "29500"})
    assert "only one process runs: on a CPU" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3"])
def test_shipped_configurations_launch_processes_on_a_cpu(name: str, corpus: Path, tmp_path: Path):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the engines zero1 to zero3 need the extra `deepspeed`")
    shipped: dict[str, Any] = yaml.safe_load((RECIPES / "accelerate" / f"{name}.yaml").read_text())
    if name == "hsdp":
        small = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 1}
        shipped |= {"num_machines": 1, "num_processes": 2, "parallelism_config": small}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(shipped))
    told = launch(["--config_file", str(config)], tmp_path / "run", corpus)
    assert f"engine: {name}, 2 processes on cpu" in told
    assert curve(tmp_path / "run", "step", split="train") == [[1], [2]]


@pytest.mark.slow
def test_a_launcher_without_gpus_is_told_of(corpus: Path, tmp_path: Path):
    told = launch(["--cpu", "--num_processes", "2", "--num_machines", "1"], tmp_path / "run", corpus)
    assert "only one process runs" in told
    assert "engine: ddp, 1 process on cpu, all weights in one piece" in told


def launch(launcher: list[str], output: Path, corpus: Path) -> str:
    """Two updates under `accelerate launch`; returns all that they print."""
    changes = {"output": output, "dataset": corpus, "max_steps": 2, "warmup_steps": 0, "batch_size": 2}
    options = as_options({**RUN, "model_config": LLAMA, **changes})
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "-m", "dynattn.scripts.cli", "pretrain"]
    done = subprocess.run(
        [*command, *options],
        env=ENVIRONMENT, cwd=output.parent, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
