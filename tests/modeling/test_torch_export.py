"""`torch.export` of a model serves all lengths, whatever its position scheme reads from tables, and all batches."""

from typing import Any

import pytest
import torch
from cases.seq2seq import make_model, random_tokens
from cases.vision_models import strengthen
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, ViTConfig, ViTForImageClassification

from dynattn import (
    DCFormerConfig,
    DCFormerForCausalLM,
    DCModernBertConfig,
    DCModernBertForSequenceClassification,
    DCViTConfig,
    DCViTForImageClassification,
    RCMHAConfig,
    RCMHAForCausalLM,
    with_composed_heads,
)

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
WINDOW = 6


def dcformer(**fields: Any) -> PreTrainedModel:
    return DCFormerForCausalLM(DCFormerConfig(**SMALL, **fields, compose_init_scale=20.0, sliding_window=WINDOW))


def rcmha(**fields: Any) -> PreTrainedModel:
    return RCMHAForCausalLM(RCMHAConfig(**SMALL, **fields, mem_len=WINDOW - 1))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: dcformer(), id="dcformer-rope"),
        pytest.param(lambda: dcformer(position_scheme="alibi"), id="dcformer-alibi", marks=pytest.mark.slow),
        pytest.param(lambda: dcformer(position_gain="distance"), id="dcformer-gain"),
        pytest.param(lambda: rcmha(), id="rcmha"),
        pytest.param(
            lambda: rcmha(attention_type="mha", position_scheme="alibi"), id="rcmha-alibi", marks=pytest.mark.slow
        ),
        pytest.param(lambda: rcmha(attention_type="mha", position_scheme="t5"), id="rcmha-t5"),
    ],
)
@torch.no_grad()
def test_an_exported_model_serves_all_lengths(make: Any) -> None:
    torch.manual_seed(1)
    model = make().eval()
    ids = torch.randint(1, 97, (2, 12))
    length = {1: torch.export.Dim("length", min=2, max=100)}
    shapes = {"input_ids": length, "attention_mask": length, "use_cache": None}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    exported = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False).module()
    for tokens in (2, WINDOW - 1, WINDOW, 40, 100):
        ids = torch.randint(1, 97, (2, tokens))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        given["attention_mask"][0, : tokens // 3] = 0
        seen = given["attention_mask"].bool()
        torch.testing.assert_close(exported(**given).logits[seen], model(**given).logits[seen], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_an_exported_vision_transformer_serves_all_batches() -> None:
    tokens = {"use_class_token": True, "classifier_pooling": "cls", "num_register_tokens": 2}
    config = DCViTConfig.from_size("tiny", num_hidden_layers=1, **tokens)
    model = DCViTForImageClassification(config).eval()
    images = torch.randn(5, config.num_channels, config.image_size, config.image_size)
    shapes = {"pixel_values": {0: torch.export.Dim("batch")}}
    exported = torch.export.export(model, (), {"pixel_values": images[:3]}, dynamic_shapes=shapes).module()
    for batch in (1, 2, 5):
        given = {"pixel_values": images[:batch]}
        torch.testing.assert_close(exported(**given).logits, model(**given).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_an_exported_vision_transformer_serves_all_batches_and_image_sizes() -> None:
    config = DCViTConfig.from_size(
        "tiny", num_hidden_layers=1, position_embedding_type="learned", image_size=16, patch_size=4
    )
    model = DCViTForImageClassification(config).eval()
    sides = {2: 4 * torch.export.Dim("rows", min=2, max=64), 3: 4 * torch.export.Dim("columns", min=2, max=64)}
    given = {"pixel_values": torch.randn(2, config.num_channels, 16, 24), "interpolate_pos_encoding": True}
    shapes = {"pixel_values": {0: torch.export.Dim("batch"), **sides}, "interpolate_pos_encoding": None}
    exported = torch.export.export(model, (), given, dynamic_shapes=shapes).module()
    for batch, size in ((1, (16, 16)), (3, (32, 20))):
        given["pixel_values"] = torch.randn(batch, config.num_channels, *size)
        torch.testing.assert_close(exported(**given).logits, model(**given).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_an_exported_text_classifier_serves_all_batches_and_lengths() -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    model = DCModernBertForSequenceClassification(DCModernBertConfig.from_size("tiny", **layers)).eval()
    both = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=100)}
    ids = torch.randint(9, 90, (3, 20))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    exported = torch.export.export(model, (), given, dynamic_shapes=dict.fromkeys(given, both)).module()
    for batch, length in ((1, 8), (2, 40)):
        ids = torch.randint(9, 90, (batch, length))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        given["attention_mask"][0, -3:] = 0
        torch.testing.assert_close(exported(**given).logits, model(**given).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["rcmha", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dcbart", "mha"))])
@torch.no_grad()
def test_an_exported_encoder_decoder_serves_all_batches_and_lengths(kind: str) -> None:
    model = make_model(kind, num_hidden_layers=1, decoder_layers=1)  # every layer takes a second to trace
    batch, lengths = torch.export.Dim("batch"), [torch.export.Dim(name, min=2, max=64) for name in ("source", "target")]
    names = ("input_ids", "decoder_input_ids")
    shapes: dict[str, Any] = {name: {0: batch, 1: length} for name, length in zip(names, lengths, strict=True)}
    given = {"input_ids": random_tokens(3, 5), "decoder_input_ids": random_tokens(3, 6), "use_cache": False}
    shapes["use_cache"] = None
    exported = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False).module()
    for rows, read, written in ((1, 9, 4), (2, 4, 9), (4, 7, 7)):
        given |= {"input_ids": random_tokens(rows, read), "decoder_input_ids": random_tokens(rows, written)}
        torch.testing.assert_close(exported(**given).logits, model(**given).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_an_exported_decoder_with_heads_composed_in_place_serves_all_batches_and_lengths() -> None:
    model = with_composed_heads(LlamaForCausalLM, compose_rank=2)(LlamaConfig(**SMALL)).eval()
    strengthen(model)
    both = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=100)}
    given = {"input_ids": torch.randint(1, 97, (3, 12)), "use_cache": False}
    shapes = {"input_ids": both, "use_cache": None}
    exported = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False).module()
    for batch, length in ((1, 8), (2, 40)):
        given["input_ids"] = torch.randint(1, 97, (batch, length))
        torch.testing.assert_close(exported(**given).logits, model(**given).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_an_exported_vision_transformer_with_heads_composed_in_place_serves_all_batches() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = ViTConfig(**sizes, image_size=16, patch_size=4)
    model = with_composed_heads(ViTForImageClassification, compose_rank=2, dropout=0.0)(config).eval()
    strengthen(model)
    shapes = {"pixel_values": {0: torch.export.Dim("batch")}}
    given = {"pixel_values": torch.randn(3, 3, 16, 16)}
    exported = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False).module()
    for batch in (1, 5):
        given = {"pixel_values": torch.randn(batch, 3, 16, 16)}
        torch.testing.assert_close(exported(**given).logits, model(**given).logits, atol=1e-5, rtol=1e-5)
