"""The tokenizer of a run: trained on its data, or given."""

import json
from pathlib import Path

import pytest
from cases.tokenizers import that_knows
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dynattn.scripts.common.checkpoint_loading import highest_id
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.preparation import prepare
from dynattn.scripts.pretrain.data.tokenizer import load_tokenizer, train_bpe
from dynattn.scripts.pretrain.outputs.run_folder import RunFolder


def test_trained_tokenizer_loads_with_auto_classes_and_is_lossless(tmp_path: Path):
    tokenizer = train_bpe([["the cat sat on the mat " * 20]], vocab_size=270)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "the cat, naïve 猫\n\n\tend"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token == loaded.bos_token == loaded.pad_token == "<|endoftext|>"
    assert highest_id(loaded) < 270


def test_tokenizer_mistakes_are_told(tmp_path: Path):
    with pytest.raises(UserError, match="vocab_size=256 is too small for a byte-level BPE; give 257 or more"):
        train_bpe([["text"]], vocab_size=256)
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path / "nothing")
    backend = train_bpe([["text"]], vocab_size=257).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "no_eos")
    with pytest.raises(UserError, match="has no eos_token"):
        load_tokenizer(tmp_path / "no_eos")


@pytest.mark.parametrize(("unknown", "told"), [("<unk>", ["2 of 4 tokens are <unk>"]), ("<end>", [])])
def test_held_out_text_that_a_tokenizer_cannot_express_is_told(
    unknown: str, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tokenizer = that_knows("known")
    tokenizer.unk_token = unknown  # GPT-2's is its end token, which texts never become
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for name, text in (("train", "known"), ("held_out", "one known word")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    files = {"dataset": str(tmp_path / "train.jsonl"), "validation_dataset": str(tmp_path / "held_out.jsonl")}
    arguments = PretrainArguments(output=str(tmp_path), max_steps=1, tokenizer=str(tmp_path / "tokenizer"), **files)
    prepare(arguments, RunFolder(tmp_path))
    assert [message.partition(":")[0] for message in caplog.messages if "<" in message] == told
