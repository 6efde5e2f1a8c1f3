"""`dynattn convert pythia`, `gpt2` and `llama`: ours starts as its parent, learns, and goes back unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases.checkpoints import assert_same_weights, convert_well, edit_config, save_tokenizer, weights_of
from cases.versions import is_before
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CwmConfig,
    Exaone4Config,
    GenerationConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

VOCABULARY, ROWS = 280, 304  # embeddings are padded
OFF = {"compose_pre": False, "compose_post": False}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PARTLY = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
PHI3 = {"pad_token_id": 0, "eos_token_id": 1}
PADDED, NOPE = {"pad_token_id": 0}, {"no_rope_layer_interval": 2}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 9}
CWM = {**WINDOWS, "bos_token_id": 1, "eos_token_id": 2}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
BY_TYPE = {SLIDING: {"rope_type": "default", "rope_theta": 500.0}, FULL: YARN}


def neox(heads: int, width: int, **fields: Any) -> GPTNeoXConfig:
    return GPTNeoXConfig(
        vocab_size=ROWS,
        hidden_size=heads * width,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        max_position_embeddings=128,
        initializer_range=0.1,
        **fields,
    )


def gpt2(**fields: Any) -> GPT2Config:
    return GPT2Config(
        vocab_size=ROWS, n_embd=64, n_inner=96, n_layer=2, n_head=4, n_positions=96, initializer_range=0.2, **fields
    )


def llama(config_class: type, **fields: Any) -> PreTrainedConfig:
    shape = {
        "vocab_size": ROWS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    return config_class(**{**shape, **fields})


PARENTS: dict[str, PreTrainedConfig] = {
    "neox-8x64": neox(8, 64),
    "neox-12x16-tied": neox(12, 16, tie_word_embeddings=True),
    "neox-8x80": neox(8, 80, rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    "neox-12x24-sequential": neox(12, 24, use_parallel_residual=False, attention_bias=False),
    "neox-40x16": neox(40, 16),
    "neox-4x128": neox(4, 128),
    "neox-linear-rope": neox(4, 16, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "gpt2": gpt2(layer_norm_epsilon=1e-3, activation_function="relu"),
    "gpt2-untied": gpt2(tie_word_embeddings=False, scale_attn_weights=True),
    "llama": llama(LlamaConfig, rope_parameters=LLAMA3),
    "llama-bias-tied": llama(LlamaConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-12-heads": llama(LlamaConfig, hidden_size=96, num_attention_heads=12, num_key_value_heads=12),
    "llama-8x256": llama(LlamaConfig, head_dim=256),
    "cwm": llama(CwmConfig, rope_parameters=LLAMA3, head_dim=24, **CWM),
    "cwm-bias-tied": llama(CwmConfig, mlp_bias=True, tie_word_embeddings=True, **{**CWM, "layer_types": [SLIDING] * 3}),
    "exaone4": llama(Exaone4Config, **WINDOWS, rms_norm_eps=1e-4, head_dim=24),
    "exaone4-full": llama(Exaone4Config, layer_types=[FULL] * 3, sliding_window=None, tie_word_embeddings=True),
    "ministral": llama(MinistralConfig, **WINDOWS, head_dim=24, rms_norm_eps=1e-4),
    "ministral-scaled": llama(MinistralConfig, rope_parameters=LLAMA3, head_dim=8, eos_token_id=None, **WINDOWS),
    "mistral": llama(MistralConfig, sliding_window=9),
    "mistral-full": llama(MistralConfig, sliding_window=None, head_dim=24),
    "phi3": llama(Phi3Config, rope_parameters=PARTLY, sliding_window=9, tie_word_embeddings=True, **PHI3),
    "phi3-long": llama(Phi3Config, rope_parameters=PARTLY | LONG, original_max_position_embeddings=32, **PHI3),
    "qwen2": llama(Qwen2Config, tie_word_embeddings=True),
    "qwen2-sliding": llama(Qwen2Config, head_dim=24, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": llama(Qwen3Config, head_dim=24, tie_word_embeddings=True),
    "qwen3-sliding": llama(Qwen3Config, head_dim=16, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "seed_oss": llama(SeedOssConfig, head_dim=24, rms_norm_eps=1e-4),
    "seed_oss-bias": llama(SeedOssConfig, attention_bias=False, attention_out_bias=True, mlp_bias=True),
    "smollm3": llama(SmolLM3Config, no_rope_layers=[1, 0, 1, 0], attention_bias=True, mlp_bias=True, **PADDED),
    "smollm3-sliding": llama(SmolLM3Config, head_dim=24, use_sliding_window=True, sliding_window=7, **NOPE, **PADDED),
    "olmo2": llama(Olmo2Config, attention_bias=True, head_dim=24, rms_norm_eps=1e-4),
    "olmo2-tied": llama(Olmo2Config, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "olmo3": llama(Olmo3Config, layer_types=[SLIDING, SLIDING, FULL], sliding_window=7, rope_parameters=BY_TYPE),
}
# Transformers reads nothing of this but the sets by layer type, which it adds; before 5.18 that is an error.
if not is_before("5.18"):
    PARENTS["olmo3-flat-rope"] = llama(Olmo3Config, rope_parameters=dict(YARN), layer_types=[SLIDING, FULL, FULL])
# Newer than the oldest Transformers that the project supports, and of Llama's class.
for name in ("InternLM3", "IQuestCoder"):
    if hasattr(transformers, f"{name}Config"):
        PARENTS[name.lower()] = llama(getattr(transformers, f"{name}Config"), head_dim=24, rms_norm_eps=1e-4)
# Parents that project queries, keys and values at once, and may round in another order.
JOINED = ("neox", "gpt2", "phi3")
# Parents whose sizes alone differ from those of the fast tests.
OTHERS = ("neox-8x80", "neox-40x16", "neox-4x128", "llama-12-heads", "llama-8x256", "mistral-full")


def kind_of(name: str) -> str:
    family = name.partition("-")[0]
    return {"neox": "pythia", "gpt2": "gpt2", "olmo2": "olmo", "olmo3": "olmo"}.get(family, "llama")


def save_parent(folder: Path, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A parent with every weight random, biases and norms too."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **options)
    return model


def load(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in OTHERS)) for name in PARENTS])
@torch.no_grad()
def test_the_result_starts_as_its_parent_and_goes_back_bit_for_bit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = save_parent(tmp_path / "parent", PARENTS[name], max_shard_size="700KB")
    convert_well(kind_of(name), tmp_path / "parent", tmp_path / "ours")
    assert "verified" in capsys.readouterr().out
    ids = torch.randint(0, ROWS, (2, 40))
    expected = parent(ids).logits
    ours = load(tmp_path / "ours")
    assert ours.config.model_type == ("dcpythia" if kind_of(name) in ("pythia", "gpt2") else "dcformer")
    logits = ours(ids).logits
    assert torch.equal(logits, load(tmp_path / "ours", **OFF)(ids).logits)
    if name.startswith(JOINED):
        torch.testing.assert_close(logits, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    else:
        assert torch.equal(logits, expected)

    convert_well(kind_of(name), tmp_path / "ours", tmp_path / "back", "--reverse")
    assert_same_weights(weights_of(tmp_path / "parent"), weights_of(tmp_path / "back"))
    restored = load(tmp_path / "back")
    assert torch.equal(restored(ids).logits, expected)
    if name != "mistral-full":  # without a window it is a Llama
        assert type(restored) is type(parent)
        assert restored.config.architectures == parent.config.architectures


@pytest.mark.parametrize("options", [(), ("--static", "--rank", "1"), ("--only", "post"), ("--only", "pre")])
@pytest.mark.parametrize("name", ["neox-8x64", "qwen3-sliding"])
def test_every_composition_parameter_learns_after_one_step(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    save_parent(tmp_path / "parent", PARENTS[name])
    convert_well(kind_of(name), tmp_path / "parent", tmp_path / "ours", "--no-verify", *options)
    model = load(tmp_path / "ours").train()
    ids = torch.randint(0, ROWS, (2, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model(ids, labels=ids).loss.backward()
    composition = {name: p for name, p in model.named_parameters() if "composition" in name}
    assert len(composition) == (4 if "--static" in options else 3) * model.config.num_hidden_layers
    assert not [name for name, p in composition.items() if p.grad is None or not p.grad.abs().max() > 0]


def test_tokenizer_and_generation_configuration_come_along(tmp_path: Path) -> None:
    parent = save_parent(tmp_path / "parent", neox(4, 16, bos_token_id=0, eos_token_id=0))
    save_tokenizer(tmp_path / "parent", VOCABULARY)
    settings = tmp_path / "parent" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text())))
    generation = GenerationConfig(do_sample=True, temperature=0.7, bos_token_id=0, eos_token_id=0)
    generation.save_pretrained(tmp_path / "parent")
    convert_well("pythia", tmp_path / "parent", tmp_path / "ours")
    ours, own = load(tmp_path / "ours"), AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert (tmp_path / "ours" / settings.name).read_text() == settings.read_text()  # it names the class already
    assert ours.generation_config.temperature == 0.7
    assert ours.config.vocab_size == ROWS > len(own)
    ids = own("the statement is executed", return_tensors="pt").input_ids
    chosen = {"do_sample": False, "max_new_tokens": 12}
    assert torch.equal(ours.generate(ids, **chosen), parent.generate(ids, **chosen))


@pytest.mark.parametrize("sharded", [False, True])
def test_old_pickles_and_names(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may have been saved on a GPU, which the machine that converts them has not."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    save_parent(tmp_path / "parent", neox(4, 16))
    weights = weights_of(tmp_path / "parent")
    (tmp_path / "parent" / "model.safetensors").unlink()
    for layer in range(2):
        prefix = f"gpt_neox.layers.{layer}.attention."
        weights[prefix + "bias"] = torch.ones(1, 1, 128, 128, dtype=torch.bool)
        weights[prefix + "masked_bias"] = torch.tensor(-1e9)
        weights[prefix + "rotary_emb.inv_freq"] = torch.ones(2)
    config = json.loads((tmp_path / "parent" / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rotary_pct": 0.5, "rotary_emb_base": 500}
    (tmp_path / "parent" / "config.json").write_text(json.dumps(config))
    parts = [dict(list(weights.items())[start::2]) for start in (0, 1)] if sharded else [weights]
    for number, part in enumerate(parts, start=1):
        name = f"pytorch_model-{number:05d}-of-00002.bin" if sharded else "pytorch_model.bin"
        torch.save(part, tmp_path / "parent" / name)
    if not sharded:
        convert_well("pythia", tmp_path / "parent", tmp_path / "ours")
        assert "dropped     6 tensors: buffers that old versions stored" in capsys.readouterr().out
    convert_well("pythia", tmp_path / "parent", tmp_path / "ours", "--overwrite", "--no-verify")
    rope = load(tmp_path / "ours").config.rope_parameters
    assert (rope["partial_rotary_factor"], rope["rope_theta"]) == (0.5, 500)
    ours = weights_of(tmp_path / "ours")
    joined = weights["gpt_neox.layers.1.attention.query_key_value.weight"].view(4, 3, 16, 64)
    assert torch.equal(ours["model.layers.1.self_attn.k_proj.weight"], joined[:, 1].reshape(64, 64))


@torch.no_grad()
def test_original_gpt2_files_lack_the_prefix_and_store_masks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = save_parent(tmp_path / "parent", gpt2())
    mask = {f"h.{layer}.attn.bias": torch.ones(1, 1, 96, 96).tril() for layer in range(2)}
    weights = weights_of(tmp_path / "parent")
    save_file(
        mask | {name.removeprefix("transformer."): weights[name] for name in weights},
        tmp_path / "parent" / "model.safetensors",
    )
    convert_well("gpt2", tmp_path / "parent", tmp_path / "ours")
    told = capsys.readouterr().out
    assert "dropped     2 tensors: buffers that old versions stored" in told
    ids = torch.randint(0, ROWS, (2, 40))
    torch.testing.assert_close(load(tmp_path / "ours")(ids).logits, parent(ids).logits)


@pytest.mark.parametrize(
    ("config", "goes_back_as"),
    [
        (llama(Phi3Config, **PHI3), LlamaConfig),
        (llama(SeedOssConfig, head_dim=8), Qwen2Config),
        (llama(CwmConfig, rope_parameters={"rope_theta": 500.0}, head_dim=8, **CWM), MinistralConfig),
        (llama(MinistralConfig, head_dim=8), MistralConfig),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
@torch.no_grad()
def test_a_model_that_another_type_computes_may_go_back_as_that(
    config: PreTrainedConfig, goes_back_as: type[PreTrainedConfig], tmp_path: Path
) -> None:
    parent = save_parent(tmp_path / "parent", config)
    convert_well("llama", tmp_path / "parent", tmp_path / "ours", "--no-verify")
    convert_well("llama", tmp_path / "ours", tmp_path / "back", "--reverse", "--no-verify")
    back = load(tmp_path / "back")
    assert isinstance(back.config, goes_back_as)
    ids = torch.randint(0, ROWS, (2, 40))
    torch.testing.assert_close(back(ids).logits, parent(ids).logits)


def test_a_mistral_with_layer_types_is_a_ministral(tmp_path: Path) -> None:
    parent = save_parent(tmp_path / "parent", llama(MinistralConfig, head_dim=8, **WINDOWS))
    edit_config(tmp_path / "parent", model_type="mistral", architectures=["MistralForCausalLM"])
    convert_well("llama", tmp_path / "parent", tmp_path / "ours")
    ids = torch.randint(0, ROWS, (2, 40))
    assert torch.equal(load(tmp_path / "ours")(ids).logits, parent(ids).logits)


def test_a_restored_seed_oss_has_no_dropout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parent(tmp_path / "parent", PARENTS["seed_oss"])
    convert_well("llama", tmp_path / "parent", tmp_path / "ours", "--no-verify")
    assert "residual_dropout 0.1 is not kept" in capsys.readouterr().err
    convert_well("llama", tmp_path / "ours", tmp_path / "back", "--reverse", "--no-verify")
    config = load(tmp_path / "back").config
    assert config.attention_dropout == config.residual_dropout == 0
