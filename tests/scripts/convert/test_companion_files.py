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


def test_tokenizer_generation_config_and_special_tokens_come_along(tmp_path: Path) -> None:
    save_tiny(tmp_path / "made")
    convert_well("official", tmp_path / "made", tmp_path / "theirs", "--reverse", "--no-verify")
    vocabulary = {"<eos>": 0, "<pad>": 1, "head": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        tmp_path / "theirs"
    )
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    convert_well("official", tmp_path / "theirs", tmp_path / "ours", "--no-verify")
    config = AutoConfig.from_pretrained(tmp_path / "ours")
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (0, 1, None)
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").convert_tokens_to_ids("head") == 2
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text()) == {"max_new_tokens": 7}


def test_a_damaged_tokenizer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer.json").write_text("{}")
    convert_well("official", tmp_path / "ours", tmp_path / "theirs", "--reverse", "--no-verify")
    convert_well("official", tmp_path / "theirs", tmp_path / "again", "--no-verify")
    assert "tokenizer was copied but does not load" in capsys.readouterr().err
