"""Options that make the result differ, `dynattn convert check`, and everything that is refused."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.checkpoints import contents, convert, edit_config, edit_weights, refusal, write_checkpoint
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

from dynattn import DCFormerConfig, DCPythiaConfig, RCMHAConfig, with_composed_heads
from dynattn.scripts.convert.upcycle.identity import size_of

NEOX: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
MIXED = ["sliding_attention", "full_attention"]
PARTLY = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}


def save(folder: Path, config: PreTrainedConfig, **options: Any) -> Path:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **options)
    return folder


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return save(tmp_path / "parent", GPTNeoXConfig(**NEOX))


def change(folder: Path, key: str, value: float) -> None:
    """Sets the last element of a weight."""
    edit_weights(folder, lambda weights: weights[key].view(-1)[-1].fill_(value))


@pytest.mark.parametrize(
    "options",
    [
        ("--init", "paper"),
        ("--layer-types", "LG", "--sliding-window", "5"),
        ("--qk-norm", "--train-from-here"),
        ("--init", "paper", "--dtype", "bfloat16", "--only", "pre"),
    ],
    ids=lambda options: options[0],
)
def test_a_result_that_differs_is_still_proved_and_the_effect_told(
    parent: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    ours = parent.with_name("ours")
    assert convert("pythia", parent, ours, *options) == 0
    output = capsys.readouterr().out
    assert "verified" in output
    assert "the loss changes from" in output
    assert ("both with weights rounded to bfloat16" in output) == ("bfloat16" in options)
    assert "does not read" not in caplog.text
    assert convert("check", parent, ours) == 1


def test_options_arrive_in_the_configuration(parent: Path) -> None:
    ours = parent.with_name("ours")
    options = ("--rank", 2, "--groups", 2, "--only", "post", "--static", "--layer-types", "LG", "--sliding-window", 5)
    options += ("--qk-norm", "--train-from-here")
    assert convert("pythia", parent, ours, "--no-verify", "--dtype", "float16", *options) == 0
    config = json.loads((ours / "config.json").read_text())
    assert (config["compose_rank"], config["compose_groups"]) == (2, 2)
    assert (config["compose_pre"], config["compose_post"]) == (False, True)
    assert config["compose_static"] and config["sliding_window"] == 5
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    weights = load_file(ours / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    norms = [tensor for name, tensor in weights.items() if name.endswith(("q_norm.weight", "k_norm.weight"))]
    assert len(norms) == 4 and all(tensor.eq(1).all() for tensor in norms)


def test_the_seed_decides_the_new_weights_and_no_layers_are_alike(parent: Path) -> None:
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert convert("pythia", parent, parent.with_name(name), "--no-verify", "--seed", seed) == 0
        found.append(load_file(parent.with_name(name) / "model.safetensors"))
    first, again, other = found
    name = "model.layers.{}.self_attn.composition.hidden_weight"
    assert all(torch.equal(tensor, again[key]) for key, tensor in first.items())
    assert not torch.equal(first[name.format(0)], other[name.format(0)])
    assert not torch.equal(first[name.format(0)], first[name.format(1)])


@pytest.mark.parametrize(
    ("weight", "told"),
    [
        ("factor_weight", "key-wise low-rank mixing of stage 'post' in layer 1"),
        ("gate_weight", "key-wise gate of stage 'post' in layer 1"),
        ("static_weight", "static mixing of stage 'post' in layer 1"),
    ],
)
def test_reverse_refuses_a_model_that_composes(
    weight: str, told: str, parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, back = parent.with_name("ours"), parent.with_name("back")
    assert convert("pythia", parent, ours, "--no-verify", "--static") == 0
    change(ours, f"model.layers.0.self_attn.composition.{weight}", 0.002)
    change(ours, f"model.layers.1.self_attn.composition.{weight}", -0.25)
    line = refusal(capsys, "pythia", ours, back, "--reverse")
    assert told in line and "2.5e-01" in line
    assert not back.exists()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_the_largest(value: float) -> None:
    assert size_of(torch.tensor([[1.0, value], [2.0, 3.0]])) == math.inf


def test_check_tells_equal_from_different(
    parent: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    ours = parent.with_name("ours")
    assert convert("pythia", parent, ours, "--no-verify") == 0
    assert convert("check", parent, ours) == 0
    assert "equal       128 tokens" in capsys.readouterr().out
    weights = load_file(ours / "model.safetensors")
    save_file({**weights, "model.layers.1.mlp.scale": torch.ones(1)}, ours / "model.safetensors")
    assert convert("check", parent, ours) == 0
    assert "stores tensors that its model does not read: model.layers.1.mlp.scale" in caplog.text
    change(ours, "model.layers.1.mlp.up_proj.bias", 0.5)
    capsys.readouterr()
    assert convert("check", parent, ours) == 1
    assert capsys.readouterr().out.startswith("different")
    # Any causal model will do.
    gpt = save(parent.with_name("gpt"), GPT2Config(vocab_size=101, n_embd=32, n_layer=1, n_head=2, n_positions=64))
    assert convert("check", gpt, gpt) == 0
    assert convert("check", gpt, parent) == 1
    small = save(parent.with_name("small"), GPTNeoXConfig(**{**NEOX, "vocab_size": 99}))
    assert "vocabularies of 101 and 99" in refusal(capsys, "check", parent, small)
    assert "does not exist" in refusal(capsys, "check", parent, "./nowhere")


def test_check_compares_heads_that_are_composed_in_place(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upcycled = with_composed_heads(GPTNeoXForCausalLM, compose_rank=2).from_pretrained(parent)
    upcycled.save_pretrained(ours := parent.with_name("ours"))
    assert convert("check", parent, ours) == 0
    edit_weights(ours, lambda weights: [w.normal_() for name, w in weights.items() if "composition." in name])
    assert convert("check", parent, ours) == 1
    assert convert("check", ours, ours) == 0
    reading = BertConfig(**NEOX | {"num_hidden_layers": 1}, is_decoder=True)
    with_composed_heads(BertLMHeadModel, dropout=0.0)(reading).save_pretrained(bert := parent.with_name("bert"))
    capsys.readouterr()
    assert convert("check", bert, bert) == 0
    assert "left-padded and cached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--qk-norm",), "--train-from-here"),
        (("--rank", "5"), "compose_rank (5) must be from 1"),
        (("--rank", "0"), "rank=0 must be a positive number"),
        (("--groups", "0"), "groups=0 must be a positive number"),
        (("--groups", "3"), "compose_groups (3) must divide"),
        (("--layer-types", "LX"), "must be letters L"),
        (("--layer-types", "LG"), "--sliding-window"),
        (("--sliding-window", "4"), "--layer-types"),
        (("--sliding-window", "1"), "at least 2"),
        (("--seed", "-1"), "seed=-1 must be between 0 and"),
        (("--reverse", "--rank", "3"), "leave out --reverse"),
        (("--reverse",), "holds a 'gpt_neox' model"),
        (("--revision", "main"), "is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_make_no_sense(
    options: tuple[str, ...], told: str, parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refusal(capsys, "pythia", parent, parent.with_name("ours"), *options)
    assert {path.name for path in parent.parent.iterdir()} == {"parent"}


def test_sources_of_the_wrong_kind(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = parent.with_name("ours")
    assert "qwen2, qwen3, seed_oss, smollm3 can be converted here" in refusal(capsys, "llama", parent, ours)
    assert "does not exist" in refusal(capsys, "pythia", parent.with_name("nowhere"), ours)
    assert "the Hub did not give it" in refusal(capsys, "pythia", "nobody/nothing", ours, "--revision", "step3000")
    parent.with_name("empty").mkdir()
    assert "is empty" in refusal(capsys, "pythia", parent.with_name("empty"), ours)
    qwen = save(parent.with_name("qwen"), Qwen3Config(**NEOX, num_key_value_heads=2, head_dim=16))
    told = refusal(capsys, "llama", qwen, ours, "--qk-norm", "--train-from-here")
    assert "has a query-key norm" in told
    padded = save(parent.with_name("padded"), GPTNeoXConfig(**NEOX, pad_token_id=101))
    assert "pad_token_id 101 is none of the 101 rows" in refusal(capsys, "pythia", padded, ours)
    assert not ours.exists()


@pytest.mark.parametrize(
    ("model_type", "lacking"),
    [
        ("arcee", "MLP without a gate"),
        ("ernie4_5", "rotary embedding that turns neighbouring channels"),
        ("granite", "embedding_multiplier, residual_multiplier or logits_scaling"),
        ("ministral3", "llama_4_scaling_beta"),
    ],
)
def test_what_a_dcformer_lacks_for_a_relative_of_llama_is_told(
    model_type: str, lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = save(tmp_path / "parent", LlamaConfig(**NEOX))
    edit_config(parent, model_type=model_type)
    told = f"holds a {model_type!r} model, but ours have no {lacking}; `dynattn convert --help`"
    assert told in refusal(capsys, "llama", parent, tmp_path / "ours")


@pytest.mark.parametrize("kind", ["llama", "pythia"])
def test_weights_without_a_head_are_told_from_damaged_ones(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = GPTNeoXConfig(**NEOX) if kind == "pythia" else LlamaConfig(**NEOX)
    AutoModel.from_config(bare).save_pretrained(tmp_path / "bare")
    fix = "are of a model without a head; give the checkpoint with its head, or load this one with AutoModelForCausalLM"
    assert fix in refusal(capsys, kind, tmp_path / "bare", tmp_path / "ours")
    config_class = DCPythiaConfig if kind == "pythia" else DCFormerConfig
    plain = config_class(**NEOX, compose_pre=False, compose_post=False, use_qk_norm=False, sliding_window=None)
    AutoModel.from_config(plain).save_pretrained(tmp_path / "our-bare")
    assert fix in refusal(capsys, kind, tmp_path / "our-bare", tmp_path / "theirs", "--reverse")


@pytest.mark.parametrize(
    ("kind", "config"), [("official", DCFormerConfig), ("rcmha", partial(RCMHAConfig, memory_type="segment"))]
)
def test_models_without_a_head_are_told_so_before_the_authors_format_is_written(
    kind: str, config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 101}
    AutoModel.from_config(config(**sizes, intermediate_size=64)).save_pretrained(tmp_path / "bare")
    fix = "are of a model without a head; give the checkpoint with its head, or load this one with AutoModelForCausalLM"
    assert fix in refusal(capsys, kind, tmp_path / "bare", tmp_path / "theirs", "--reverse")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("official", {"dim": 64, "n_layer": 2}), ("rcmha", {"kind": "rcmha", "heads": 4, "d_model": 64})],
)
def test_a_checkpoint_in_the_authors_format_is_converted_before_it_is_compared(
    kind: str, fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "their model"  # the command is to be pasted, so that the shell reads one word
    write_checkpoint(theirs, fields, {"weight": torch.ones(1)})
    fix = f"is in the authors' format; convert it first with `dynattn convert {kind} '{theirs}' DST`"
    assert fix in refusal(capsys, "check", theirs, theirs)


def test_damaged_sources(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = parent.with_name("ours")
    weights = load_file(parent / "model.safetensors")
    odd = {**weights, "gpt_neox.layers.0.attention.adapter": torch.ones(3)}
    save_file(odd, parent / "model.safetensors")
    assert "gpt_neox.layers.0.attention.adapter which is no part" in refusal(capsys, "pythia", parent, ours)
    lacking = {key: tensor for key, tensor in weights.items() if "final_layer_norm.bias" not in key}
    save_file(lacking, parent / "model.safetensors")
    assert "lack gpt_neox.final_layer_norm.bias" in refusal(capsys, "pythia", parent, ours)
    narrow = {**weights, "embed_out.weight": weights["embed_out.weight"][:-1].clone()}
    save_file(narrow, parent / "model.safetensors")
    assert "config.json asks for (101, 64)" in refusal(capsys, "pythia", parent, ours)
    sharded = save(parent.with_name("sharded"), GPTNeoXConfig(**NEOX), max_shard_size="60KB")
    next(iter(sorted(sharded.glob("*.safetensors")))).unlink()
    assert "is missing" in refusal(capsys, "pythia", sharded, ours)
    assert not ours.exists()


def test_a_tied_head_that_is_not_the_embedding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LlamaConfig(**NEOX, tie_word_embeddings=True)
    folder = save(tmp_path / "llama", config)
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    assert convert("llama", folder, tmp_path / "ours") == 0
    save_file({**weights, "lm_head.weight": head + 1}, folder / "model.safetensors")
    assert "but they differ" in refusal(capsys, "llama", folder, tmp_path / "other")


def test_a_tied_head_of_ours_that_is_not_the_embedding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = {"use_qk_norm": False, "layer_types": ["full_attention"] * 2, "compose_init_scale": 0}
    ours = save(tmp_path / "ours", DCFormerConfig(**{**NEOX, **plain}, tie_word_embeddings=True))
    weights = load_file(ours / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, ours / "model.safetensors")
    assert convert("llama", ours, tmp_path / "back", "--reverse") == 0
    save_file({**weights, "lm_head.weight": head + 1}, ours / "model.safetensors")
    assert "but they differ" in refusal(capsys, "llama", ours, tmp_path / "other", "--reverse", "--no-verify")


def test_a_destination_is_never_lost(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = parent.with_name("ours")
    assert convert("pythia", parent, ours, "--no-verify") == 0
    before = contents(ours)
    assert "--overwrite" in refusal(capsys, "pythia", parent, ours)
    change(parent, "gpt_neox.final_layer_norm.bias", float("nan"))
    assert "not finite" in refusal(capsys, "pythia", parent, ours, "--overwrite")
    assert contents(ours) == before
    assert {path.name for path in parent.parent.iterdir()} == {"parent", "ours"}


def test_a_wrong_result_fails_the_command(
    parent: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(self: object, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        (joined,) = tensors
        return list(joined.chunk(3))

    monkeypatch.setattr("dynattn.scripts.convert.common.transforms.Interleaved.forward", swapped)
    line = refusal(capsys, "pythia", parent, parent.with_name("ours"))
    assert "logits differ from the source's" in line and "Nothing was written" in line
    assert not parent.with_name("ours").exists()


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        (["model.safetensors"], ["pytorch_model.bin", "consolidated.safetensors"]),
        (["model-00001-of-00001.safetensors", "model.safetensors.index.json"], ["consolidated.safetensors"]),
        (["weights.safetensors"], ["pytorch_model.bin"]),
        (["pytorch_model.bin"], ["step-1/model.safetensors", "training_args.bin"]),
    ],
)
def test_of_a_name_on_the_hub_only_the_weights_that_are_read_are_downloaded(
    parent: Path, wanted: list[str], left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(parent)

    listing = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in (*left, *wanted)])
    monkeypatch.setattr("dynattn.scripts.convert.common.hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: listing)
    words = ("pythia", "someone/pythia", parent.with_name("ours"), "--revision", "step3000", "--no-verify")
    assert convert(*words) == 0
    assert (asked["name"], asked["revision"]) == ("someone/pythia", "step3000")
    assert list(filter_repo_objects([*left, *wanted], allow_patterns=asked["allow_patterns"])) == wanted
    others = {"config.json", "tokenizer.json", "*.spm", "additional_chat_templates/*.jinja", "generation_config.json"}
    assert others <= set(asked["allow_patterns"])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"mgate_dim": 4}, "mgate_dim is 4"),
        ({"position_scheme": "none"}, "position_scheme is 'none'"),
        ({"position_gain": "bucket"}, "position_gain is 'bucket'"),
        ({"rope_parameters": {"rope_type": "power", "power_factor": 0.5}}, "Seed-OSS or SmolLM3 models have one set"),
        ({"use_qk_norm": True, "mlp_bias": True}, "mlp_bias is True, but Qwen3 models"),
        ({"layer_types": MIXED, "attention_bias": True}, "attention_bias is True, but Ministral models"),
        ({"layer_types": MIXED, "mlp_bias": True}, "mlp_bias is True, but Ministral models"),
        ({"layer_types": ["sliding_attention"] * 2, "mlp_bias": True}, "mlp_bias is True, but Mistral models"),
        ({"layer_types": MIXED, "rope_parameters": PARTLY}, "but Phi-3 models can only have"),
        ({"attention_scaling": 0.5}, "attention_scaling is 0.5"),
        ({"attention_output_bias": True, "use_qk_norm": True}, "attention_output_bias is True"),
        ({"use_qk_norm": True, "qk_norm_type": "layer_norm"}, "qk_norm_type is 'layer_norm'"),
        ({"rope_parameters": PARTLY, "head_dim": 32}, "head_dim is 32, but Phi-3 models"),
        ({"rope_parameters": PARTLY, "attention_bias": True}, "attention_bias is True, but Phi-3 models"),
        ({"norm_placement": "output"}, "use_qk_norm is False, but EXAONE 4 models"),
        ({"norm_placement": "output", "use_qk_norm": True, "mlp_bias": True}, "mlp_bias is True, but EXAONE 4 models"),
        ({"norm_placement": "output", "use_qk_norm": True, "no_rope_layers": [0, 0]}, "no_rope_layers is [0, 0]"),
        ({"norm_placement": "output", "use_qk_norm": True, "layer_types": MIXED}, "can only have [1, 0]"),
        ({"use_qk_norm": True, "qk_norm_type": "joint_rms_norm"}, "qk_norm_type is 'joint_rms_norm'"),
        ({"no_rope_layers": [1, 0], "use_qk_norm": True}, "use_qk_norm is True, but SmolLM3 models"),
        ({"no_rope_layers": [1, 0], "rope_parameters": PARTLY}, "no_rope_layers is [1, 0], but Phi-3 models"),
        (
            {"no_rope_layers": [1, 0], "attention_bias": True, "attention_output_bias": False},
            "attention_output_bias is False",
        ),
        ({"rope_parameters": PARTLY | {"rope_type": "linear", "factor": 2.0}}, "`rope_parameters`'s type field"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_reverse_refuses_what_no_parent_has(
    fields: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"use_qk_norm": False, "layer_types": ["full_attention"] * 2, "compose_init_scale": 0}
    ours = save(tmp_path / "ours", DCFormerConfig(**{**NEOX, **plain, **fields}))
    assert told in refusal(capsys, "llama", ours, tmp_path / "back", "--reverse")


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("pythia", "attention_scaling", 0.5),
        ("pythia", "attention_output_bias", False),
        ("pythia", "position_scheme", "learned"),
        ("gpt2", "position_scheme", "rope"),
        ("gpt2", "use_parallel_residual", True),
        ("gpt2", "attention_bias", False),
        ("gpt2", "attention_output_bias", False),
        ("gpt2", "attention_scaling", 0.5),
        ("gpt2", "num_key_value_heads", 2),
    ],
)
def test_reverse_refuses_what_neox_or_gpt2_lacks(
    kind: str, field: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"use_qk_norm": False, "sliding_window": None, "mlp_bias": True, "compose_init_scale": 0}
    gpt2 = {"position_scheme": "learned", "use_parallel_residual": False} if kind == "gpt2" else {}
    ours = save(tmp_path / "ours", DCPythiaConfig(**{**NEOX, **plain, **gpt2, field: value}))
    assert f"{field} is {value!r}" in refusal(capsys, kind, ours, tmp_path / "back", "--reverse")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_placement", "input"),
        ("use_qk_norm", False),
        ("qk_norm_type", "rms_norm"),
        ("qk_norm_eps", 1e-5),
        ("mlp_bias", True),
        ("mgate_dim", 4),
        ("no_rope_layers", [1, 0]),
        ("rope_parameters", {"rope_type": "power", "power_factor": 0.5}),
    ],
)
def test_reverse_refuses_what_olmo_lacks(
    field: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"norm_placement": "output", "qk_norm_type": "joint_rms_norm", "compose_init_scale": 0}
    ours = save(tmp_path / "ours", DCFormerConfig(**{**NEOX, **plain, field: value}))
    line = refusal(capsys, "olmo", ours, tmp_path / "back", "--reverse")
    assert f"{field} is " in line and "but OLMo 2 or 3 models" in line


@pytest.mark.parametrize("field", ["add_cross_attention", "scale_attn_by_inverse_layer_idx"])
def test_a_gpt2_that_is_more_than_a_decoder_is_refused(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPT2Config(vocab_size=101, n_embd=32, n_layer=1, n_head=2, n_positions=64, **{field: True})
    assert f"{field} is True" in refusal(capsys, "gpt2", save(tmp_path / "gpt", config), tmp_path / "ours")


def test_a_share_of_rotation_that_llama_ignores_is_dropped(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    parent = save(tmp_path / "parent", LlamaConfig(**NEOX, rope_parameters=rope))
    assert convert("llama", parent, tmp_path / "ours") == 0  # the logits were compared


@pytest.mark.parametrize(
    ("kind", "config_class", "name", "value"),
    [
        ("llama", LlamaConfig, "sliding_window", 4096),
        ("llama", LlamaConfig, "no_rope_layers", [1, 0]),
        ("llama", MistralConfig, "attention_bias", True),
        ("llama", Phi3Config, "mlp_bias", True),
        ("olmo", Olmo2Config, "sliding_window", 4096),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_fields_that_the_code_of_the_parent_does_not_read_are_not_obeyed(
    kind: str, config_class: type[PreTrainedConfig], name: str, value: Any, tmp_path: Path
) -> None:
    fields = {**NEOX, "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 1}
    parent = save(tmp_path / "parent", config_class(**fields, **{name: value}))
    assert convert(kind, parent, tmp_path / "ours") == 0  # the logits were compared
    config = DCFormerConfig.from_pretrained(tmp_path / "ours")
    assert getattr(config, name) != value


def test_dropout_that_the_way_back_does_not_keep_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = {"use_qk_norm": False, "layer_types": ["full_attention"] * 2, "compose_pre": False, "compose_post": False}
    ours = save(tmp_path / "ours", DCFormerConfig(**{**NEOX, **plain, "attention_dropout": 0.1}))
    assert convert("llama", ours, tmp_path / "back", "--reverse") == 0
    assert "attention_dropout 0.1 is not kept" in capsys.readouterr().err
