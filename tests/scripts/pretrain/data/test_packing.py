"""Packing against what it must mean: every token once, positions and labels that know the documents."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from dynattn.modeling.ops.chunked_loss import IGNORED
from dynattn.scripts.pretrain.data.objectives import CausalLM
from dynattn.scripts.pretrain.data.packing import PackedSequences
from dynattn.scripts.pretrain.data.text_encoder import TextEncoder, split_long
from dynattn.scripts.pretrain.data.token_stream import TokenStream
from dynattn.scripts.pretrain.data.tokenization import write_stream
from dynattn.scripts.pretrain.data.tokenizer import train_bpe

# Three documents of 5, 1 and 4 text tokens between a start token 100 and an end token 101.
TOKENS = [100, 1, 2, 3, 4, 5, 101, 100, 6, 101, 100, 7, 8, 9, 10, 101]
STARTS = [0, 7, 10]


def make(length: int, *, score_all: bool = False, mask_documents: bool = True) -> PackedSequences:
    stream = TokenStream(np.array(TOKENS, dtype=np.int32), np.array(STARTS, dtype=np.int64), text_bytes=10)
    return PackedSequences(stream, length, pad=0, mask_documents=mask_documents, score_all=score_all)


def test_training_windows_hold_every_token_once_and_drop_the_tail():
    sequences = make(length=5)
    held = [token for item in sequences for token in item["input_ids"].tolist()]
    assert held == TOKENS[:15]
    assert sequences.unused_tokens == 1
    assert sequences.describe().endswith("3 sequences of 5 (1 token at the end fills none and is left out)")


def test_several_tokens_that_are_left_out_are_told_in_the_plural():
    assert make(7).describe().endswith("2 sequences of 7 (2 tokens at the end fill none and are left out)")


@pytest.mark.parametrize(("length", "score_all"), [(4, False), (5, True)])
def test_nothing_is_said_to_be_left_out_where_nothing_is(length: int, score_all: bool):
    assert make(length, score_all=score_all).describe().endswith(f"4 sequences of {length}")


@pytest.mark.parametrize(
    ("score_all", "held"), [(False, [[0], [0, 1], [2]]), (True, [[0], [0, 1], [1, 2], [2]])], ids=["training", "all"]
)
def test_a_window_names_the_documents_whose_tokens_it_holds(score_all: bool, held: list[list[int]]):
    sequences = make(5, score_all=score_all)
    found = [sequences.documents(index) for index in range(len(sequences))]
    assert found == [[f"document {number}" for number in numbers] for numbers in held]


def test_positions_restart_at_each_document_and_at_each_window():
    positions = [item["position_ids"].tolist() for item in make(length=8)]
    assert positions == [[0, 1, 2, 3, 4, 5, 6, 0], [0, 1, 0, 1, 2, 3, 4, 5]]


def test_plain_concatenation_carries_no_positions():
    assert set(make(length=8, mask_documents=False)[0]) == {"input_ids", "labels"}


@pytest.mark.parametrize("mask_documents", [True, False])
def test_start_tokens_are_never_targets(mask_documents: bool):
    for item in make(length=8, mask_documents=mask_documents):
        is_start = item["input_ids"] == 100
        assert (item["labels"][is_start] == IGNORED).all()
        assert (item["labels"][~is_start] == item["input_ids"][~is_start]).all()


@pytest.mark.parametrize("length", [2, 3, 5, 8, 15, 16, 17, 40])
def test_validation_scores_every_token_exactly_once(length: int):
    sequences = make(length, score_all=True)
    targets = [t for item in sequences for t in item["labels"][1:].tolist() if t != IGNORED]
    assert targets == sequences.stream.scored().tolist() == [token for token in TOKENS if token != 100]
    assert all(len(values) == length for item in sequences for values in item.values())
    assert sum(CausalLM().count({"labels": item["labels"][None]}) for item in sequences) == len(targets)


def test_packed_documents_do_not_see_each_other():
    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    packed = make(length=16)[0]
    together = model(input_ids=packed["input_ids"][None], position_ids=packed["position_ids"][None], use_cache=False)
    for begin, end in [(0, 7), (7, 10), (10, 16)]:
        alone = model(input_ids=packed["input_ids"][None, begin:end], use_cache=False)
        torch.testing.assert_close(together.logits[:, begin:end], alone.logits)


def test_a_written_stream_reads_back_as_the_documents(tmp_path: Path):
    documents = ["one two\nthree\n", "vier fünf", "x"]
    tokenizer = train_bpe([documents], vocab_size=300)
    write_stream(Dataset.from_dict({"text": documents}), TextEncoder(tokenizer), tmp_path / "stream")
    stream = TokenStream.open(tmp_path / "stream")
    parts = np.split(stream.tokens, stream.starts[1:])
    assert [tokenizer.decode(part[1:-1]) for part in parts] == documents
    assert all(part[0] == tokenizer.bos_token_id and part[-1] == tokenizer.eos_token_id for part in parts)
    assert stream.text_bytes == sum(len(text.encode()) for text in documents)
    stream.tokens[:] = 0
    assert TokenStream.open(tmp_path / "stream").tokens.any(), "the file stays as it is"


def test_a_long_document_is_tokenized_in_parts_without_changing_it():
    text = "".join(f"line {number}\n" for number in range(500))
    tokenizer = train_bpe([[text]], vocab_size=300)
    parts = list(split_long(text, limit=100))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 100
    tokens = [token for part in parts for token in tokenizer(part)["input_ids"]]
    assert tokens == tokenizer(text)["input_ids"]
    assert "".join(split_long("x" * 250, limit=100)) == "x" * 250
