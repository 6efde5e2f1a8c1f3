"""Configurations: sizes by name, derived fields, and one clear error for each mistake."""

from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from dynattn import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM

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
    ({"compose_groups": 3}, r"compose_groups \(3\) must divide num_attention_heads \(4\)"),
    ({"compose_groups": 4}, "leaves 1 to a group"),
    ({"compose_hidden_size": 0}, "compose_hidden_size"),
    ({"compose_norm_eps": 0.0}, "compose_norm_eps"),
    ({"sliding_window": 0}, r"sliding_window \(0\) must be at least 1"),
    ({"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "sliding_window is None"),
    ({"layer_types": ["full_attention"] * 3}, "must be equal to the number of `layer_types`"),
    ({"layer_types": ["chunked_attention"] * 4}, "only .* exist here"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' does not exist"),
    ({"mgate_dim": 5}, r"mgate_dim \(5\) must divide intermediate_size \(352\)"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES, ids=[next(iter(fields)) for fields, _ in MISTAKES])
def test_each_mistake_has_a_clear_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((StrictDataclassError, ValueError), match=message):
        DCFormerConfig.from_size("tiny", **fields)


def test_mistakes_of_other_kinds() -> None:
    with pytest.raises(ValueError, match=r"no size '3b'; choose from \['2.8b'"):
        DCFormerConfig.from_size("3b")
    with pytest.raises(StrictDataclassError, match="rotates 3 dimensions"):
        DCPythiaConfig.from_size("tiny", rope_parameters={"partial_rotary_factor": 0.1})
    config = DCFormerConfig.from_size("tiny")
    with pytest.raises(StrictDataclassError, match="expected int, got float"):
        config.hidden_size = 1.5
