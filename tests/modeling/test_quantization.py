"""Quantised models: they load, generate, save and load again, and what composes their heads stays as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.models import make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, PreTrainedModel, TorchAoConfig
from transformers.cache_utils import QuantizedLayer

from dynattn import DCPythiaConfig, DCPythiaForCausalLM, RCMHAConfig, RCMHAForCausalLM

# Widths that the groups of every quantisation divide.
WIDE = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "initializer_range": 0.2}


def make(family: str) -> PreTrainedModel:
    if family == "dcformer":
        fields = {**WIDE, "num_key_value_heads": 2, "intermediate_size": 128, "layer_types": ["sliding_attention"]}
        return make_model(**fields)
    if family == "dcpythia":
        return DCPythiaForCausalLM(DCPythiaConfig(**WIDE, intermediate_size=128, compose_init_scale=20.0)).eval()
    return RCMHAForCausalLM(RCMHAConfig(**WIDE)).eval()


def torchao(name: str) -> dict[str, Any]:
    quantization = pytest.importorskip("torchao.quantization")
    options = {}
    if name == "IntxWeightOnlyConfig":
        options = {"weight_dtype": torch.int4, "granularity": quantization.granularity.PerGroup(32)}
    return {"quantization_config": TorchAoConfig(getattr(quantization, name)(**options))}


def bitsandbytes(**bits: bool) -> dict[str, Any]:
    pytest.importorskip("bitsandbytes")
    return {"quantization_config": BitsAndBytesConfig(**bits), "device_map": "cpu"}


WAYS = {
    "int8": lambda: torchao("Int8WeightOnlyConfig"),
    "int8 and activations": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "int4": lambda: torchao("IntxWeightOnlyConfig"),
    "bitsandbytes int8": lambda: bitsandbytes(load_in_8bit=True),
    "bitsandbytes nf4": lambda: bitsandbytes(load_in_4bit=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["dcformer", "dcpythia", "rcmha"])
@torch.no_grad()
def test_a_quantised_model_is_saved_loaded_and_generates(family: str, way: str, tmp_path: Path) -> None:
    options = WAYS[way]()
    full = make(family)
    full.save_pretrained(tmp_path / "full")
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path / "full", **options)
    quantised.save_pretrained(tmp_path / "small")
    device = {"device_map": "cpu"} if "device_map" in options else {}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small", **device)
    weights = {name: weight for name, weight in full.named_parameters() if "composition" in name}
    assert bool(weights) == (family != "rcmha")
    for model in (quantised, again):
        parameters = dict(model.named_parameters())
        assert all(torch.equal(parameters[name], weight) for name, weight in weights.items())
        projection = model.model.layers[0].self_attn.q_proj.weight.data
        assert type(projection) is not Tensor or projection.dtype != torch.float32
    ids = torch.randint(1, 97, (2, 12))
    exact, observed = full(ids).logits, again(ids).logits
    assert 0 < (observed - exact).abs().max() < exact.abs().max()
    assert again.generate(ids, max_new_tokens=4, min_new_tokens=4).shape == (2, 16)


class HalvedLayer(QuantizedLayer):
    """A cache layer that stores keys and values with fewer bits."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.half()

    def _dequantize(self, q_tensor: Tensor) -> Tensor:
        return q_tensor.float()


def test_a_quantised_cache_is_refused() -> None:
    model = make_model(num_hidden_layers=1, layer_types=["full_attention"])
    cache = DynamicCache(config=model.config)
    cache.layers[0] = HalvedLayer()
    with pytest.raises(ValueError, match="HalvedLayer cannot keep composition factors; use a DynamicCache"):
        model(torch.tensor([[1, 2]]), past_key_values=cache)
