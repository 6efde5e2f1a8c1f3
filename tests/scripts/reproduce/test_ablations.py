"""The study of ablations: what its variants are, and a tiny one from end to end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dynattn
from dynattn.scripts import cli
from dynattn.scripts.reproduce.ablations import job
from dynattn.scripts.reproduce.ablations.arguments import AblationsArguments
from dynattn.scripts.reproduce.attentions import ATTENTIONS


def parameters(size: str, name: str) -> int:
    options = job.variants(AblationsArguments(size=size))[name].options  # type: ignore[arg-type]
    with torch.device("meta"):
        config = dynattn.DCFormerConfig(vocab_size=options["vocab_size"], **options["model_config"])
        return dynattn.DCFormerForCausalLM(config).num_parameters()


@pytest.mark.parametrize("size", job.SIZES)
def test_the_wider_plain_variant_has_as_many_parameters_as_full_composition(size: str):
    shape = job.SIZES[size]
    assert (
        abs(parameters(size, job.WIDER) - parameters(size, "full")) <= 3 * shape.hidden_size * shape.num_hidden_layers
    )
    assert parameters(size, "plain") < parameters(size, "rank-1") < parameters(size, "full")


def test_plain_is_the_baseline_and_every_term_is_a_variant():
    names = list(job.variants(AblationsArguments()))
    assert names[0] == "plain"
    assert set(names) == {*ATTENTIONS, job.WIDER}


def test_variants_that_compose_also_learn_their_composition_slowly():
    known = job.variants(AblationsArguments(composition_learning_rate=1e-4))
    assert known.keys() - job.variants(AblationsArguments()) == {f"{name}-slow" for name in ATTENTIONS} - {"plain-slow"}
    assert known["full-slow"].options == {**known["full"].options, "composition_learning_rate": 1e-4}


def test_the_command_names_texts_without_the_folders_of_this_machine():
    arguments = AblationsArguments(dataset="/home/somebody/train.txt", validation_dataset="owner/text")
    assert job.command_of(arguments) == (
        "dynattn reproduce ablations --dataset train.txt --validation_dataset owner/text"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variants", "plain", "magic"], "variants ['magic'] do not exist; choose from plain"),
        (["--dataset", "text.txt"], "give both, or neither"),
        (
            ["--variants", "plain", "full", "--composition_learning_rate", "1e-4"],
            "composition_learning_rate (0.0001) is that of variants NAME-slow, but variants are plain full; add one",
        ),
        (["--seeds", "1"], "seeds=1 must be from 2 to 1000"),
        (["--max_seconds", "1e-9"], "0 seeds are complete"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert cli.main(["reproduce", "ablations", "--output", str(tmp_path / "study"), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_tiny_study_quotes_the_paper_beside_its_own_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(job.SIZES, "small", replace(job.SIZES["small"], hidden_size=16, num_hidden_layers=1))
    monkeypatch.setattr(job, "COMMON", {**job.COMMON, "vocab_size": 300, "sequence_length": 32, "batch_size": 2})
    texts = [tmp_path / "train.txt", tmp_path / "validation.txt"]
    for text, first in zip(texts, (0, 300), strict=True):
        text.write_text("".join(f"The number {n} comes before {n + 1}. " for n in range(first, first + 300)))
    command = ["reproduce", "ablations", "--output", str(tmp_path / "study"), "--variants", "plain", "full"]
    command += ["--seeds", "2", "--max_steps", "4", "--dataset", str(texts[0]), "--validation_dataset", str(texts[1])]
    assert cli.main(command) == 0
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    assert record["quoted"]["interval"] == [1.7, 2.0]
    found = record["comparison"]["full"]
    costs = [record["arms"][name]["runs"][0]["flops_per_token"] for name in ("plain", "full")]
    assert costs[0] < costs[1]
    expected = [ratio * costs[0] / costs[1] for ratio in found["token_ratio"]["values"]]
    assert found["operations_ratio"]["values"] == pytest.approx(expected)
    table = (tmp_path / "study" / "table.md").read_text()
    assert "operations the baseline needs" in table
    assert "Quoted: 1.7 to 2.0 times the compute, abstract of arXiv 2405.08553" in table
    assert "--max_steps 4" in record["command"]
