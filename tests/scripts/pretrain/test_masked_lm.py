"""Runs that predict hidden tokens: what they report, that they resume bit for bit, and that no split changes them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.training import RUN, assert_same_run, curve, killed_run, losses, run, run_forked
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, pipeline

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import Result
from dynattn.scripts.pretrain.consolidate import compare, read_model
from dynattn.scripts.pretrain.data.objectives import Examples, MaskedLM
from dynattn.scripts.pretrain.data.packing import PackedSequences
from dynattn.scripts.pretrain.data.token_stream import TokenStream
from dynattn.scripts.report.page import render
from dynattn.scripts.report.run import read_runs

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MASKED = {**RUN, "objective": "masked_lm", "model_type": None, "model_config": {**SMALL, "mlp_dropout": 0.1}}
BRIEF = {**MASKED, "model_config": SMALL, "max_steps": 4}  # without dropout
BERT: dict[str, Any] = {**SMALL, "max_position_embeddings": 64}
BERT_WITHOUT_DROPOUT = {**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("masked") / "straight", corpus, **MASKED)


def test_a_killed_run_resumes_bit_for_bit(finished: Result, corpus: Path, tmp_path: Path) -> None:
    killed_run(tmp_path / "run", corpus, 7, **MASKED)
    run(tmp_path / "run", corpus, **MASKED)
    assert_same_run(tmp_path / "run", finished.output)


def test_validation_is_the_cross_entropy_of_hidden_tokens(finished: Result) -> None:
    tokenizer = AutoTokenizer.from_pretrained(finished.model)
    model = AutoModelForMaskedLM.from_pretrained(finished.model).double()
    stream = TokenStream.open(finished.output / "data" / "validation")
    packed = PackedSequences(stream, 32, pad=tokenizer.pad_token_id, mask_documents=True, score_all=True)
    examples = Examples(packed, MaskedLM(tokenizer, seed=9).for_validation())
    nats, targets = 0.0, 0
    for index in range(len(packed)):
        item = examples[index, index]
        logits = model(item["input_ids"][None], position_ids=item["position_ids"][None]).logits
        nats += torch.nn.functional.cross_entropy(logits[0], item["labels"], reduction="sum").item()
        targets += int((item["labels"] != -100).sum())
    assert finished.validation_targets == targets
    assert finished.validation_loss == pytest.approx(nats / targets, rel=1e-5)
    assert finished.bits_per_byte is None


def test_card_report_and_summary_speak_of_hidden_tokens(finished: Result) -> None:
    card = ModelCard.load(finished.model / "README.md")
    assert card.data.to_dict()["pipeline_tag"] == "fill-mask"
    assert f"| validation loss (nats per masked token) | {finished.validation_loss:.4f} |" in card.text
    assert "| objective | masked_lm |" in card.text and "bits per byte" not in card.text + finished.summary()
    assert "AutoModelForCausalLM" not in card.text and 'pipeline("fill-mask"' in card.text
    page = render(read_runs([finished.output]))
    assert "nats per target" in page and "masked_lm" in page and "Bits per byte" not in page
    fill: Any = pipeline("fill-mask", model=str(finished.model), device="cpu")
    assert len(fill(f"The number {fill.tokenizer.mask_token} is")) == 5
    assert not (finished.model / "generation_config.json").exists()


def test_a_checkpoint_becomes_a_model_with_its_head(finished: Result, tmp_path: Path) -> None:
    model = read_model(finished.output / "checkpoints" / "step-000012")
    model.save_pretrained(tmp_path)
    compare(model, tmp_path)


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """The run without dropout in one forward pass, two and four."""
    folder = tmp_path_factory.mktemp("alone")
    splits = [{"batch_size": 4 // parts, "gradient_accumulation_steps": parts} for parts in (1, 2, 4)]
    return [run(folder / f"{n}", corpus, **BRIEF | split).output for n, split in enumerate(splits)]


def test_accumulation_changes_no_mask(alone: Sequence[Path]) -> None:
    one, two, four = map(losses, alone)
    assert max(abs(two - one).max(), abs(four - one).max()) < 1e-5
    assert curve(alone[0], "targets", split="validation") == curve(alone[2], "targets", split="validation")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_processes_change_no_mask(engine: str, alone: Sequence[Path], corpus: Path, tmp_path: Path) -> None:
    one, two, _ = map(losses, alone)
    changes = {**BRIEF, "batch_size": 2, "engine": engine, "dataloader_workers": 1}
    run_forked(2, tmp_path / "run", corpus, **changes)
    assert abs(losses(tmp_path / "run") - one).max() < 4 * max(abs(two - one).max(), 1e-7)


def test_an_encoder_of_transformers_learns_with_documents_together(corpus: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {**MASKED, "model_type": "bert", "model_config": BERT, "max_steps": 2, "warmup_steps": 0}
    with pytest.raises(UserError, match=r"a bert does not read them so; give mask_documents: false"):
        run(tmp_path / "run", corpus, **changes)
    result = run(tmp_path / "run", corpus, **changes, mask_documents=False)
    assert AutoModelForMaskedLM.from_pretrained(result.model).config.pad_token_id == 1


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_losses_that_models_average_themselves_are_those_of_all_targets(
    model_type: str, corpus: Path, tmp_path: Path
) -> None:
    sizes = {"dim": 16, "hidden_dim": 16, "n_layers": 2, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
    config = BERT_WITHOUT_DROPOUT if model_type == "bert" else sizes
    changes: dict[str, Any] = {**BRIEF, "model_type": model_type, "model_config": config, "mask_documents": False}
    one = run(tmp_path / "one", corpus, **changes)
    parts = run(tmp_path / "parts", corpus, **{**changes, "batch_size": 1, "gradient_accumulation_steps": 4})
    assert abs(losses(parts.output) - losses(one.output)).max() < 1e-5
    assert one.validation_loss == pytest.approx(one.train_loss, rel=0.1)


def test_an_encoder_whose_embeddings_are_a_layer_and_tied_is_sharded(corpus: Path, tmp_path: Path) -> None:
    config = BERT_WITHOUT_DROPOUT
    changes: dict[str, Any] = {**BRIEF, "model_type": "bert", "model_config": config, "mask_documents": False}
    run(tmp_path / "one", corpus, **changes)
    run_forked(2, tmp_path / "two", corpus, **{**changes, "batch_size": 2, "engine": "fsdp2"})
    assert abs(losses(tmp_path / "two") - losses(tmp_path / "one")).max() < 1e-5
    one, two = (load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()  # a weight that is tied is saved once


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "dcformer"},
            "dcformer has no masked language model, .*; give --objective causal_lm",
        ),
        (
            {"objective": "causal_lm", "model_type": "dcmodernbert"},
            "model_type=dcmodernbert has no causal language model, .*; give --objective masked_lm",
        ),
        (
            {"model_type": "dcbart"},
            r"dcbart has no masked .*Seq2SeqTrainer \(docs/guides/encoder_decoders.md",
        ),
        ({"objective": "causal_lm", "model_type": "bert"}, "a bert reads each .*; give objective: masked_lm, or"),
        ({"objective": "causal_lm", "model_type": "dcbart"}, r"model_type=dcbart has no causal .*encoder_decoders.md"),
        ({"objective": "causal_lm", "model_type": "dcvit"}, r"model_type=dcvit has no causal .*docs/guides/vision.md"),
        ({"carry_memory": True, "mask_documents": False}, "carry_memory is for objective=causal_lm"),
        ({"z_loss": 1e-4}, "z_loss is for objective=causal_lm"),
        ({"length_warmup_steps": 4}, "length_warmup_steps is for objective=causal_lm"),
        ({"dry_run": True}, "dry_run is for objective=causal_lm"),
        ({"objective": "denoising"}, re.escape("objective=denoising must be one of ('causal_lm', 'masked_lm')")),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_with_the_fix(
    changes: dict[str, Any], message: str, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", corpus, **{**MASKED, "model_config": None, **changes})
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_kind_is_refused_with_the_fix(corpus: Path, tmp_path: Path) -> None:
    BertConfig(**BERT, vocab_size=300).save_pretrained(tmp_path / "bert")
    finished = {**MASKED, "model_config": None, "init_from": str(tmp_path / "bert"), "tokenizer": "bpe"}
    with pytest.raises(UserError, match="give mask_documents: false"):
        run(tmp_path / "run", corpus, **finished)
