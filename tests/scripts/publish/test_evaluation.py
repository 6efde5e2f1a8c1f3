"""Scores in a published model card: what the Hub reads back, and results that are not of this checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors.torch import load_file, save_file

import dynattn
from dynattn.scripts.cli import main
from dynattn.scripts.evaluate.results import describe_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(vocab_size=50, **sizes)).save_pretrained(folder)
    return folder


def parameters(checkpoint: Path) -> int:
    return int(dynattn.DCFormerForCausalLM.from_pretrained(checkpoint).num_parameters())


def write_scores(path: Path, stderr: float = 0.01, harness: str = "0.4.13", **model: Any) -> Path:
    """Scores of a version of lm-eval; each is above its round number by twice the error."""

    def task(name: str, shots: int, value: float, dataset: str | None) -> dict[str, Any]:
        metrics = {"acc": {"value": value + 2 * (stderr - 0.01), "stderr": stderr, "higher_is_better": True}}
        return {"task": name, "num_fewshot": shots, "samples": 36, "metrics": metrics, "dataset": dataset}

    tasks = [task("sciq", shots, value, "allenai/sciq") for shots, value in ((0, 0.5), (5, 0.625))]
    content = {
        "model": {"model_type": "dcformer", **model},
        "settings": {"max_length": 64},
        "environment": {"versions": {"lm_eval": harness}},
        "tasks": [*tasks, task("dynattn_owner", 2, 0.375, None)],
    }
    path.write_text(json.dumps(content))
    return path


def test_the_card_tells_the_scores_and_the_hub_reads_them(checkpoint: Path, tmp_path: Path):
    scores = write_scores(tmp_path / "results.json", parameters=parameters(checkpoint))
    content = json.loads(scores.read_text())
    content["tasks"][2]["metrics"]["acc"]["stderr"] = None  # as lm-eval has it for some metrics
    scores.write_text(json.dumps(content))
    words = ["publish", str(checkpoint), "--verify", "False", "--evaluation"]
    assert main([*words, str(tmp_path), "--output", str(tmp_path / "hub")]) == 0
    data = ModelCard.load(tmp_path / "hub" / "README.md").data
    read = {(one.dataset_type, one.metric_args["num_fewshot"]): one for one in data.eval_results}
    assert {key: one.metric_value for key, one in read.items()} == {
        ("allenai/sciq", 0): 0.5, ("allenai/sciq", 5): 0.625, ("dynattn/dynattn_owner", 2): 0.375,
    }  # fmt: skip
    assert {one.metric_type for one in data.eval_results} == {"accuracy"}
    assert [one.metric_args.get("stderr") for one in data.eval_results] == [0.01, 0.01, None]
    assert data.model_name == "tiny"
    assert scores.exists()


def test_scores_that_a_card_has_are_kept_or_replaced(checkpoint: Path, tmp_path: Path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    other = EvalResult("text-generation", "mine", "mine", "accuracy", 0.75)
    (folder / "README.md").write_text(f"---\n{ModelCardData(model_name='tiny', eval_results=[other])}\n---\n# Tiny\n")
    for output, measured in {"first": (0.01, "0.4.13"), "second": (0.02, "0.4.14")}.items():
        scores = write_scores(tmp_path / "results.json", *measured, parameters=parameters(checkpoint))
        words = ["publish", str(folder), "--verify", "False", "--evaluation", str(scores)]
        assert main([*words, "--output", str(tmp_path / output)]) == 0
        card = (tmp_path / output / "README.md").read_bytes()
        (folder / "README.md").write_bytes(card)
    values = [one.metric_value for one in ModelCard(card.decode()).data.eval_results]
    assert sorted(values) == pytest.approx([0.395, 0.52, 0.645, 0.75])


def test_stored_copies_of_tied_weights_are_no_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(vocab_size=50, **sizes, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "tied")
    weights = load_file(tmp_path / "tied" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "tied" / "model.safetensors", metadata={"format": "pt"})
    scores = write_scores(tmp_path / "results.json", parameters=model.num_parameters())
    words = ["publish", str(tmp_path / "tied"), "--verify", "False", "--evaluation", str(scores)]
    assert main([*words, "--output", str(tmp_path / "hub")]) == 0
    assert f"DCFormerForCausalLM, {model.num_parameters():,} parameters" in capsys.readouterr().out


@pytest.mark.parametrize("is_trained_on", [False, True])
def test_scores_are_of_the_weights_that_are_published(
    is_trained_on: bool, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = dynattn.DCFormerForCausalLM.from_pretrained(checkpoint)
    described = {name: value for name, value in describe_model(model).items() if name != "path"}
    if is_trained_on:
        model.lm_head.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "tiny")
    scores = write_scores(tmp_path / "results.json", **described)
    words = ["publish", str(tmp_path / "tiny"), "--verify", "False", "--evaluation", str(scores)]
    assert main([*words, "--output", str(tmp_path / "hub")]) == (2 if is_trained_on else 0)
    assert ("are of other weights than those of the checkpoint" in capsys.readouterr().err) == is_trained_on


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"parameters": 7}, "are of a dcformer of 7 parameters, and the checkpoint is a dcformer of"),
        ({"model_type": "llama", "parameters": 7}, "are of a llama of 7 parameters"),
        ({}, "holds no scores of tasks, as dynattn evaluate"),
    ],
)
def test_scores_of_something_else_are_refused(
    checkpoint: Path, tmp_path: Path, content: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
):
    scores = write_scores(tmp_path / "results.json", **content)
    words = ["publish", str(checkpoint), "--verify", "False", "--evaluation", str(scores)]
    assert main([*words, "--output", str(tmp_path / "hub")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize("how", ["a list", "too deep", "metrics without names"])
def test_a_file_of_another_form_is_refused(
    how: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    scores = write_scores(tmp_path / "results.json", parameters=parameters(checkpoint))
    content = json.loads(scores.read_text())
    content["tasks"][0]["metrics"] = [0.5]
    texts = {"a list": "[]", "too deep": "[" * 100_000, "metrics without names": json.dumps(content)}
    scores.write_text(texts[how])
    words = ["publish", str(checkpoint), "--verify", "False", "--evaluation", str(scores)]
    assert main([*words, "--output", str(tmp_path / "hub")]) == 2
    assert "results.json holds no scores of tasks" in capsys.readouterr().err


def test_a_model_that_was_not_loaded_names_no_weights(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    """Its path is empty, which would otherwise stand for the current folder."""
    monkeypatch.chdir(checkpoint)
    model = dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig.from_pretrained(checkpoint))
    model.config._name_or_path = model.name_or_path = ""
    assert describe_model(model)["weights_sha256"] is None
