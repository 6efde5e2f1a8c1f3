"""`dynattn convert bart`: a DCBart starts as its BART or Marian, learns to compose, and goes back unchanged."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import (
    assert_same_checkpoint,
    assert_same_weights,
    convert,
    convert_well,
    edit_config,
    refusal,
    weights_of,
)
from cases.seq2seq import PARENTS, SHORT, random_tokens, whole
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSeq2SeqLM, BartModel, PreTrainedModel, T5Config


def save_parent(folder: Path, name: str, **fields: Any) -> PreTrainedModel:
    config_class, model_class, theirs, _ = PARENTS[name]
    model = model_class(config_class(**{**SHORT, **theirs, **fields})).eval()
    model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["bart", "marian"])
@torch.no_grad()
def test_the_result_starts_as_its_parent_and_goes_back_bit_for_bit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = save_parent(tmp_path / "parent", name)
    convert_well("bart", tmp_path / "parent", tmp_path / "ours", "--static", "True")
    assert "tokens, short and long sources, padded, cached and generated: logits" in capsys.readouterr().out
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    assert ours.config.model_type == "dcbart" and ours.config.composes and ours.config.compose_static
    source, target = random_tokens(2, 7), random_tokens(2, 12)
    expected = whole(parent, source, target)
    torch.testing.assert_close(whole(ours, source, target), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    texts = [net.generate(source, num_beams=3, max_new_tokens=9) for net in (parent, ours)]
    assert torch.equal(*texts)

    convert_well("bart", tmp_path / "ours", tmp_path / "back", "--reverse")
    assert_same_checkpoint(tmp_path / "parent", tmp_path / "back")
    restored = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back").eval()
    assert type(restored) is type(parent)
    assert torch.equal(whole(restored, source, target), expected)


@pytest.mark.parametrize(("name", "dtype"), [("bart", "float16"), ("marian", "bfloat16")])
def test_half_precision_rounds_the_weights_alone(name: str, dtype: str, tmp_path: Path) -> None:
    parent = save_parent(tmp_path / "parent", name)
    convert_well("bart", tmp_path / "parent", tmp_path / "rounded", "--dtype", dtype)
    parent.to(getattr(torch, dtype)).save_pretrained(tmp_path / "half")
    convert_well("bart", tmp_path / "half", tmp_path / "ours", "--no-verify")
    assert_same_weights(weights_of(tmp_path / "rounded"), weights_of(tmp_path / "ours"))


def test_generation_settings_that_change_the_form_of_the_answer(tmp_path: Path) -> None:
    save_parent(tmp_path / "parent", "bart")
    file = tmp_path / "parent" / "generation_config.json"
    settings = {"num_beams": 4, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    convert_well("bart", tmp_path / "parent", tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / file.name).read_text())["num_return_sequences"] == 3


def test_every_term_learns_from_the_identity(tmp_path: Path) -> None:
    save_parent(tmp_path / "parent", "bart")
    convert_well("bart", tmp_path / "parent", tmp_path / "ours", "--static", "True", "--no-verify")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=random_tokens(4, 9), labels=random_tokens(4, 6)).loss.backward()
        optimizer.step()
    names = (".composition.", ".key_composition.")
    grads = [p.grad for name, p in model.named_parameters() if any(part in name for part in names)]
    # Four tensors for each self-attention and for the queries of cross-attention; three for its keys.
    assert len(grads) == 2 * 4 + 3 * (4 + 4 + 3) and all(bool(grad.abs().max() > 0) for grad in grads)


def test_layers_start_from_different_random_numbers(tmp_path: Path) -> None:
    save_parent(tmp_path / "parent", "marian")
    convert_well("bart", tmp_path / "parent", tmp_path / "ours", "--no-verify")
    drawn = [value for name, value in weights_of(tmp_path / "ours").items() if name.endswith("hidden_weight")]
    flat = {tuple(value.flatten()[:4].tolist()) for value in drawn}
    assert len(flat) == len(drawn) == 2 + 3 * 3


def test_files_of_models_without_a_head_are_read_and_written(tmp_path: Path) -> None:
    save_parent(tmp_path / "whole", "bart").model.save_pretrained(tmp_path / "parent")
    convert_well("bart", tmp_path / "parent", tmp_path / "ours")
    convert_well("bart", tmp_path / "ours", tmp_path / "back", "--reverse", "--no-verify")
    assert_same_weights(weights_of(tmp_path / "parent"), weights_of(tmp_path / "back"))
    assert type(AutoModel.from_pretrained(tmp_path / "back")) is BartModel


def test_copies_of_the_embedding_have_to_be_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parent(tmp_path / "parent", "bart")
    file = tmp_path / "parent/model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.shared.weight"].clone()}, file, {"format": "pt"})
    convert_well("bart", tmp_path / "parent", tmp_path / "ours", "--no-verify")
    save_file({**weights, "lm_head.weight": weights["model.shared.weight"] + 1}, file, {"format": "pt"})
    assert "config.json ties lm_head.weight to model.shared.weight, but they differ" in refusal(
        capsys, "bart", tmp_path / "parent", tmp_path / "other"
    )


def test_parent_and_result_can_be_compared_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parent(tmp_path / "parent", "bart")
    convert_well("bart", tmp_path / "parent", tmp_path / "ours", "--no-verify")
    capsys.readouterr()
    assert convert("check", tmp_path / "parent", tmp_path / "ours") == 0
    assert re.match(r"equal +\d+ tokens, short and long sources", capsys.readouterr().out)


def test_models_without_a_number_of_positions_are_compared(tmp_path: Path) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    assert convert("check", tmp_path, tmp_path) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"decoder_ffn_dim": 64},
            "encoder_ffn_dim is 80 and decoder_ffn_dim 64; both halves of a DCBart have one shape",
        ),
        ({"architectures": ["BartForQuestionAnswering"]}, "BartForQuestionAnswering has a head that a DCBart lacks"),
        ({"tie_word_embeddings": False}, "source, target and head have embeddings of their own"),
        ({"model_type": "t5"}, "'t5' model, but only bart, marian"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_parent(tmp_path / "parent", "bart")
    edit_config(tmp_path / "parent", **changes)
    assert message in refusal(capsys, "bart", tmp_path / "parent", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_dropout_that_is_not_kept_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parent(tmp_path / "parent", "bart", attention_dropout=0.1, encoder_layerdrop=0.2)
    convert_well("bart", tmp_path / "parent", tmp_path / "ours", "--no-verify")
    told = capsys.readouterr().err
    assert "attention_dropout 0.1 is not kept" in told and "encoder_layerdrop 0.2 is not kept" in told


def test_reverse_refuses_what_no_parent_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parent(tmp_path / "parent", "marian")
    convert_well("bart", tmp_path / "parent", tmp_path / "ours", "--init", "paper", "--no-verify")
    command = ("bart", tmp_path / "ours", tmp_path / "back", "--reverse")
    assert re.search(
        r"the model composes heads, which the parent cannot: .* in layer \d of (en|de)coder, (self|cross)_attn",
        refusal(capsys, *command),
    )
    for field, value, needed in (
        ("attention_scaling", 0.5, None),
        ("attention_output_bias", False, True),
        ("normalize_before", True, False),
        ("head_dim", 3, 12),
    ):
        edit_config(tmp_path / "ours", **{field: value})
        assert f"{field} is {value}, but Marian models can only have {needed}" in refusal(capsys, *command)
        edit_config(tmp_path / "ours", **{field: "ABSENT"})
