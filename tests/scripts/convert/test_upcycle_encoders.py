"""`dynattn convert modernbert`: a DCModernBert starts as its parent, learns to compose, and goes back unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases.checkpoints import assert_same_weights, convert, convert_well, edit_config, refusal, weights_of
from cases.encoder_parents import ENCODER_PARENTS, ROWS, make_encoder_parent
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertLMHeadModel


@pytest.mark.parametrize("name", ENCODER_PARENTS)
@torch.no_grad()
def test_the_result_starts_as_its_parent_and_goes_back_bit_for_bit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = make_encoder_parent(name)
    parent.save_pretrained(tmp_path / "parent")
    convert_well("modernbert", tmp_path / "parent", tmp_path / "ours", "--static", "True")
    assert "tokens, plain, right-padded and left-padded" in capsys.readouterr().out
    head = ENCODER_PARENTS[name][0]
    auto: Any = getattr(transformers, "AutoModel" if head == "Model" else f"AutoModel{head}")
    ours = auto.from_pretrained(tmp_path / "ours").eval()
    assert type(ours).__name__ == f"DCModernBert{head}" and ours.config.composes
    ids, mask = torch.randint(3, ROWS, (3, 40)), torch.ones(3, 40, dtype=torch.long)
    mask[1, 25:] = 0
    if head == "ForMultipleChoice":
        ids, mask = ids[None], mask[None]  # three choices of one row
    expected, observed = (model(ids, attention_mask=mask)[0] for model in (parent, ours))
    real = mask.bool() if expected.ndim > 1 and expected.shape[:2] == mask.shape else slice(None)
    torch.testing.assert_close(observed[real], expected[real], atol=1e-5 * float(expected.abs().max()), rtol=0)

    convert_well("modernbert", tmp_path / "ours", tmp_path / "back", "--reverse")
    assert_same_weights(weights_of(tmp_path / "parent"), weights_of(tmp_path / "back"))
    settings = {(tmp_path / folder / "config.json").read_text() for folder in ("parent", "back")}
    # A share of rotation, which ModernBERT ignores, does not come back.
    assert len(settings) == 1 or name == "modernbert-whole-heads"
    assert type(auto.from_pretrained(tmp_path / "back")) is type(parent)


def test_other_heads_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_encoder_parent("modernbert").save_pretrained(tmp_path / "parent")
    edit_config(tmp_path / "parent", architectures=["ModernBertForNextSentence"])
    assert "ModernBertForNextSentence has a head that is not known here" in refusal(
        capsys, "modernbert", tmp_path / "parent", tmp_path / "ours"
    )


def test_rotary_parameters_out_of_range_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_encoder_parent("modernbert").save_pretrained(tmp_path / "parent")
    flat = {"rope_type": "default", "rope_theta": 0.0}
    edit_config(tmp_path / "parent", rope_parameters={"full_attention": flat, "sliding_attention": flat})
    line = refusal(capsys, "modernbert", tmp_path / "parent", tmp_path / "ours")
    reason = "rope_parameters: rope_theta (0.0) must be greater than 0"
    assert f"the result cannot be what config.json and the options ask for: {reason}" in line


def test_without_a_class_name_it_predicts_masked_tokens(tmp_path: Path) -> None:
    make_encoder_parent("modernbert").save_pretrained(tmp_path / "parent")
    edit_config(tmp_path / "parent", architectures="ABSENT")
    convert_well("modernbert", tmp_path / "parent", tmp_path / "ours")
    edit_config(tmp_path / "ours", architectures="ABSENT")
    convert_well("modernbert", tmp_path / "ours", tmp_path / "back", "--reverse")
    assert_same_weights(weights_of(tmp_path / "parent"), weights_of(tmp_path / "back"))


def test_weights_without_a_head_need_the_name_of_their_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_encoder_parent("modernbert").model.save_pretrained(tmp_path / "parent")
    edit_config(tmp_path / "parent", architectures="ABSENT")
    fix = "are of a model without a head; name its class in architectures of config.json"
    assert fix in refusal(capsys, "modernbert", tmp_path / "parent", tmp_path / "ours")
    edit_config(tmp_path / "parent", architectures=["ModernBertModel"])
    convert_well("modernbert", tmp_path / "parent", tmp_path / "ours", "--no-verify")


def test_parent_and_result_can_be_compared_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_encoder_parent("modernbert").save_pretrained(tmp_path / "parent")
    for name, options in {"ours": (), "other": ("--init", "paper")}.items():
        convert_well("modernbert", tmp_path / "parent", tmp_path / name, "--no-verify", *options)
    capsys.readouterr()
    assert convert("check", tmp_path / "parent", tmp_path / "ours") == 0
    assert "tokens, plain, right-padded and left-padded: logits" in capsys.readouterr().out
    assert convert("check", tmp_path / "parent", tmp_path / "other") == 1
    assert "logits change by up to" in capsys.readouterr().out


def test_an_encoder_of_a_type_that_also_decodes_is_asked_as_its_class_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"vocab_size": ROWS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**fields, intermediate_size=16, max_position_embeddings=64)
    encoding, decoding = "right-padded and left-padded", "left-padded and cached"
    kinds = {BertForMaskedLM: encoding, BertForSequenceClassification: encoding, BertLMHeadModel: decoding}
    for kind, asked in kinds.items():
        config.is_decoder = asked is decoding
        kind(config).save_pretrained(tmp_path / asked)
        assert convert("check", tmp_path / asked, tmp_path / asked) == 0
        assert asked in capsys.readouterr().out


def test_encoders_with_absolute_positions_are_told_apart(tmp_path: Path) -> None:
    """Left padding changes their outputs, which is not rounding."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    for name in ("one", "other"):
        BertForMaskedLM(BertConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path / name)
    assert convert("check", tmp_path / "one", tmp_path / "other") == 1
    assert convert("check", tmp_path / "one", tmp_path / "one") == 0


def test_a_window_is_the_parents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_encoder_parent("modernbert").save_pretrained(tmp_path / "parent")
    line = refusal(capsys, "modernbert", tmp_path / "parent", tmp_path / "ours", "--sliding_window", "4")
    assert "a dcmodernbert has its parent's window; leave it out" in line
