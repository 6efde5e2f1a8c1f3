"""Tokenizer, generation configuration and special tokens come along with the weights."""

import json
from pathlib import Path

import pytest
from cases.checkpoints import convert_well
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from dynattn import DCFormerConfig, DCFormerForCausalLM


def save_tiny(folder: Path) -> None:
    config = DCFormerConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    DCFormerForCausalLM(config).save_pretrained(folder)


def save_theirs(folder: Path, head: int) -> None:
    """Writes a tiny model in the authors' format with a tokenizer, in which the word "head" has the id `head`."""
    save_tiny(folder / "made")
    convert_well("official", folder / "made", folder / "theirs", "--reverse", "--no-verify")
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "<pad>": 1, "head": head}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        folder / "theirs"
    )


def test_tokenizer_generation_config_and_special_tokens_come_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_theirs(tmp_path, head=39)
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    convert_well("official", tmp_path / "theirs", tmp_path / "ours", "--no-verify")
    config = AutoConfig.from_pretrained(tmp_path / "ours")
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (0, 1, None)
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").convert_tokens_to_ids("head") == 39
    assert "the tokenizer has ids" not in capsys.readouterr().err
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text()) == {"max_new_tokens": 7}


def test_an_id_without_an_embedding_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer has three tokens only, fewer than the model, but a gap between their ids."""
    save_theirs(tmp_path, head=40)
    convert_well("official", tmp_path / "theirs", tmp_path / "ours", "--no-verify")
    assert "the tokenizer has ids up to 40 but the model embeds 40" in capsys.readouterr().err


def test_a_damaged_tokenizer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer.json").write_text("{}")
    convert_well("official", tmp_path / "ours", tmp_path / "theirs", "--reverse", "--no-verify")
    convert_well("official", tmp_path / "theirs", tmp_path / "again", "--no-verify")
    assert "tokenizer was copied but does not load" in capsys.readouterr().err
