"""Shards are written one by one: memory stays near the size of one file, and no number is lost."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dynattn import DCFormerConfig
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.convert.common.planning import meta_model, shapes_of
from dynattn.scripts.convert.common.shards import cast, write_shards
from dynattn.scripts.convert.common.tensor_source import TensorSource
from dynattn.scripts.convert.common.weight_map import WeightMap, plan_export, plan_import, renames, written_shapes
from dynattn.scripts.convert.official.export import to_json, to_official
from dynattn.scripts.convert.official.layout import official_map

# Linux' high-water mark of this program; `ru_maxrss` would start with that of the process that began it.
MEASURE = """
import re, sys
from pathlib import Path
from dynattn.scripts.cli import main
import dynattn.scripts.convert.official.plan, transformers.models.auto.modeling_auto
def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
assert main(["convert", "official", "--no-verify", *sys.argv[1:]]) == 0
print("PEAK", peak() - before)
"""


def write_synthetic(folder: Path, config: DCFormerConfig, shards: int) -> int:
    """An official checkpoint of random float16 weights in several files; returns the size of the largest."""
    official, shapes = to_official(config), shapes_of(meta_model(config))
    layout = official_map(official)
    written = written_shapes(plan_export(layout, shapes), shapes)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_json(official, torch.float16)))
    keys = sorted(key for key in written if not key.endswith("_proj.w"))
    random.Random(0).shuffle(keys)
    for number in range(shards):
        tensors: dict[str, Tensor] = {
            key: torch.empty(written[key], dtype=torch.float16).normal_() for key in keys[number::shards]
        }
        save_file(tensors, folder / f"model-{number + 1:05d}-of-{shards:05d}.safetensors")
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.slow
def test_memory_stays_near_one_shard(tmp_path: Path) -> None:
    config = DCFormerConfig(
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        bos_token_id=None,
    )
    shard = write_synthetic(tmp_path / "theirs", config, shards=12)
    script = [sys.executable, "-c", MEASURE, str(tmp_path / "theirs"), str(tmp_path / "ours")]
    finished = subprocess.run(script, capture_output=True, text=True, check=True)
    peak = int(finished.stdout.split("PEAK")[1])
    total = sum(path.stat().st_size for path in (tmp_path / "theirs").iterdir())
    print(f"shard {shard / 1e6:.0f} MB, peak above import {peak / 1e6:.0f} MB, checkpoint {total / 1e6:.0f} MB")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 6
    assert peak < 2 * shard < total / 3


@pytest.mark.parametrize(
    ("limit", "shards"),
    [
        ("5GB", [["ours.a", "ours.b", "ours.c"]]),
        (None, [["ours.a", "ours.b", "ours.c"]]),
        ("48B", [["ours.a", "ours.b"], ["ours.c"]]),
        ("47B", [["ours.a"], ["ours.b", "ours.c"]]),
        ("8B", [["ours.a"], ["ours.b"], ["ours.c"]]),
    ],
)
def test_files_hold_consecutive_tensors_within_the_limit(
    limit: str | None, shards: list[list[str]], tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    tensors = {name: torch.randn(size, dtype=torch.float64) for name, size in {"a": 4, "b": 8, "c": 3}.items()}
    save_file(tensors, theirs / "model.safetensors")
    source = TensorSource(theirs)
    steps, _ = plan_import(WeightMap(0, tuple(renames({name: f"ours.{name}" for name in tensors}))), source.headers)
    write_shards(ours, source, steps, torch.float32, limit)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    index = ["model.safetensors.index.json"] if count > 1 else []
    assert sorted(path.name for path in ours.iterdir()) == sorted(names + index)
    for name, keys in zip(names, shards, strict=True):
        written = load_file(ours / name)
        assert sorted(written) == keys
        assert all(torch.equal(written[key], tensors[key.removeprefix("ours.")].float()) for key in keys)
    for path in map(ours.joinpath, index):
        placed = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        assert json.loads(path.read_text()) == {"metadata": {"total_size": 60}, "weight_map": placed}


@pytest.mark.parametrize(("large", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_a_number_that_a_dtype_cannot_hold_is_refused(large: torch.dtype, dtype: torch.dtype) -> None:
    most = torch.full((2,), torch.finfo(large).max, dtype=large)
    with pytest.raises(UserError, match=f"w has numbers that are too large for {dtype}"):
        cast("w", most, dtype)
    assert cast("w", torch.full((2,), torch.inf, dtype=large), dtype).isinf().all()
    assert torch.equal(cast("w", torch.ones(2, dtype=dtype), large), torch.ones(2, dtype=large))
