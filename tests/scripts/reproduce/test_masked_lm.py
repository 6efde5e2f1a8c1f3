"""The study of masked language modeling: what its arms share, and a tiny study from end to end."""

import json
from pathlib import Path

import pytest
from cases.studies import pretend_to_train
from safetensors.torch import load_file
from transformers import AutoConfig

from dynattn.scripts import cli
from dynattn.scripts.reproduce.masked_lm import arguments as study_arguments
from dynattn.scripts.reproduce.masked_lm import runs as study_runs
from dynattn.scripts.reproduce.masked_lm.arguments import ARMS, MaskedLMArguments
from dynattn.scripts.reproduce.masked_lm.job import command_of
from dynattn.scripts.reproduce.masked_lm.runs import Runs

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setattr(study_arguments, "MODEL", TINY)
    monkeypatch.setattr(study_runs, "VOCABULARY", 300)
    return Runs(tmp_path, MaskedLMArguments(output=str(tmp_path)))


def test_all_arms_begin_with_the_same_weights_where_they_have_the_same(runs: Runs) -> None:
    for seed, arm in [*((3, arm) for arm in ARMS), (4, "plain")]:
        runs._make_initial(seed, arm)
    folders = {arm: runs._initial(3, arm) for arm in ARMS}
    weights = {arm: load_file(folder / "model.safetensors") for arm, folder in folders.items()}
    plain = weights.pop("plain")
    for arm, found in weights.items():
        shared = [name for name in plain if plain[name].shape == found[name].shape]
        assert all(plain[name].equal(found[name]) for name in shared)
        assert len(shared) == len(plain) - (6 if arm == "wide" else 0)  # three matrices of two MLPs
    sizes = {arm: sum(tensor.numel() for tensor in found.values()) for arm, found in weights.items()}
    assert abs(sizes["wide"] / sizes["all"] - 1) < 0.01
    assert not load_file(runs._initial(4, "plain") / "model.safetensors")["model.embed_tokens.weight"].equal(
        plain["model.embed_tokens.weight"]
    )
    dropout = AutoConfig.from_pretrained(folders["dropout"])
    assert (dropout.compose_dropout, dropout.qk_norm_type, dropout.compose_static) == (0.2, "layer_norm", True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--arms", "plain", "purple"], "arms=['purple'] must be some of plain, norm"),
        (["--quick", "--arms", "purple"], "arms=['purple'] must be some of plain, norm"),
        (["--arms", "all", "plain"], "must be plain and after it one or more others"),
        (["--arms", "plain"], "must be plain and after it one or more others"),
        (["--seeds", "1", "1"], "must be two or more different ones"),
        (["--seeds", "1", "100"], "tuning_seed=100 is one of the measured"),
        (["--steps", "4", "--validations", "5"], "validations=5 1 to steps"),
        (["--learning_rates", "0"], "must be one or more positive numbers"),
        (["--learning_rates", "1e-3", "nan"], "must be one or more positive numbers"),
        (["--learning_rates", "1e-3", "20"], "times the learning rate 20.0 must be below 1"),
        (["--redraw"], "holds no record.json"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told(options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "masked-lm", "--output", str(tmp_path / "new"), *options]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_command_names_a_text_of_the_hub_with_its_owner() -> None:
    arguments = MaskedLMArguments(dataset="owner/text", validation_dataset="/home/somebody/held_out.txt")
    assert " --dataset owner/text --validation_dataset held_out.txt " in command_of(arguments)


def test_a_run_that_diverges_does_not_stop_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_to_train(monkeypatch, ["seed-1/all-0.002"])
    monkeypatch.setattr(Runs, "_make_initial", lambda *_: None)
    command = ["reproduce", "masked-lm", "--output", str(tmp_path / "study"), "--arms", "plain", "all", "wide"]
    assert cli.main([*command, "--learning_rates", "2e-3", "--seeds", "0", "1", "2"]) == 0
    assert "diverged on seed 1; the comparison is of seeds 0, 2." in capsys.readouterr().out
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    assert record["all_against_wide"]["seeds"] == [0, 2]


@pytest.mark.slow
def test_a_tiny_study_from_end_to_end(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_runs, "LENGTH", 32)
    output = runs.output / "study"
    command = ["reproduce", "masked-lm", "--output", str(output), "--arms", "plain", "all", "wide", "--steps", "2"]
    command += ["--validations", "1", "--seeds", "0", "1", "--learning_rates", "1e-3", "2e-3"]
    assert cli.main(command) == 0
    told = capsys.readouterr().out
    assert "| plain, wider MLP |" in told and "nats per masked token on" in told
    record = json.loads((output / "record.json").read_text())
    assert list(record["arms"]) == ["plain", "all", "wide"] and set(record["comparison"]) == {"all", "wide"}
    assert record["objective"] == ["masked_lm"] and len(record["validation_targets"]) == 1
    assert len(record["all_against_wide"]["values"]) == 2
    assert set(record["settings"]["tuning_losses"]["all"]) == {"0.001", "0.002"}
    assert all(run["flops_per_token"] > 0 for arm in record["arms"].values() for run in arm["runs"])
    assert (output / "losses.png").exists()

    trained = (output / "seed-0" / f"all-{record['settings']['chosen']['all']:g}" / "result.json").stat()
    assert cli.main(command) == 0
    assert (output / "seed-0" / f"all-{record['settings']['chosen']['all']:g}" / "result.json").stat() == trained
    assert json.loads((output / "record.json").read_text()) == record
