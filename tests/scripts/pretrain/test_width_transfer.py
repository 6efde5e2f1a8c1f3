"""Hyperparameters for wider models: the coordinate check of muP, with the composition's own activations."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from dynattn import DCFormerConfig, DCPythiaConfig
from dynattn.modeling.layers.head_composition import DynamicComposition, PackedFactors
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.model import build_model
from dynattn.scripts.pretrain.model_config import plan_config
from dynattn.scripts.pretrain.optimizer import build_optimizer
from dynattn.scripts.pretrain.width_transfer import check_transfer, rate_factors, transfer_config

BASE, WIDTHS, HEAD_DIM = 64, (64, 128, 256), 16
UPDATES, LENGTH, VOCABULARY = 4, 32, 64


def arguments_for(width: int, transfers: bool, **options: Any) -> PretrainArguments:
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": width // HEAD_DIM}
    fixed = {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "initializer_range": 0.1, "compose_static": True}
    return PretrainArguments(
        output="x",
        model_type="dcformer",
        model_config=sizes | fixed,
        learning_rate=1e-2,
        base_width=BASE if transfers else None,
        **options,
    )


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Activations by what they are, while the block runs the model."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, tensor: Tensor) -> None:
        found.setdefault(name, []).append(tensor.detach().clone())

    def keep_factors(module: DynamicComposition, _: Any, factors: PackedFactors) -> None:
        for terms in factors[:4]:
            down, up, gate = terms.split((module.rank, module.rank, 1), dim=2)
            # A sum over heads meets an up factor, so what counts is its size times their number.
            keep("up factors times heads", up * module.num_heads)
            keep("down factors", down)
            keep("gates", gate)

    def keep_output(kind: str, _: nn.Module, __: Any, output: Any) -> None:
        keep(kind, output[0] if isinstance(output, tuple) else output)

    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, DynamicComposition):
            hooks.append(module.register_forward_hook(keep_factors))
        elif name.endswith(("self_attn", "mlp", "lm_head")):
            hooks.append(module.register_forward_hook(partial(keep_output, name.split(".")[-1])))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def changes(width: int, transfers: bool, **options: Any) -> dict[str, float]:
    """How far activations of each kind have moved after some updates, root mean square."""
    arguments = arguments_for(width, transfers, **options)
    torch.manual_seed(0)
    model = build_model(arguments, plan_config(arguments))
    optimizer = build_optimizer(model, arguments)
    for group in optimizer.param_groups:
        group["lr"] = arguments.learning_rate * group["rate_factor"]
    ids = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    with recorded(model) as before, torch.no_grad():
        model(ids)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    with recorded(model) as after, torch.no_grad():
        model(ids)
    return {
        kind: math.sqrt(
            np.mean([(a - b).square().mean().item() for a, b in zip(after[kind], before[kind], strict=True)])
        )
        for kind in before
    }


def exponents(transfers: bool, **options: Any) -> dict[str, float]:
    """With which power of the width each kind of activation moves: the slope of logarithms."""
    moved = [changes(width, transfers, **options) for width in WIDTHS]
    widths = np.log(WIDTHS)
    return {kind: float(np.polyfit(widths, np.log([row[kind] for row in moved]), 1)[0]) for kind in moved[0]}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_activations_move_alike_at_every_width(optimizer: str):
    """The theory knows powers of the width that are multiples of 1/2, so 0 is the nearest one below 1/4."""
    found = exponents(transfers=True, optimizer=optimizer)
    assert {"up factors times heads", "down factors", "gates", "self_attn", "mlp", "lm_head"} == found.keys()
    assert all(abs(slope) < 0.25 for slope in found.values()), found


def test_without_transfer_wider_models_move_further():
    found = exponents(transfers=False)
    assert found["lm_head"] > 0.25
    assert found["up factors times heads"] > 0.25
    assert found["gates"] > 0.25


@pytest.mark.parametrize("family", [DCFormerConfig, DCPythiaConfig])
def test_at_the_base_width_nothing_changes(family: type):
    model_type = family.model_type  # type: ignore[attr-defined]
    plain = PretrainArguments(
        output="x", model_type=model_type, model_size="tiny" if family is DCFormerConfig else None
    )
    config = plan_config(plain)
    same = copy.deepcopy(config)
    transfer_config(same, config.hidden_size)
    assert same.to_dict() == config.to_dict()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert set(rate_factors(model, config.hidden_size, set()).values()) == {1.0}


def test_initial_weights_are_those_of_the_table():
    torch.manual_seed(0)
    plain = build_model(arguments_for(256, transfers=False), plan_config(arguments_for(256, transfers=False)))
    torch.manual_seed(0)
    scaled = build_model(arguments_for(256, transfers=True), plan_config(arguments_for(256, transfers=True)))
    for (name, weight), before in zip(scaled.named_parameters(), plain.parameters(), strict=True):
        factor = 1 / 4 if name == "lm_head.weight" else 1 / 2 if name.endswith("_proj.weight") else 1
        assert torch.equal(weight, before * factor), name
    assert scaled.config.compose_norm_eps == plain.config.compose_norm_eps / 16


def test_models_that_the_rules_do_not_cover_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="base_width is for dcformer and dcpythia, and this is a llama; leave it out"):
        check_transfer(LlamaConfig(), 64)
    tied = DCFormerConfig.from_size("tiny", tie_word_embeddings=True)
    with pytest.raises(UserError, match="are tied; set tie_word_embeddings: false"):
        check_transfer(tied, 64)
    tied.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="are tied; set tie_word_embeddings: false"):
        plan_config(PretrainArguments(output="x", init_from=str(tmp_path), base_width=64))
