"""A study goes on with the texts that its runs have read, wherever these lie, and with no others."""

import json
from pathlib import Path

import pytest
import yaml

from dynattn.scripts import cli
from dynattn.scripts.compare import job
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.preparation import SOURCE_FILE, fingerprints
from dynattn.scripts.pretrain.outputs.run_folder import RunFolder
from dynattn.scripts.reproduce.masked_lm import runs as masked_lm

TEXTS = {"first": "One text of many words.", "second": "Two texts are not the same."}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files that are all called `train.txt`, by what they say; a run begins as `pretrain` does, and is interrupted."""

    def begin(arguments: PretrainArguments) -> None:
        data = RunFolder(Path(arguments.output)).data
        data.mkdir(parents=True, exist_ok=True)
        (data / SOURCE_FILE).write_text(json.dumps({"name": "train.txt", **fingerprints(arguments)}))
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "pretrain", begin)
    monkeypatch.setattr(masked_lm, "VOCABULARY", 300)
    files = {}
    for folder, text in {**TEXTS, "copy of first": TEXTS["first"]}.items():
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "train.txt"
        file.write_text("\n".join(f"{text} {number}" for number in range(50)))
        files[folder] = str(file)
    return files


def test_texts_of_the_same_name_are_told_apart_by_what_they_say(
    texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "study"
    command = ["reproduce", "masked-lm", "--output", str(output), "--small", "--learning_rates", "1e-3"]
    assert cli.main([*command, "--dataset", texts["first"]]) == 130
    capsys.readouterr()
    assert cli.main([*command, "--dataset", texts["second"]]) == 2
    told = f"{output}/seed-0/plain-0.001 has read other training data and validation data than there are now; give"
    assert told in capsys.readouterr().err
    assert cli.main([*command, "--dataset", texts["copy of first"]]) == 130


def test_a_text_that_has_changed_under_its_name_is_no_longer_compared(
    texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plain", "composed"):
        options = {"dataset": texts["first"], "validation_dataset": texts["second"], "model_type": "dcformer"}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(options))
    command = ["compare", *(str(tmp_path / f"{name}.yaml") for name in ("plain", "composed"))]
    command += ["--output", str(tmp_path / "study")]
    assert cli.main(command) == 130
    assert cli.main(command) == 130
    with Path(texts["first"]).open("a") as file:
        file.write("\nOne more line.")
    assert cli.main(command) == 2
    assert "seed-0/plain has read other training data than there are now" in capsys.readouterr().err


def test_the_upcycling_study_knows_its_text(
    texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("A third text.")
    command = ["reproduce", "upcycling", "--output", str(tmp_path / "study"), "--quick"]
    command += ["--validation_dataset", str(held_out)]
    assert cli.main([*command, "--dataset", texts["first"]]) == 130
    assert cli.main([*command, "--dataset", texts["second"]]) == 2
    assert "seed-0/parent has read other training data than there are now" in capsys.readouterr().err
