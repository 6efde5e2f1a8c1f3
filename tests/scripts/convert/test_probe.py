"""Comparing what two models answer: shapes, logits, and generated tokens, of which one may give fewer."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import MistralConfig

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.convert.common.decoder_probe import make_probe
from dynattn.scripts.convert.common.model_loading import load_config
from dynattn.scripts.convert.common.probe import LARGEST_MAP, Answers, compare_answers

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


def test_a_model_type_that_nobody_knows_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(UserError, match=r"config\.json is not valid: .* has model type `no_such_type`"):
        load_config(tmp_path)
