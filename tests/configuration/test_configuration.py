"""Configurations: sizes by name, derived fields, and one clear error for each mistake."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from dynattn import (
    DCBartConfig,
    DCFormerConfig,
    DCFormerForCausalLM,
    DCModernBertConfig,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    DCViTConfig,
    RCMHAConfig,
    RCMHASeq2SeqConfig,
)
from dynattn.configuration import portable_config

# Millions of parameters, counted by hand from the shapes; the released ones are said to be about 2.85B, 6.94B and 7.9B.
PARAMETERS = {
    (DCFormerConfig, "405m"): 419.6,
    (DCFormerConfig, "2.8b"): 2850.0,
    (DCFormerConfig, "6.9b"): 6975.0,
    (DCFormerConfig, "8b"): 7920.0,
    (DCPythiaConfig, "70m"): 70.4 + 6 * (20 * 512 * 8 + 64 * 64 + 128) / 1e6,
    (DCPythiaConfig, "1b"): 1011.8 + 16 * (20 * 2048 * 8 + 64 * 64) / 1e6,
    (DCPythiaConfig, "12b"): 11846.0 + 36 * (20 * 5120 * 40 + 64 * 1600) / 1e6,
}


@pytest.mark.parametrize(("config_class", "size"), PARAMETERS, ids=str)
def test_named_sizes_have_the_parameters_of_their_name(config_class: type, size: str) -> None:
    model_class = DCFormerForCausalLM if config_class is DCFormerConfig else DCPythiaForCausalLM
    with torch.device("meta"):
        model = model_class(config_class.from_size(size))
    assert model.num_parameters() / 1e6 == pytest.approx(PARAMETERS[config_class, size], rel=0.01)


def test_defaults_are_the_released_models() -> None:
    assert DCFormerConfig().to_dict() == DCFormerConfig.from_size("2.8b").to_dict()
    assert (DCFormerConfig().initializer_range, DCFormerConfig().rms_norm_eps) == (0.006, 1e-6)
    config = DCPythiaConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (4096, 32, 50257)
    assert config.rope_parameters == {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"}
    for released in (DCFormerConfig(), config):
        assert released.layer_types[:3] == ["sliding_attention", "full_attention", "sliding_attention"]
        assert released.sliding_window == 256


def test_overrides_and_derived_fields() -> None:
    config = DCFormerConfig.from_size("405m", sliding_window=None, num_key_value_heads=4)
    assert set(config.layer_types) == {"full_attention"}
    assert (config.head_dim, config.num_key_value_heads) == (64, 4)
    assert DCFormerConfig.from_size("8b").layer_types[:5] == [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
    ]
    DCFormerConfig.from_size("8b").layer_types[1] = "sliding_attention"  # a list of its own
    assert DCFormerConfig.from_size("8b").layer_types[1] == "full_attention"
    neox = DCPythiaConfig(rotary_pct=0.5, rotary_emb_base=500)
    assert neox.rope_parameters == {"rope_theta": 500, "partial_rotary_factor": 0.5, "rope_type": "default"}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "128"}, "expected int, got str"),
    ({"num_attention_heads": 3}, r"hidden_size \(128\) must be a multiple of num_attention_heads \(3\)"),
    ({"num_attention_heads": 0}, r"num_attention_heads \(0\)"),
    ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide num_attention_heads \(4\)"),
    ({"head_dim": 31}, r"head_dim \(31\) must be even"),
    ({"compose_rank": 5}, r"compose_rank \(5\) must be from 1 to the heads of a group \(4\)"),
    ({"compose_rank": 0}, r"compose_rank \(0\) must be from 1"),
    ({"compose_rank": 3, "compose_groups": 2}, r"compose_rank \(3\) must be from 1 to the heads of a group \(2\)"),
    ({"compose_groups": 3}, r"compose_groups \(3\) must divide num_attention_heads \(4\)"),
    ({"compose_groups": 4}, "leaves 1 to a group"),
    ({"compose_hidden_size": 0}, "compose_hidden_size"),
    ({"sliding_window": 0}, r"sliding_window \(0\) must be at least 1"),
    ({"sliding_window": 1}, r"sliding_window \(1\) must be at least 2: .*nothing but itself"),
    ({"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "sliding_window is None"),
    ({"layer_types": ["full_attention"] * 3}, "must be equal to the number of `layer_types`"),
    ({"layer_types": ["chunked_attention"] * 4}, "only .* exist here"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' does not exist"),
    ({"num_attention_heads": 128}, r"head_dim \(1\) must be even.*hidden_size \(128\) / num_attention_heads \(128\)"),
    ({"no_rope_layers": [1, 0, 1]}, r"no_rope_layers \(\[1, 0, 1\]\) must have a 1 for each of the 4 layers"),
    ({"no_rope_layers": [1, 0, 1, 2]}, "no_rope_layers .* and a 0 for each that does not"),
    (
        {"no_rope_layers": [1] * 4, "position_scheme": "alibi"},
        "no_rope_layers needs position_scheme 'rope', not 'alibi'",
    ),
    ({"norm_placement": "both"}, "norm_placement 'both' does not exist; choose from .'input', 'output'."),
    ({"rope_scaling": 3}, "must be a dictionary"),
    ({"mgate_dim": 0}, "mgate_dim"),
    ({"mgate_dim": 5}, r"mgate_dim \(5\) must divide intermediate_size \(352\)"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES, ids=[next(iter(fields)) for fields, _ in MISTAKES])
def test_each_mistake_has_a_clear_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((StrictDataclassError, ValueError), match=message):
        DCFormerConfig.from_size("tiny", **fields)


@pytest.mark.parametrize(
    ("config_class", "fields"),
    [
        (DCFormerConfig, {"sliding_window": 2}),
        (DCFormerConfig, {"compose_low_rank": False, "compose_rank": 99}),
        (DCFormerConfig, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": None}}),
        (DCViTConfig, {"hidden_size": 6, "num_attention_heads": 3, "position_embedding_type": "learned"}),
        (RCMHASeq2SeqConfig, {"attention_type": "mha", "max_position_embeddings": 1}),
    ],
)
def test_values_at_a_limit_are_taken(config_class: Any, fields: dict[str, Any]) -> None:
    assert config_class.from_size("tiny", **fields)


def test_a_vision_transformer_needs_channels_for_both_sides_of_its_positions() -> None:
    with pytest.raises((StrictDataclassError, ValueError), match="at least 8"):
        DCViTConfig(hidden_size=4, num_attention_heads=2)


@pytest.mark.parametrize("config_class", [DCBartConfig, DCViTConfig])
def test_fields_beside_a_dictionary_count(config_class: Any) -> None:
    given = config_class.from_size("tiny").to_dict()
    assert config_class.from_dict(given, num_hidden_layers=1).num_hidden_layers == 1
    types = ["full_attention"] * 2
    config = DCFormerConfig.from_dict(
        DCFormerConfig.from_size("tiny").to_dict(), num_hidden_layers=2, layer_types=types
    )
    assert config.layer_types == types


NAN = float("nan")
FAMILIES = {
    "dcformer": DCFormerConfig,
    "dcpythia": DCPythiaConfig,
    "dcmodernbert": DCModernBertConfig,
    "dcvit": DCViTConfig,
    "dcbart": DCBartConfig,
    "rcmha": RCMHAConfig,
    "rcmha_seq2seq": RCMHASeq2SeqConfig,
}
LIMITS: list[tuple[str, Any, str]] = [
    ("vocab_size", 0, "must be at least 1 and at most 2147483647"),
    ("hidden_size", 10**12, "must be at least 1 and at most 2147483647"),
    ("intermediate_size", -7, "must be at least 1"),
    ("num_hidden_layers", 0, "must be at least 1 and at most 10000"),
    ("num_hidden_layers", 10**12, "must be at least 1 and at most 10000"),
    ("max_position_embeddings", -1, "must be at least 1"),
    ("initializer_range", NAN, "must be at least 0 and at most 1000"),
    ("initializer_range", -0.5, "must be at least 0"),
    ("compose_init_scale", -1.5, "must be at least 0 and at most 1000000"),
    ("compose_norm_eps", 0.0, "must be greater than 0"),
    ("qk_norm_eps", NAN, "must be greater than 0"),
    ("rms_norm_eps", -1.0, "must be greater than 0"),
    ("layer_norm_eps", float("inf"), "must be greater than 0"),
    ("hidden_dropout", 1.5, "must be at least 0 and smaller than 1"),
    ("attention_dropout", NAN, "must be at least 0 and smaller than 1"),
    ("compose_dropout", 1.0, "must be at least 0 and smaller than 1"),
    ("local_attention", 1, "must be at least 2"),
    ("norm_eps", 0.0, "must be greater than 0"),
    ("mlp_dropout", 1.0, "must be at least 0 and smaller than 1"),
    ("drop_path_rate", -0.5, "must be at least 0 and smaller than 1"),
    ("num_channels", 0, "must be at least 1"),
    ("num_register_tokens", -1, "must be at least 0"),
    ("representation_size", 0, "must be at least 1"),
    ("attention_scaling", NAN, "must be greater than 0"),
    # On a CPU PyTorch's causal SDPA gives NaN with it, and a model without composition runs that by default.
    ("attention_scaling", -0.5, "must be greater than 0"),
    ("rope_theta", 0, "must be greater than 0"),
    ("conv_kernel_size", 0, "must be at least 1"),
    ("hidden_act", "no-such", r"does not exist; choose from \["),
    ("compose_act", "", r"does not exist; choose from \["),
]


@pytest.mark.parametrize(("field", "value", "limit"), LIMITS, ids=[f"{field}={value}" for field, value, _ in LIMITS])
def test_every_field_names_its_value_and_limit(field: str, value: Any, limit: str) -> None:
    having = [config_class for config_class in FAMILIES.values() if field in config_class.__dataclass_fields__]
    assert having
    for config_class in having:
        with pytest.raises((StrictDataclassError, ValueError), match=rf"{field} \(?'?{value}'?\)? {limit}"):
            config_class.from_size("tiny", **{field: value})


def test_rotary_fields_of_a_model_that_does_not_rotate_are_dropped() -> None:
    config = DCFormerConfig(position_scheme="alibi", rope_theta=500.0, partial_rotary_factor=0.5)
    assert config.rope_parameters is None
    assert not {"rope_theta", "partial_rotary_factor"} & set(config.to_dict())


@pytest.mark.parametrize("name", ["sliding_window", "rope_theta", "global_rope_theta", "rope_scaling"])
def test_names_of_other_encoders_are_refused_with_the_fields_to_use(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.* are no fields: local_attention .* rope_parameters"):
        DCModernBertConfig(**{name: 64})


@pytest.mark.parametrize("config_class", [DCBartConfig, DCViTConfig, RCMHASeq2SeqConfig])
def test_fields_of_windows_are_refused_where_layers_have_none(config_class: Any) -> None:
    """Layers look for them in any configuration, so an unknown argument would take effect."""
    for fields in ({"sliding_window": 2}, {"layer_types": ["sliding_attention"] * 4}, {"memory_type": "segment"}):
        with pytest.raises(ValueError, match=rf"has no {re.escape(str(list(fields)))}: all layers see the same"):
            config_class.from_size("tiny", **fields)
    assert config_class.from_size("tiny", sliding_window=None, layer_types=None).num_hidden_layers


ROPE_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": 3}, "rope_type 3 does not exist; choose from"),
    ({"rope_type": ["yarn"]}, r"rope_type \['yarn'\] does not exist"),
    ({"rope_theta": 0}, r"rope_theta \(0\) must be greater than 0"),
    ({"rope_theta": True}, r"rope_theta \(True\) must be"),
    ({"rope_theta": "10000"}, r"rope_theta \('10000'\) must be greater than 0"),
    ({"rope_type": "linear"}, r"of rope_type 'linear' lack \['factor'\]"),
    ({"rope_type": "linear", "factor": -1}, r"factor \(-1\) must be greater than 0"),
    ({"rope_type": "linear", "factor": None}, r"factor \(None\) must be greater than 0"),
    ({"rope_type": "yarn"}, r"of rope_type 'yarn' lack \['factor'\]"),
    ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}, r"rope_theta \(1\) must be greater than 1 for 'yarn'"),
    ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}, r"beta_fast \(-1\) must be at least 0"),
    ({"rope_type": "longrope"}, r"lack \['short_factor', 'long_factor'\]"),
    (
        {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3},
        "short_factor .* must be a list of (16|4) numbers, one for each pair",
    ),
    (
        {"rope_type": "longrope", "short_factor": 1.0, "long_factor": [1.0] * 3},
        r"short_factor \(1.0\) must be a list of (16|4) numbers",
    ),
    (
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
        r"low_freq_factor \(1.0\) and high_freq_factor are equal",
    ),
    ({"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.0625}, "rotate at least 4 dimensions"),
    ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor \(1.5\) must be greater than 0 and at most 1"),
    ({"partial_rotary_factor": 0.01}, "rotates 0 dimensions"),
    ({"partial_rotary_factor": 0.1}, "rotates 3 dimensions; they must be even"),
    ({"full_attention": {"rope_type": "default"}}, r"rope_parameters lack 'sliding_attention', whose layers rotate"),
    ({"full_attention": {"rope_type": "default"}, "rope_theta": 1e4}, r"\['rope_theta'\] beside \['full_attention'\]"),
    ({"full_attention": {"rope_theta": 1e4}, "sliding_attention": None}, r"rope_parameters lack 'sliding_attention'"),
    ({"full_attention": None}, r"rope_parameters lack 'full_attention', whose layers rotate"),
    ({"full_attention": 3}, "rope_parameters of 'full_attention' \\(3\\) must be a dictionary"),
    ({"rope_type": "truncated"}, r"rope_type 'truncated' lack \['truncate_length'\]"),
    ({"rope_type": "power", "power_factor": -1}, r"power_factor \(-1\) must be at least 0"),
]


@pytest.mark.parametrize(("rope", "message"), ROPE_MISTAKES, ids=[str(rope) for rope, _ in ROPE_MISTAKES])
@pytest.mark.parametrize("config_class", [DCFormerConfig, DCPythiaConfig])
def test_each_mistake_in_rotary_parameters_has_a_clear_error(
    config_class: type, rope: dict[str, Any], message: str
) -> None:
    with pytest.raises((StrictDataclassError, ValueError), match=message):
        config_class.from_size("tiny", rope_parameters=rope)


def test_longrope_needs_a_trained_length_beyond_one() -> None:
    """Its attention factor divides by the logarithm of that length."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 1, **factors}
    with pytest.raises(
        (StrictDataclassError, ValueError), match=r"original_max_position_embeddings \(1\) must be greater than 1"
    ):
        DCFormerConfig.from_size("tiny", rope_parameters=rope)


