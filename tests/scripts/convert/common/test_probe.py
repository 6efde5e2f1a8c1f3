"""Comparing what two models answer: shapes, logits, and generated tokens, of which one may give fewer."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MistralConfig

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.convert.common.decoder_probe import TEXT, make_probe
from dynattn.scripts.convert.common.encoder_probe import ENCODER
from dynattn.scripts.convert.common.model_loading import load_config, load_converted, load_for_probe
from dynattn.scripts.convert.common.probe import (
    LARGEST_MAP,
    LARGEST_NOISE,
    Answers,
    Comparison,
    by_head,
    compare_answers,
)
from dynattn.scripts.convert.official import verify as official_verify

LOGITS = torch.randn(2, 3)
ANSWERS = Answers("6 tokens", (LOGITS,), 1e-7, generated=torch.tensor([[2, 5, 7]]))


def test_models_are_equal_that_answer_and_generate_alike() -> None:
    assert compare_answers(ANSWERS, ANSWERS).equal
    for tokens in ([[2, 5, 8]], [[2, 5]]):
        comparison = compare_answers(ANSWERS, dataclasses.replace(ANSWERS, generated=torch.tensor(tokens)))
        assert not comparison.equal and comparison.difference == 0
        assert comparison.describe().startswith(
            "6 tokens: logits are equal bit for bit, but other tokens are generated"
        )


def test_models_whose_logits_are_all_zero_are_equal() -> None:
    zero = dataclasses.replace(ANSWERS, ways=(torch.zeros(2, 3),))
    assert compare_answers(zero, zero).equal
    assert not compare_answers(zero, ANSWERS).equal


def test_rounding_explains_only_a_small_share_of_the_logits() -> None:
    found = compare_answers(dataclasses.replace(ANSWERS, noise=1.0), dataclasses.replace(ANSWERS, ways=(LOGITS + 1,)))
    assert found.noise == pytest.approx(LARGEST_NOISE * LOGITS.abs().max().item())
    assert not found.equal


def test_the_effect_is_that_on_the_loss_if_both_models_have_one() -> None:
    losses = (2.0, 2.5)
    comparison = Comparison("6 tokens, padded or not", difference=0.25, noise=0.0, losses=losses)
    expected = "on 6 tokens the loss changes from 2.00000 to 2.50000 (+5.0e-01), logits by up to 2.5e-01"
    assert comparison.describe_effect() == expected
    without = dataclasses.replace(comparison, losses=(2.0, None))
    assert without.describe_effect() == "on 6 tokens logits change by up to 2.5e-01"


@pytest.mark.parametrize(
    ("architectures", "auto_class"),
    [
        (["DCViTForImageClassification"], "AutoModelForImageClassification"),
        (["DCViTModel"], "AutoModel"),
        ([], "AutoModel"),
    ],
)
def test_the_head_decides_on_the_auto_class(architectures: list[str], auto_class: str) -> None:
    assert by_head(architectures) == auto_class


def test_logits_that_are_not_finite_are_never_equal() -> None:
    assert not compare_answers(ANSWERS, dataclasses.replace(ANSWERS, ways=(LOGITS * float("nan"),))).equal


def test_models_differ_even_if_the_first_depends_on_how_it_is_run() -> None:
    first = dataclasses.replace(ANSWERS, noise=10.0)
    assert compare_answers(first, first).equal
    assert not compare_answers(first, dataclasses.replace(ANSWERS, ways=(LOGITS * 1.1,))).equal


def test_answers_of_other_shapes_are_refused() -> None:
    with pytest.raises(UserError, match=r"answers of shapes \(2, 3\) and \(2, 2\) cannot be compared"):
        compare_answers(ANSWERS, dataclasses.replace(ANSWERS, ways=(LOGITS[:, :2],)))


@pytest.mark.parametrize(("window", "length"), [(100, 208), (4096, 2364), (None, 64)])
def test_a_probe_is_longer_than_two_windows_if_its_maps_stay_in_memory(
    tmp_path: Path, window: int | None, length: int
) -> None:
    save_file({"weight": torch.zeros(8)}, tmp_path / "model.safetensors")
    config = MistralConfig(vocab_size=50, hidden_size=96, num_attention_heads=12, sliding_window=window)
    ids = make_probe(tmp_path, config, config)
    assert ids.shape == (2, length)
    assert 2 * 12 * length**2 <= LARGEST_MAP


def test_a_model_with_few_positions_is_not_compared(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="max_position_embeddings=8 is too short for a comparison, which needs 9"):
        make_probe(tmp_path, MistralConfig(max_position_embeddings=8), MistralConfig())


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    model = DCFormerForCausalLM(DCFormerConfig.from_size("tiny"))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].t().contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"do not fit its config\.json: .*{name}"):
        load_for_probe(tmp_path, TEXT)
    with pytest.raises(UserError, match=rf"do not fit the converted configuration: .*{name}"):
        load_converted(tmp_path, torch.float32)


def test_what_transformers_misses_in_an_index_is_named_as_such(tmp_path: Path) -> None:
    DCFormerForCausalLM(DCFormerConfig.from_size("tiny")).save_pretrained(tmp_path, max_shard_size="1MB")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": json.loads(path.read_text())["weight_map"]}))
    with pytest.raises(UserError, match="does not load: KeyError: 'metadata'"):
        load_for_probe(tmp_path, TEXT)


@pytest.mark.parametrize(("window", "length"), [(100, 208), (4096, 2364)])
def test_a_probe_of_official_formulas_leaves_room_for_float64(window: int, length: int) -> None:
    config = SimpleNamespace(layer_types=["sliding_attention"], n_head=12, vocab_size=50, block_size=9999)
    model: Any = SimpleNamespace(config=config, window=window)
    assert official_verify.probe(model, parameters=8).shape == (length,)


def test_a_model_type_that_nobody_knows_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(UserError, match=r"config\.json is not valid: .* has model type `no_such_type`"):
        load_config(tmp_path)


@pytest.mark.parametrize("pooling", ["token", "mean", "cls"])
def test_an_encoder_rounds_as_much_as_its_tokens_move_if_padding_shifts_them(pooling: str) -> None:
    def hidden_states(ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        return (ids[..., None] / 100 + 1e-5 * (1 - mask[:, :1, None]),)

    def classes(ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        states = hidden_states(ids, attention_mask)[0]
        return (states[:, 0] if pooling == "cls" else (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),)

    model: Any = hidden_states if pooling == "token" else classes
    model.config, model.base_model = SimpleNamespace(classifier_pooling=pooling), hidden_states
    assert 9e-6 < ENCODER.ask(model, torch.arange(100, 124).view(2, 12)).noise < 1e-4
