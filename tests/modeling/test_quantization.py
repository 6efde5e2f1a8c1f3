"""Quantized models: they load, generate, save and load again, and what composes their heads stays as it was."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.models import make_model
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TorchAoConfig,
    cache_utils,
)
from transformers.cache_utils import Cache, QuantizedLayer

from dynattn import (
    DCBartConfig,
    DCBartForConditionalGeneration,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    RCMHAConfig,
    RCMHAForCausalLM,
)

# Widths that the groups of every quantization divide.
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
def test_a_quantized_model_is_saved_loaded_and_generates(family: str, way: str, tmp_path: Path) -> None:
    options = WAYS[way]()
    full = make(family)
    full.save_pretrained(tmp_path / "full")
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "full", **options)
    quantized.save_pretrained(tmp_path / "small")
    device = {"device_map": "cpu"} if "device_map" in options else {}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small", **device)
    weights = {name: weight for name, weight in full.named_parameters() if "composition" in name}
    assert bool(weights) == (family != "rcmha")
    for model in (quantized, again):
        parameters = dict(model.named_parameters())
        assert all(torch.equal(parameters[name], weight) for name, weight in weights.items())
        projection = model.model.layers[0].self_attn.q_proj.weight.data
        assert type(projection) is not Tensor or projection.dtype != torch.float32
    ids = torch.randint(1, 97, (2, 12))
    exact, observed = full(ids).logits, again(ids).logits
    assert 0 < (observed - exact).abs().max() < exact.abs().max()
    assert again.generate(ids, max_new_tokens=4, min_new_tokens=4).shape == (2, 16)


@pytest.mark.parametrize("family", ["dcformer", "dcpythia"])
def test_copies_of_forward_passes_find_torch(family: str) -> None:
    """llm-compressor traces copies of their code, to which it adds `torch.fx.wrap`, in the originals' namespaces."""
    model: Any = make(family)
    for module in (model, model.model):
        assert inspect.unwrap(type(module).forward).__globals__["torch"] is torch


@pytest.mark.parametrize("family", ["dcformer", "dcpythia"])
@torch.no_grad()
def test_llm_compressor_calibrates_layer_by_layer(family: str, tmp_path: Path) -> None:
    compressor = pytest.importorskip("llmcompressor")
    recipe = compressor.modifiers.quantization.GPTQModifier(scheme="W8A8", ignore=["lm_head"])
    make(family).save_pretrained(tmp_path / "full")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel())).save_pretrained(tmp_path / "full")
    full = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    ids = torch.randint(1, 97, (8, 12))
    exact, weights = full(ids).logits, {name: p.clone() for name, p in full.named_parameters() if "composition" in name}
    samples = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    compressor.oneshot(model=full, recipe=recipe, dataset=samples, max_seq_length=12, pipeline="sequential")
    full.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    parameters = dict(again.named_parameters())
    assert all(torch.equal(parameters[name], weight) for name, weight in weights.items())
    assert 0 < (again(ids).logits - exact).abs().max() < 0.5 * exact.abs().max()
    assert again.generate(ids, max_new_tokens=4, min_new_tokens=4).shape == (8, 16)


FULL_LAYERS = {"layer_types": ["full_attention"] * 3}
KINDS = ["QuantoQuantizedLayer", "HQQQuantizedLayer", "Fp8QuantizedLayer"]


def quantized_cache(kind: str, layers: int) -> Cache:
    """An empty cache, made without the packages that would quantize in it."""
    if not hasattr(cache_utils, kind):
        pytest.skip(f"this version of Transformers has no {kind}")
    made = []
    for _ in range(layers):
        layer = getattr(cache_utils, kind).__new__(getattr(cache_utils, kind))
        QuantizedLayer.__init__(layer, residual_length=4) if isinstance(layer, QuantizedLayer) else layer.__init__()
        made.append(layer)
    return Cache(layers=made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_cache_that_loses_nothing_generates_as_a_dynamic_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make_model(**FULL_LAYERS), torch.randint(1, 97, (2, 12))
    cache = quantized_cache(kind, layers=3)
    monkeypatch.setattr(type(cache.layers[0]), "_quantize", lambda self, states, *_, **__: (states.clone(), None))
    monkeypatch.setattr(type(cache.layers[0]), "_dequantize", lambda self, stored: stored[0])
    beams = {"attention_mask": torch.ones_like(ids), "num_beams": 2, "max_new_tokens": 14, "min_new_tokens": 14}
    expected = model.generate(ids, **beams)
    assert torch.equal(model.generate(ids, past_key_values=cache, **beams), expected)
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, **beams), expected)


@torch.no_grad()
def test_a_quantized_cache_rounds_keys_and_values_but_no_factors() -> None:
    model, ids = make_model(**FULL_LAYERS), torch.randint(1, 97, (2, 12))
    quantized, exact = quantized_cache("Fp8QuantizedLayer", layers=3), DynamicCache(config=model.config)
    for step in ids.split([8, 1, 3], dim=1):
        observed, expected = (model(step, past_key_values=cache).logits for cache in (quantized, exact))
    assert torch.equal(quantized.layers[0].factors.keys, exact.layers[0].factors.keys)  # the first layer reads no cache
    assert 0 < (observed - expected).abs().max() < 0.5 * expected.abs().max()


class HalvedLayer(QuantizedLayer):
    """A cache layer that stores keys and values with fewer bits, as another package might define it."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.half()

    def _dequantize(self, q_tensor: Tensor) -> Tensor:
        return q_tensor.float()


def test_an_unknown_quantized_cache_is_refused() -> None:
    model = make_model(num_hidden_layers=1, layer_types=["full_attention"])
    cache = DynamicCache(config=model.config)
    cache.layers[0] = HalvedLayer()
    with pytest.raises(ValueError, match="HalvedLayer cannot keep composition factors; use a DynamicCache"):
        model(torch.tensor([[1, 2]]), past_key_values=cache)


def test_cross_attention_refuses_a_quantized_cache() -> None:
    model = DCBartForConditionalGeneration(DCBartConfig.from_size("tiny"))
    caches = EncoderDecoderCache(DynamicCache(config=model.config), quantized_cache("Fp8QuantizedLayer", layers=2))
    ids = torch.tensor([[3, 4]])
    with pytest.raises(ValueError, match="Fp8QuantizedLayer cannot keep the keys of the source"):
        model(ids, decoder_input_ids=ids, past_key_values=caches)