def test_a_part_of_carope_is_refused_beside_rope_too() -> None:
    scheme = {"sliding_attention": "rope", "full_attention": "carope"}
    parts = {name: {"partial_rotary_factor": 0.5} for name in scheme}
    with pytest.raises((StrictDataclassError, ValueError), match="rotate whole heads"):
        DCPythiaConfig.from_size("tiny", position_scheme=scheme, rope_parameters=parts)


@pytest.mark.parametrize("config_class", [DCFormerConfig, DCPythiaConfig])
def test_a_layer_type_that_does_not_rotate_may_have_no_parameters(config_class: type) -> None:
    scheme = {"sliding_attention": "rope", "full_attention": "none"}
    given = {"sliding_attention": {"rope_theta": 500.0}, "full_attention": None}
    config = config_class.from_size("tiny", position_scheme=scheme, rope_parameters=given)
    assert config.rope_of("sliding_attention")["rope_theta"] == 500.0
    assert config_class(**config.to_dict()).to_dict() == config.to_dict()


def test_rotary_parameters_of_the_caller_stay_as_they_are() -> None:
    given = {"rope_theta": 500.0}
    config = DCFormerConfig.from_size("tiny", rope_parameters=given)
    assert given == {"rope_theta": 500.0}
    assert config.rope_parameters == {"rope_theta": 500.0, "rope_type": "default"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_names_no_code_unless_it_was_given_some(family: str, tmp_path: Path) -> None:
    """Trainers ask every configuration that Transformers does not have itself for its `auto_map`."""
    config = FAMILIES[family].from_size("tiny")
    assert config.auto_map == {}
    config.save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.auto_map == {}
    assert again.to_dict() == {**config.to_dict(), "_name_or_path": str(tmp_path)}
    again.auto_map["AutoConfig"] = "elsewhere.Config"
    assert FAMILIES[family].from_size("tiny").auto_map == {}
    assert again.to_dict()["auto_map"] == {"AutoConfig": "elsewhere.Config"}


def test_mistakes_of_other_kinds() -> None:
    with pytest.raises(ValueError, match=r"no size '3b'; choose from \['2.8b'"):
        DCFormerConfig.from_size("3b")
    config = DCFormerConfig.from_size("tiny")
    with pytest.raises(StrictDataclassError, match="expected int, got float"):
        config.hidden_size = 1.5


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("dcformer", {"sliding_window": None}, "sliding_window is None"),
        ("dcformer", {"compose_rank": 9}, r"compose_rank \(9\) must be from 1"),
        ("dcformer", {"attention_dropout": 0.1}, "use compose_dropout"),
        ("dcformer", {"hidden_act": "xx"}, "hidden_act"),
        ("dcformer", {"num_hidden_layers": 5}, "must be equal to the number of `layer_types`"),
        ("rcmha", {"mem_len": 600}, r"mem_len \(600\) must be smaller"),
        ("rcmha", {"sliding_window": 4}, "follow from memory_type and mem_len"),
        ("rcmha_seq2seq", {"sliding_window": 4}, r"RCMHASeq2SeqConfig has no \['sliding_window'\]"),
        ("rcmha_seq2seq", {"memory_type": "segment"}, r"RCMHASeq2SeqConfig has no \['memory_type'\]"),
    ],
)
def test_fields_given_when_a_checkpoint_is_loaded_are_checked(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    FAMILIES[family].from_size("tiny").save_pretrained(tmp_path)
    for load in (AutoConfig, FAMILIES[family]):
        with pytest.raises((StrictDataclassError, ValueError), match=message):
            load.from_pretrained(tmp_path, **changes)


def test_fields_given_when_a_checkpoint_is_loaded_count(tmp_path: Path) -> None:
    DCFormerConfig.from_size("tiny").save_pretrained(tmp_path)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    config = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=1, rope_parameters=rope, num_labels=7)
    assert (config.num_hidden_layers, config.layer_types, config.num_labels) == (1, ["sliding_attention"], 7)
    assert config.rope_parameters == rope
    config, unused = DCFormerConfig.from_pretrained(tmp_path, compose_rank=1, foo=3, return_unused_kwargs=True)
    assert config.compose_rank == 1 and unused == {"foo": 3}


