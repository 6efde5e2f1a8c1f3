"""The parts of `dynattn convert`: the table, its transforms, options, companions, memory."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.scripts.cli import main
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.convert.common.arguments import name_folders, parse_size
from dynattn.scripts.convert.common.planning import meta_model, shapes_of
from dynattn.scripts.convert.common.transforms import Chain, Keep, Reshape, Select, Split, Stack, Transform
from dynattn.scripts.convert.common.weight_map import Drop, Rule, WeightMap, plan_export, plan_import, written_shapes
from dynattn.scripts.convert.official.arguments import OfficialArguments
from dynattn.scripts.convert.official.config import OfficialConfig, field_warnings
from dynattn.scripts.convert.official.export import to_json, to_official
from dynattn.scripts.convert.official.layout import official_map

RELEASED = {
    "dcformer": {
        "architectures": ["DCFormer"],
        "block_size": 4096,
        "dim": 4096,
        "head_dim": 128,
        "intermediate_size": 5632,
        "is_training": False,
        "mgate": True,
        "mgate_dim": 44,
        "model_type": "dcformer",
        "n_head": 32,
        "n_layer": 48,
        "n_local_heads": 32,
        "norm_eps": 1e-06,
        "prefill_pad": True,
        "q_chunk_size": 128,
        "query_wise": False,
        "rope_base": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_dcmha": True,
        "use_gradient_checkpointing": False,
        "use_qk_norm": True,
        "vocab_size": 152064,
        "window_size": 256,
        "window_type": "LGLL",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "dcpythia": {
        "architectures": ["DCPythia"],
        "block_size": 2048,
        "dim": 4096,
        "head_dim": 128,
        "intermediate_size": 16384,
        "is_training": False,
        "model_type": "dcpythia",
        "n_head": 32,
        "n_layer": 32,
        "n_local_heads": 32,
        "norm_eps": 1e-05,
        "q_chunk_size": 128,
        "query_wise": False,
        "rope_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_dcmha": True,
        "use_gradient_checkpointing": False,
        "use_linear_bias": True,
        "use_parallel_residual": True,
        "use_qk_norm": True,
        "vocab_size": 50257,
        "window_size": 256,
        "window_type": None,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
KEYS = {"dcformer": ["layers.0.feed_forward.w3.weight"], "dcpythia": ["norm.bias"]}


@pytest.mark.parametrize("family", sorted(RELEASED))
def test_released_configurations_survive_the_round_trip(family: str) -> None:
    raw = RELEASED[family]
    official = OfficialConfig.from_json(raw, KEYS[family])
    assert list(field_warnings(raw, official)) == []
    ours = official.to_ours(official.local_window)
    assert ours.sliding_window == 256
    returned = to_json(to_official(ours), getattr(torch, str(raw["torch_dtype"])))
    assert returned == {**raw, "pad_token_id": None}


def test_what_a_configuration_leaves_out_has_the_official_default() -> None:
    v1 = OfficialConfig.from_json({"dim": 96, "n_layer": 4, "n_head": 8}, KEYS["dcformer"])
    assert (v1.intermediate_size, v1.rope_base, v1.norm_eps, v1.window_size) == (256, 10000, 1e-5, 256)
    assert not v1.use_qk_norm
    assert v1.layer_types[:2] == ["sliding_attention", "full_attention"]
    head = OfficialConfig.from_json({"dim": 96, "n_layer": 4, "mgate": False}, KEYS["dcformer"])
    assert head.rope_base == 500000
    pythia = OfficialConfig.from_json({"dim": 96, "n_layer": 4, "n_local_heads": -1}, ["norm.bias"])
    assert (pythia.intermediate_size, pythia.rotary_pct, pythia.use_parallel_residual) == (384, 0.25, True)


@pytest.mark.parametrize(
    ("window_size", "window_type", "window", "letters"),
    [
        (64, None, 64, "LGLGLGLGLG"),
        (256, "LG", 256, "LGLGLGLGLG"),
        (64, "LGLL", 64, "LGLLLGLLLG"),
        (64, "LGL6", 64, "LGLLLLLLLG"),
        (None, "LGLL", None, "GGGGGGGGGG"),
        (None, None, None, "GGGGGGGGGG"),
    ],
)
def test_window_patterns(window_size: int | None, window_type: str | None, window: int | None, letters: str) -> None:
    raw = {"dim": 96, "n_layer": 10, "n_head": 8, "window_size": window_size, "window_type": window_type}
    config = OfficialConfig.from_json(raw, KEYS["dcformer"])
    assert config.local_window == window
    assert "".join("L" if kind == "sliding_attention" else "G" for kind in config.layer_types) == letters
    ours = config.to_ours(config.local_window)
    returned = to_official(ours)
    assert returned.layer_types == config.layer_types
    assert returned.local_window == window
    told = [text for text in field_warnings(raw, config) if "taken at its word" in text]
    assert bool(told) == (window_size == 64 and window_type is not None)


TRANSFORMS: list[tuple[Transform, list[tuple[int, ...]]]] = [
    (Keep(), [(3, 4)]),
    (Split((2, 3), dim=1), [(4, 5)]),
    (Reshape(((4, 6),), ((4, 2, 3),)), [(4, 6)]),
    (Stack(), [(2, 3), (2, 3)]),
    (Chain((Split((2, 4), dim=1), Reshape(((3, 2), (3, 4)), ((3, 1, 2), (3, 2, 2))))), [(3, 6)]),
]


@pytest.mark.parametrize(("transform", "shapes"), TRANSFORMS, ids=lambda value: type(value).__name__)
def test_transforms_are_reversible_and_work_without_numbers(
    transform: Transform, shapes: Sequence[tuple[int, ...]]
) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    forward = transform.forward(tensors)
    for back, tensor in zip(transform.backward(forward), tensors, strict=True):
        assert torch.equal(back, tensor)
    meta = transform.forward([tensor.to("meta") for tensor in tensors])
    assert [tensor.shape for tensor in meta] == [tensor.shape for tensor in forward]


def test_select_fills_what_it_left_out_with_zeros() -> None:
    select, tensor = Select(1, (0, 2), 4), torch.randn(2, 4, 3)
    (kept,) = select.forward([tensor])
    (filled,) = select.backward([kept])
    assert torch.equal(filled, tensor * torch.tensor([1, 0, 1, 0])[:, None])


def foreign(joined: bool) -> list[str]:
    return ["table", *([f"{layer}.ab" for layer in range(2)] if joined else ["0.a", "0.b", "1.a", "1.b"])]


MAP = WeightMap(
    layers=2,
    rules=(
        Rule(("table",), ("embed",)),
        Rule(("{layer}.ab",), ("layers.{layer}.a", "layers.{layer}.b"), Split((1, 2))),
        Rule(("{layer}.a",), ("layers.{layer}.a",)),
        Rule(("{layer}.b",), ("layers.{layer}.b",)),
    ),
    drops=(Drop("{layer}.cache.*", "a cache"), Drop("{layer}.eye", "a buffer", lambda: torch.eye(2))),
)


@pytest.mark.parametrize("joined", [True, False])
def test_one_table_reads_both_ways(joined: bool) -> None:
    steps, dropped = plan_import(MAP, [*foreign(joined), "1.cache.k", "0.eye"])
    assert dropped == {"a cache": ["1.cache.k"], "a buffer": ["0.eye"]}
    ours = [key for step in steps for key in step.writes]
    assert sorted(ours) == ["embed", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b"]
    back = plan_export(MAP, ours)
    assert sorted(key for step in back for key in step.writes) == ["0.ab", "0.eye", "1.ab", "1.eye", "table"]
    made = next(step for step in back if step.writes == ("1.eye",))
    assert torch.equal(made.run([])[0], torch.eye(2))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["0.ab", "1.ab"], "lack table"),
        (["table", "0.ab", "1.a"], "lack 1.ab or 1.b"),
        ([*foreign(True), "0.a"], "both 0.ab and 0.a"),
        ([*foreign(True), "2.cache.k", "x"], "2.cache.k (2 such keys) which are no part"),
    ],
)
def test_incomplete_or_unknown_foreign_keys(keys: list[str], says: str) -> None:
    with pytest.raises(UserError) as error:
        plan_import(MAP, keys)
    assert says in str(error.value)


def test_incomplete_or_unknown_keys_of_ours() -> None:
    with pytest.raises(UserError, match="lack embed"):
        plan_export(MAP, [f"layers.{layer}.{name}" for layer in range(2) for name in "ab"])
    with pytest.raises(UserError, match="surplus which is no part"):
        plan_export(MAP, ["embed", "surplus", *[f"layers.{layer}.{name}" for layer in range(2) for name in "ab"]])


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 kb", "2MiB", "300")] == [5 * 10**9, 1500, 2 * 2**20, 300]
    for text in ("5XB", "-1GB", "GB", ""):
        with pytest.raises(UserError, match="is no size"):
            parse_size(text)


@pytest.mark.parametrize(
    "argv",
    [
        ["a", "b", "--reverse", "--dtype", "float16"],
        ["--reverse", "a", "--dtype", "float16", "b"],
        ["--dtype=float16", "--reverse", "a", "b"],
        ["--no-verify", "--overwrite", "a", "--max-shard-size", "5GB", "b"],
    ],
)
def test_folders_may_stand_anywhere(argv: list[str]) -> None:
    named = name_folders(argv, OfficialArguments)
    assert named[named.index("--source") + 1] == "a"
    assert named[named.index("--destination") + 1] == "b"
    assert len(named) == len(argv) + 2


def test_the_command_tells_its_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert"]) == 2
    assert main(["convert", "--help"]) == 0
    assert "official" in capsys.readouterr().out
    assert main(["convert", "gguf"]) == 2
    assert "unknown conversion 'gguf'" in capsys.readouterr().err


def tiny(**overrides: Any) -> DCFormerForCausalLM:
    fields = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return DCFormerForCausalLM(DCFormerConfig(**{**fields, "num_attention_heads": 2, **overrides}))


def test_tokenizer_generation_config_and_special_tokens_come_along(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "made")
    arguments = ["convert", "official"]
    assert main([*arguments, str(tmp_path / "made"), str(tmp_path / "theirs"), "--reverse", "--no-verify"]) == 0
    vocabulary = {"<eos>": 0, "<pad>": 1, "head": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        tmp_path / "theirs"
    )
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    assert main([*arguments, str(tmp_path / "theirs"), str(tmp_path / "ours"), "--no-verify"]) == 0
    config = AutoConfig.from_pretrained(tmp_path / "ours")
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (0, 1, None)
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").convert_tokens_to_ids("head") == 2
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text()) == {"max_new_tokens": 7}


def test_a_damaged_tokenizer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny().save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer.json").write_text("{}")
    run = ["convert", "official", "--no-verify"]
    assert main([*run, str(tmp_path / "ours"), str(tmp_path / "theirs"), "--reverse"]) == 0
    assert main([*run, str(tmp_path / "theirs"), str(tmp_path / "again")]) == 0
    assert "tokenizer was copied but does not load" in capsys.readouterr().err


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
    """An official checkpoint of random float16 numbers in several files; returns the size of the largest."""
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
