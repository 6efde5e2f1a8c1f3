"""`dynattn evaluate` with rcmha checkpoints, and with memory carried over whole documents."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tokenizers import that_adds_bos
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dynattn import RCMHAConfig, RCMHAForCausalLM
from dynattn.scripts.cli import main
from dynattn.scripts.common.builtin_corpus import builtin_documents
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.evaluate.harness import DIRECT, evaluate_model
from dynattn.scripts.evaluate.heldout import score_documents
from dynattn.scripts.evaluate.segments import roll_texts
from dynattn.scripts.pretrain.data.tokenizer import train_bpe

HELDOUT = "builtin_heldout"
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LIMITS: dict[str, Any] = {"mem_len": 30, "max_position_embeddings": 128, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_bpe([builtin_documents("train")[:5]], vocab_size=300)


def make(**fields: Any) -> RCMHAForCausalLM:
    torch.manual_seed(0)
    return RCMHAForCausalLM(RCMHAConfig(vocab_size=300, **(SIZES | LIMITS | fields))).eval()


@torch.no_grad()
def in_one_pass(model: RCMHAForCausalLM, tokens: list[int], segment: int | None = None) -> float:
    """Log-likelihood of all tokens but the first, read at once, or in segments by a plain loop."""
    ids = torch.tensor([tokens])
    memory = DynamicCache(config=model.config)
    parts = ids[:, :-1].split(segment or len(tokens), dim=1)
    logits = torch.cat([model(part, past_key_values=memory if segment else None).logits for part in parts], dim=1)
    return -F.cross_entropy(logits[0].double(), ids[0, 1:], reduction="sum").item()


@pytest.mark.parametrize("attention_type", ["rcmha", "mha"])
@pytest.mark.parametrize(("segment", "batch_size"), [(1, 3), (7, 1), (32, 3), (5000, 2)])
def test_streaming_memory_scores_a_document_as_one_pass_does(
    attention_type: str, segment: int, batch_size: int
) -> None:
    model = make(attention_type=attention_type)
    texts = [torch.randint(300, (length,)).tolist() for length in (40, 1, 131, 2, 97)]
    scores = roll_texts(model, texts, segment=segment, batch_size=batch_size)
    expected = [in_one_pass(model, text) if len(text) > 1 else 0.0 for text in texts]
    assert scores == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_segment_memory_scores_the_segments_that_were_asked_for(batch_size: int) -> None:
    model = make(memory_type="segment")
    texts = [torch.randint(300, (length,)).tolist() for length in (40, 131, 97)]
    scores = roll_texts(model, texts, segment=32, batch_size=batch_size)
    assert scores == pytest.approx([in_one_pass(model, text, segment=32) for text in texts], rel=1e-6)
    assert abs(scores[1] - roll_texts(model, texts, segment=16, batch_size=1)[1]) > 1e-3


@pytest.mark.parametrize("memory_type", ["streaming", "segment"])
def test_held_out_scores_with_memory(memory_type: str, tokenizer: PreTrainedTokenizerBase, held_out: list[str]) -> None:
    model = make(memory_type=memory_type)
    options: dict[str, Any] = {"limit": 2, "max_length": 64, "batch_size": 2}
    carried = evaluate_model(model, tokenizer, [HELDOUT], carry_memory=True, **options)
    windows = evaluate_model(model, tokenizer, [HELDOUT], **options)
    documents = held_out[:2]
    texts = [[tokenizer.eos_token_id, *tokenizer.encode(document)] for document in documents]
    nats = -sum(in_one_pass(model, text, None if memory_type == "streaming" else 64) for text in texts)
    expected = nats / math.log(2) / sum(len(document.encode()) for document in documents)
    assert carried.value(HELDOUT, "bits_per_byte") == pytest.approx(expected, rel=1e-6)
    assert carried.value(DIRECT, "bits_per_byte") == pytest.approx(expected, rel=1e-6)
    assert abs(windows.value(HELDOUT, "bits_per_byte") - expected) > 1e-4
    assert (carried.settings["carry_memory"], carried.settings["segment"]) == (True, 64)
    assert (windows.settings["carry_memory"], windows.settings["segment"]) == (False, None)
    assert carried.warnings == windows.warnings == []


@pytest.mark.parametrize("carry_memory", [False, True])
def test_a_tokenizer_that_adds_bos_gives_the_same_held_out_scores(
    carry_memory: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    options: dict[str, Any] = {"limit": 1, "max_length": 64, "carry_memory": carry_memory}
    plain = evaluate_model(make(), tokenizer, [HELDOUT], **options)
    adding = evaluate_model(make(), that_adds_bos(tokenizer), [HELDOUT], **options)
    assert adding.warnings == []
    for task in (HELDOUT, DIRECT):
        assert adding.value(task, "bits_per_byte") == plain.value(task, "bits_per_byte")


def test_segments_leave_room_for_the_memory(tokenizer: PreTrainedTokenizerBase) -> None:
    for fields, segment in (({"memory_type": "segment"}, 98), ({}, 128)):
        results = evaluate_model(make(**fields), tokenizer, [HELDOUT], limit=1, carry_memory=True)
        assert results.settings["segment"] == segment


def test_a_text_of_ones_own_is_read_in_segments_with_room_for_the_memory(
    tokenizer: PreTrainedTokenizerBase, held_out: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make(memory_type="segment")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(held_out[0])
    options = ["--dataset", str(tmp_path / "text.txt"), "--carry_memory", "--output", str(tmp_path / "out")]
    assert main(["evaluate", str(tmp_path / "model"), *options, "--device", "cpu"]) == 0
    assert "read in segments with memory carried from each to the next" in capsys.readouterr().out
    (scored,) = json.loads((tmp_path / "out" / "results.json").read_text())["checkpoints"]
    assert scored["max_length"] == 128 - 30
    tokens = [tokenizer.eos_token_id, *tokenizer.encode(held_out[0])]
    assert scored["by_position"][-1]["from"] > 98  # memory reaches beyond a segment
    assert scored["loss"] == pytest.approx(-in_one_pass(model, tokens, segment=98) / (len(tokens) - 1), rel=1e-6)


def test_direct_scores_with_memory_match_their_definitions(
    tokenizer: PreTrainedTokenizerBase, held_out: list[str]
) -> None:
    model = make()
    scores = score_documents(model, tokenizer, held_out[:1], max_length=50, carry_memory=True)
    tokens = tokenizer.encode(held_out[0])
    with torch.no_grad():
        logits = model(torch.tensor([[tokenizer.eos_token_id, *tokens[:-1]]])).logits[0]
    loss = F.cross_entropy(logits, torch.tensor(tokens)).item()
    assert scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    hits = int((logits.argmax(-1) == torch.tensor(tokens)).sum())
    assert hits > 0 and scores["accuracy"] == hits / len(tokens)


def test_a_checkpoint_is_scored_on_the_command_line(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    command = ["evaluate", str(tmp_path / "model"), "--tasks", HELDOUT, "dynattn_owner"]
    command += ["--limit", "2", "--truncate", "--batch_size", "3"]
    assert main([*command, "--carry_memory", "--output", str(tmp_path / "out")]) == 0
    assert "documents read in segments of 128 tokens, with memory carried" in capsys.readouterr().out
    settings = json.loads((tmp_path / "out" / "results.json").read_text())["settings"]
    assert (settings["carry_memory"], settings["segment"], settings["max_length"]) == (True, 128, 128)
    assert main(command) == 0
    assert "memory" not in capsys.readouterr().out


def test_memory_without_a_perplexity_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=r"carry_memory changes perplexities only, and \['dynattn_owner'\] have none"):
        evaluate_model(make(), tokenizer, ["dynattn_owner"], carry_memory=True, limit=1)


def test_models_that_cannot_carry_memory_are_told(tokenizer: PreTrainedTokenizerBase) -> None:
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_key_value_heads=2, **SIZES))
    with pytest.raises(UserError, match="carry_memory is for models whose cache is a memory, like rcmha, and llama is"):
        evaluate_model(llama, tokenizer, [HELDOUT], carry_memory=True)
    with pytest.raises(UserError, match="mem_len=None keeps everything"):
        evaluate_model(make(mem_len=None), tokenizer, [HELDOUT], carry_memory=True)


def test_damaged_weights_are_told(tokenizer: PreTrainedTokenizerBase) -> None:
    model = make()
    model.lm_head.weight.data[3, 3] = math.nan
    with pytest.raises(UserError, match="the model's logits are NaN"):
        evaluate_model(model, tokenizer, [HELDOUT], limit=1, carry_memory=True)