def test_fewer_layers_of_a_checkpoint_are_its_first_ones(tmp_path: Path) -> None:
    DCFormerConfig.from_size("tiny", no_rope_layers=[0, 1, 1, 0]).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=3)
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config.no_rope_layers == [0, 1, 1]
    assert AutoConfig.from_pretrained(tmp_path, num_hidden_layers=2, no_rope_layers=[1, 0]).no_rope_layers == [1, 0]


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling", "partial_rotary_factor"])
def test_rotary_fields_that_rcmha_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.* are no fields of this family, .* set rope_theta"):
        RCMHAConfig(attention_type="mha", position_scheme="rope", **{name: {"rope_type": "linear", "factor": 2.0}})


@pytest.mark.parametrize(
    ("config_class", "fields", "expected"),
    [
        (
            DCFormerConfig,
            {"compose_rnak": 3},
            "no field compose_rnak, which changes nothing; did you mean compose_rank?",
        ),
        (
            DCPythiaConfig,
            {"layer_norm_epsilon": 1e-6},
            "no field layer_norm_epsilon, which changes nothing; did you",
        ),
        (DCFormerConfig, {"d_model": 64}, "no field d_model, which changes nothing; did you mean hidden_size?"),
        (DCBartConfig, {"encoder_layers": 2}, "no field encoder_layers, which changes nothing; did you mean num_"),
        (DCBartConfig, {"dropout": 0.5}, "no field dropout, which changes nothing; did you mean hidden_dropout?"),
        (DCPythiaConfig, {"hidden_dropout": 0.1}, "DCPythiaConfig has no field hidden_dropout, which changes nothing"),
        (RCMHAConfig, {"position_gain": "distance"}, "RCMHAConfig has no field position_gain, which changes nothing"),
        (DCBartConfig, {"position_scheme": "alibi"}, "DCBartConfig has no field position_scheme, which changes"),
        (RCMHAConfig, {"num_key_value_heads": 2}, "RCMHAConfig has no field num_key_value_heads, which changes"),
        (RCMHAConfig, {"compose_rank": 1}, "RCMHAConfig has no field compose_rank, which changes nothing"),
        (RCMHAConfig, {"mixer": "talking_heads"}, "RCMHAConfig has no field mixer, which changes nothing"),
        (DCFormerConfig, {"torch_dtype": "float32", "rope_theta": 2e4, "temperature": 0.5, "_name_or_path": "x"}, None),
        (DCBartConfig, {"vocab_size": 100, "num_hidden_layers": 2, "decoder_layers": 2}, None),
    ],
)
def test_fields_that_look_misspelled_are_warned_of(
    config_class: type, fields: dict[str, Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(portable_config.logger, "warning_once", warned.append)
    config_class(**fields)
    assert len(warned) == (expected is not None)
    assert expected is None or expected in warned[0]
