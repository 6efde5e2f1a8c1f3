"""The official configurations of DCFormer and DCPythia, read and written."""

import pytest
import torch

from dynattn.scripts.convert.official.config import OfficialConfig, field_warnings, length_warnings
from dynattn.scripts.convert.official.export import to_json, to_official

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
    ours = official.to_ours(official.window_size)
    assert ours.sliding_window == 256
    returned = to_json(to_official(ours), getattr(torch, str(raw["torch_dtype"])))
    assert returned == {**raw, "pad_token_id": None}


def test_what_a_configuration_leaves_out_has_the_official_default() -> None:
    v1 = OfficialConfig.from_json({"dim": 200, "n_layer": 4, "n_head": 8}, KEYS["dcformer"])
    assert (v1.intermediate_size, v1.rope_base, v1.norm_eps, v1.window_size) == (768, 10000, 1e-5, 256)
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
    assert config.window_size == window
    assert "".join("L" if kind == "sliding_attention" else "G" for kind in config.layer_types) == letters
    ours = config.to_ours(config.window_size)
    returned = to_official(ours)
    assert returned.layer_types == config.layer_types
    assert returned.window_size == window
    told = [text for text in field_warnings(raw, config) if "taken at its word" in text]
    assert bool(told) == (window_size == 64 and window_type is not None)


@pytest.mark.parametrize(
    ("block_size", "window_size", "is_told"), [(191, 64, True), (192, 64, False), (1, None, False)]
)
def test_fewer_positions_than_three_windows_are_told(block_size: int, window_size: int | None, is_told: bool) -> None:
    raw = {"dim": 96, "n_layer": 4, "n_head": 8, "window_size": window_size, "block_size": block_size}
    assert bool([*length_warnings(OfficialConfig.from_json(raw, KEYS["dcformer"]))]) is is_told
