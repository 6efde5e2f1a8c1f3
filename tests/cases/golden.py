"""The golden cases, see `golden/README.md`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

GOLDEN = Path(__file__).parents[1] / "golden"


def case_names(*patterns: str) -> list[str]:
    """The folders that match one of `patterns`, sorted."""
    return sorted(path.name for pattern in patterns for path in GOLDEN.glob(pattern))


def read_meta(name: str) -> dict[str, Any]:
    """How a case was made."""
    return json.loads((GOLDEN / name / "meta.json").read_text())


def read_case(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """How a case was made, and its tensors."""
    return read_meta(name), load_file(GOLDEN / name / "tensors.safetensors")


def tensors_under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name begins with `prefix`, without it: `sd.` are weights, `grad.` gradients."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def flax_attention(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """One attention layer of the authors' vision transformer (flax, `[in, out]`) under our names and shapes."""
    projections = {"q_proj": "query_dense", "k_proj": "key_dense", "v_proj": "value_dense"}
    ours = {f"{name}.weight": official[f"{theirs}.kernel"].flatten(1).T for name, theirs in projections.items()}
    ours |= {f"{name}.bias": official[f"{theirs}.bias"].flatten() for name, theirs in projections.items()}
    ours |= {"o_proj.weight": official["o_dense.kernel"].T, "o_proj.bias": official["o_dense.bias"]}
    if "pre_proj.w" not in official:
        return ours
    ours |= {"q_norm.weight": official["query_ln.scale"], "k_norm.weight": official["key_ln.scale"]}
    ours["composition.static_weight"] = torch.stack([official["pre_proj.w"], official["post_proj.w"]])
    generators = {"dyn_w_proj": "composition", "q_dyn_w_proj": "composition", "k_dyn_w_proj": "key_composition"}
    for theirs, name in generators.items():
        if f"{theirs}.qkw" in official:
            components = official[f"{theirs}.qkw"].shape[1]
            ours[f"{name}.hidden_weight"] = official[f"{theirs}.dw1.kernel"]
            ours[f"{name}.factor_weight"] = official[f"{theirs}.qkw"]
            ours[f"{name}.gate_weight"] = official[f"{theirs}.dd.kernel"].unflatten(-1, (components, -1))
    return ours


def assert_gradients(module: nn.Module, expected: dict[str, Tensor]) -> None:
    """Every parameter of a module has the gradient of a case, to the noise of float64."""
    assert expected.keys() == dict(module.named_parameters()).keys()
    for key, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], atol=1e-8, rtol=0, msg=lambda m, k=key: f"{k}: {m}")
