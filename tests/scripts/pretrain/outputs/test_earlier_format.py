"""Checkpoints of the first version, which numbered the weights, give each weight its own moments."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model

import dynattn
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.optimizer import build_optimizer
from dynattn.scripts.pretrain.outputs.earlier_format import load_earlier

SHAPE = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
PLAIN = {**SHAPE, "compose_pre": False, "compose_post": False}
COMPOSED = {**SHAPE, "compose_static": True, "compose_query_wise": False, "compose_key_wise": False}
PROJECTIONS = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
# Names in the order in which version 0.1.0 numbered them.
DCFORMER = [
    *PROJECTIONS,
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
]
DCFORMER_REST = [
    "embed_tokens.weight",
    *(f"layers.0.{name}.weight" for name in ("self_attn.q_norm", "self_attn.k_norm")),
    *(f"layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
    "norm.weight",
]
RMHA = [
    *(f"layers.0.self_attn.{name}" for name in ("position_embeddings", "position_bias", "content_bias")),
    *PROJECTIONS,
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("up", "down")),
]
RMHA_REST = [
    "embed_tokens.weight",
    *(f"layers.0.{name}_proj.bias" for name in ("self_attn.v", "self_attn.o", "mlp.up", "mlp.down")),
    *(f"layers.0.input_layernorm.{kind}" for kind in ("weight", "bias")),
    *(f"layers.0.post_attention_layernorm.{kind}" for kind in ("weight", "bias")),
    "norm.weight",
    "norm.bias",
]


@pytest.mark.parametrize(
    ("family", "fields", "order", "options"),
    [
        ("DCFormer", PLAIN, [*DCFORMER, *DCFORMER_REST], {}),
        (
            "DCFormer",
            COMPOSED,
            [*DCFORMER, *DCFORMER_REST, "layers.0.self_attn.composition.static_weight"],
            {"composition_learning_rate": 1e-4},
        ),
        ("RCMHA", {**SHAPE, "attention_type": "rmha", "mem_len": 4}, [*RMHA, *RMHA_REST], {}),
    ],
)
def test_each_weight_gets_its_own_moments(
    family: str, fields: dict[str, Any], order: list[str], options: dict[str, Any], tmp_path: Path
):
    model = getattr(dynattn, f"{family}Model")(getattr(dynattn, f"{family}Config")(**fields))
    weights = dict(model.named_parameters())
    assert set(order) == set(weights)
    moments = {number: torch.full_like(weights[name], number) for number, name in enumerate(order)}
    states = {number: {"step": torch.tensor(1.0), "exp_avg": moment} for number, moment in moments.items()}
    torch.save({"state": states}, tmp_path / "optimizer.bin")
    save_model(model, str(tmp_path / "model.safetensors"))
    optimizer = build_optimizer(model, PretrainArguments(output="x", **options))
    load_earlier(tmp_path, model, optimizer, 0)
    assert [int(optimizer.state[weights[name]]["exp_avg"].unique()) for name in order] == list(range(len(order)))
