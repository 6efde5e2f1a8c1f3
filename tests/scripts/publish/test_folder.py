"""`dynattn publish` to a local folder: what it writes, what it proves, what it refuses."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import contents, edit_config, save_tokenizer
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dynattn
from dynattn.families import FAMILIES, Family
from dynattn.scripts.cli import main
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.publish import job, probe, verify
from dynattn.scripts.publish.checkpoint import read_checkpoint
from dynattn.scripts.publish.verify import (
    answers_with_package,
    compare_answers,
    package_roots,
    run_probe,
)

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "sliding_window": 9,
    "mem_len": 8,
    "max_position_embeddings": 64,
    "image_size": 16,
    "patch_size": 4,
    # Large weights: with small ones a folder that lost its composition would still look right.
    "initializer_range": 0.2,
    "compose_init_scale": 40.0,
    "eos_token_id": 0,
}


def save_model(
    folder: Path, family: str = "DCFormer", head: str = "ForCausalLM", mixer: str = "dcmha", **options: Any
) -> None:
    torch.manual_seed(1)
    config_class = getattr(dynattn, f"{family}Config")
    fields = {field.name for field in dataclasses.fields(config_class)}
    given = {**dynattn.mixer_fields(mixer), **SMALL}
    if family == "DCModernBert":  # whose default is the parent's
        given |= {"pad_token_id": 0}
    config = config_class(**{name: value for name, value in given.items() if name in fields})
    getattr(dynattn, f"{family}{head}")(config).save_pretrained(folder, **options)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "tiny"
    save_model(folder)
    save_tokenizer(folder)
    (folder / "optimizer.pt").write_bytes(b"state")
    return folder


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


@pytest.fixture(scope="module")
def published(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command line, verification included."""
    folder = tmp_path_factory.mktemp("published") / "tiny-hub"
    assert main(["publish", str(original), "--output", str(folder)]) == 0
    return folder


def test_folder_is_complete_and_keeps_the_weights(original: Path, published: Path) -> None:
    names = set(contents(published))
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "README.md"} <= names
    assert {"modeling_dcformer.py", "configuration_dcformer.py"} <= names
    assert "optimizer.pt" not in names
    assert (published / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    config = json.loads((published / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_dcformer.DCFormerForCausalLM"
    del config["auto_map"]
    assert config == json.loads((original / "config.json").read_text())


def test_card_tells_both_ways_and_has_metadata(published: Path) -> None:
    card = ModelCard.load(published / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert {"dynattn", "dcformer", "custom_code", "arxiv:2405.08553"} <= set(card.data.tags)
    assert "import dynattn" in card.text
    assert "trust_remote_code=True" in card.text
    assert "| `num_attention_heads` | 4 |" in card.text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_own_card_is_kept_and_completed(checkpoint: Path, encoding: str) -> None:
    text = "---\nlicense: mit\ntags: [mine]\nlibrary_name: other\n---\n# Mine\n\nTrained on rhymes.\n"
    (checkpoint / "README.md").write_text(text, encoding=encoding)
    assert main(["publish", str(checkpoint), "--no_verify"]) == 0
    card = ModelCard.load(checkpoint.with_name("tiny-hub") / "README.md")
    assert card.data.license == "mit"
    assert card.data.library_name == "transformers"
    assert card.data.tags[:2] == ["mine", "dynattn"]
    assert "Trained on rhymes." in card.text
    assert card.text.count("## How to load") == 1


def test_a_card_names_the_repository_in_its_code(checkpoint: Path) -> None:
    call = 'model = AutoModelForCausalLM.from_pretrained("PATH_OR_NAME")'
    (checkpoint / "README.md").write_text(f"# Mine\n\n```python\nimport dynattn\n{call}\n```\n")
    for repo, name in ([], "PATH_OR_NAME"), (["--repo", "me/tiny", "--dry_run"], "me/tiny"):
        assert main(["publish", str(checkpoint), "--no_verify", "--overwrite", *repo]) == 0
        card = checkpoint.with_name("tiny-hub") / "README.md"
        assert call.replace("PATH_OR_NAME", name) in card.read_text()


def test_paths_on_this_machine_are_not_published(checkpoint: Path) -> None:
    edit_config(checkpoint, _name_or_path=str(checkpoint))
    tokenizer = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "name_or_path": str(checkpoint)}))
    assert main(["publish", str(checkpoint), "--no_verify"]) == 0
    for name, content in contents(checkpoint.with_name("tiny-hub")).items():
        assert str(checkpoint).encode() not in content, name


def test_published_folder_can_be_published_again_unchanged(published: Path, tmp_path: Path) -> None:
    assert main(["publish", str(published), "--output", str(tmp_path / "again"), "--no_verify"]) == 0
    assert contents(tmp_path / "again") == contents(published)


def test_saved_again_with_the_package_the_model_keeps_its_code(published: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(published)
    assert type(model) is dynattn.DCFormerForCausalLM
    model.save_pretrained(tmp_path)
    # What was proved of the published folder holds for any with the same code, weights and configuration.
    proved, saved = contents(published), contents(tmp_path)
    parts = {name for name in proved if name.endswith((".py", ".safetensors"))}
    assert {"modeling_dcformer.py", "model.safetensors"} < parts
    assert {name: saved.get(name) for name in parts} == {name: proved[name] for name in parts}
    assert json.loads(saved["config.json"]) == json.loads(proved["config.json"])


def test_a_model_without_code_is_saved_without_code(original: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(original).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("family", "head"),
    [
        pytest.param("DCPythia", "ForCausalLM", marks=pytest.mark.slow),
        pytest.param("RCMHA", "ForCausalLM", marks=pytest.mark.slow),
        pytest.param("DCBart", "ForConditionalGeneration", marks=pytest.mark.slow),
        pytest.param("RCMHASeq2Seq", "ForConditionalGeneration", marks=pytest.mark.slow),
        pytest.param("DCViT", "ForImageClassification", marks=pytest.mark.slow),
        pytest.param("DCModernBert", "ForMaskedLM", marks=pytest.mark.slow),
        pytest.param("DCModernBert", "ForQuestionAnswering", marks=pytest.mark.slow),
        pytest.param("DCModernBert", "ForMultipleChoice", marks=pytest.mark.slow),
        pytest.param("DCViT", "Model", marks=pytest.mark.slow),
        pytest.param("DCFormer", "Model", marks=pytest.mark.slow),
        pytest.param("DCFormer", "ForTokenClassification", marks=pytest.mark.slow),
        pytest.param("DCPythia", "ForSequenceClassification", marks=pytest.mark.slow),
        pytest.param("RCMHA", "ForQuestionAnswering", marks=pytest.mark.slow),
    ],
)
def test_every_family_and_head_works_without_the_package(
    family: str, head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "tiny", family, head, max_shard_size="50KB")
    assert main(["publish", str(tmp_path / "tiny")]) == 0
    output = capsys.readouterr()
    assert f"without the package: plain, {'larger' if family == 'DCViT' else 'left-padded'}" in output.out
    assert ("generated" in output.out) == (head in ("ForCausalLM", "ForConditionalGeneration"))
    assert "no tokenizer" in output.err
    assert (tmp_path / "tiny-hub" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_checkpoints_of_every_family_and_head_are_read(family: Family, tmp_path: Path) -> None:
    for auto_class, head in family.heads.items():
        save_model(tmp_path / head, family.prefix, head)
        assert read_checkpoint(str(tmp_path / head)).auto_class == auto_class


@pytest.mark.parametrize(
    ("family", "mixer"),
    [
        pytest.param("DCFormer", "differential", marks=pytest.mark.slow),
        pytest.param("DCPythia", "talking_heads", marks=pytest.mark.slow),
        pytest.param("DCFormer", "head_convolution", marks=pytest.mark.slow),
        pytest.param("DCPythia", "modded_nanogpt", marks=pytest.mark.slow),
    ],
)
def test_published_mixers_work_without_the_package(
    family: str, mixer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "tiny", family, mixer=mixer)
    assert main(["publish", str(tmp_path / "tiny")]) == 0
    assert "generated" in capsys.readouterr().out


def answer_in_this_process(work: Path) -> None:
    """What the probe's process does, with the package's own code in place of the folder's."""
    options = json.loads((work / "job.json").read_text())
    answers = answers_with_package(read_checkpoint(options["folder"]))
    for name in ("answers", "copy_answers"):
        save_file(answers, options[name])


def test_a_model_in_shards_and_without_a_tokenizer_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "run_probe", answer_in_this_process)
    save_model(tmp_path / "tiny", "RCMHA", max_shard_size="50KB")
    assert main(["publish", str(tmp_path / "tiny")]) == 0
    output = capsys.readouterr()
    assert "generated" in output.out and "no tokenizer" in output.err
    assert (tmp_path / "tiny-hub" / "model.safetensors.index.json").is_file()


def test_folder_that_answers_differently_is_not_written(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder = job.write_folder

    def write_other_model(folder: Path, *args: Any, **options: Any) -> None:
        write_folder(folder, *args, **options)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1.0}))

    monkeypatch.setattr(job, "write_folder", write_other_model)
    monkeypatch.setattr(verify, "run_probe", answer_in_this_process)
    with pytest.raises(UserError, match="without the package the answer 'plain' differs by"):
        job.publish(job.PublishArguments(str(checkpoint)))
    assert [path.name for path in checkpoint.parent.iterdir()] == ["tiny"]


@pytest.mark.slow
def test_folder_that_lacks_code_is_not_written_and_the_old_one_stays(
    checkpoint: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder, output = job.write_folder, tmp_path / "old"
    shutil.copytree(published, output)

    def forget_a_file(folder: Path, *args: Any, **options: Any) -> None:
        write_folder(folder, *args, **options)
        (folder / "layers_head_composition.py").unlink()

    monkeypatch.setattr(job, "write_folder", forget_a_file)
    with pytest.raises(UserError, match=r"does not work without the package.*layers_head_composition\.py"):
        job.publish(job.PublishArguments(str(checkpoint), output=str(output), overwrite=True))
    assert contents(output) == contents(published)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "tiny"]


def test_the_history_of_a_repository_is_not_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "clone"
    (output / ".git").mkdir(parents=True)
    (output / "config.json").write_text("{}")
    assert main(["publish", str(checkpoint), "--output", str(output), "--no_verify", "--overwrite"]) == 2
    assert (output / ".git").is_dir() and (output / "config.json").read_text() == "{}"


def test_files_that_are_of_no_checkpoint_are_not_overwritten(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("notes.md", "data/train.jsonl", "results.json", "code/train.py"):
        mine = tmp_path / "out" / name
        mine.parent.mkdir(parents=True, exist_ok=True)
        mine.write_text("mine")
        (tmp_path / "out" / "config.json").write_text("{}")
        assert main(["publish", str(checkpoint), "--output", str(tmp_path / "out"), "--no_verify", "--overwrite"]) == 2
        assert f"also holds {name}, which would be lost" in capsys.readouterr().err
        assert mine.read_text() == "mine"
        mine.unlink()
    (tmp_path / "out" / ".cache" / "huggingface" / "download").mkdir(parents=True)  # of the Hub's client
    (tmp_path / "out" / ".cache" / "huggingface" / "download" / "config.json.metadata").write_text("")
    assert main(["publish", str(checkpoint), "--output", str(tmp_path / "out"), "--no_verify", "--overwrite"]) == 0


def test_overwrite_replaces_the_whole_folder(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert main(["publish", str(checkpoint), "--output", str(output), "--no_verify"]) == 0
    (output / "stale.py").write_text("")
    assert main(["publish", str(checkpoint), "--output", str(output), "--no_verify"]) == 2
    assert (output / "stale.py").exists()
    assert main(["publish", str(checkpoint), "--output", str(output), "--no_verify", "--overwrite"]) == 0
    assert not (output / "stale.py").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny"]


@pytest.mark.parametrize("output", ["notes", "notes/diary.txt", "tiny", "tiny/inside", "."])
def test_destinations_that_would_lose_something_are_refused(checkpoint: Path, tmp_path: Path, output: str) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["publish", str(checkpoint), "--output", str(tmp_path / output), "--overwrite", "--no_verify"]) == 2
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def poison(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def lose_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path) -> list[Path]:
    (folder / "model.safetensors").unlink()
    save_model(folder, max_shard_size="50KB")
    return sorted(folder.glob("model-*.safetensors"))


def swap_shards(folder: Path) -> None:
    first, second, *_ = shard(folder)
    shutil.copyfile(second, first)


def move_last_token(folder: Path, place: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = place
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (shutil.rmtree, "does not exist"),
    "empty": (lambda folder: [path.unlink() for path in folder.iterdir()], "is empty"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "config no json": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
    "config no object": (lambda folder: (folder / "config.json").write_text("[]"), "must hold an object"),
    "other model": (lambda folder: edit_config(folder, model_type="llama"), "'llama'; only dcformer"),
    "bad field": (lambda folder: edit_config(folder, num_key_value_heads=3), "num_key_value_heads"),
    "bad type": (lambda folder: edit_config(folder, hidden_size="wide"), "hidden_size"),
    "no architecture": (lambda folder: edit_config(folder, architectures=None), "the architecture None"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "pickle": (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), "there is model.bin"),
    "truncated": (truncate, "truncated"),
    "not safetensors": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "truncated"),
    "missing shard": (lambda folder: shard(folder)[0].unlink(), "missing, but model.safetensors.index.json names it"),
    "wrong shard": (swap_shards, "which lacks it"),
    "bad index": (
        lambda folder: shard(folder) and (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
        "names no weights",
    ),
    "other shape": (lambda folder: edit_config(folder, intermediate_size=64), "config.json|does not load"),
    "weight lost": (lose_weight, "lacks 1 weights of the model, such as model.norm.weight"),
    "nan": (poison, "outputs NaN"),
    "tokenizer damaged": (lambda folder: (folder / "tokenizer.json").write_text("{"), "does not load"),
    "tokenizer too big": (lambda folder: save_tokenizer(folder, 400), "but the model embeds 300"),
    "tokenizer with gaps": (lambda folder: move_last_token(folder, 350), "but the model embeds 300"),
    "card damaged": (lambda folder: (folder / "README.md").write_text("---\n[: :\n---\n"), "no model card"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_in_one_line_and_nothing_is_written(
    checkpoint: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    apply, message = DAMAGE[damage]
    apply(checkpoint)
    capsys.readouterr()
    assert main(["publish", str(checkpoint)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dynattn publish: error:")]
    assert len(lines) == 1
    assert any(part in lines[0] for part in message.split("|")), lines[0]
    assert {path.name for path in checkpoint.parent.iterdir()} <= {"tiny"}


def test_a_process_with_the_package_does_not_pass_for_one_without() -> None:
    with pytest.raises(RuntimeError, match="can be imported"):
        probe.refuse_package([])


def test_a_file_of_the_package_under_another_name_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dynattn", None)  # what an import blocker looks like
    probe.refuse_package([])
    with pytest.raises(RuntimeError, match="was loaded"):
        probe.refuse_package(package_roots())


def test_answers_may_differ_by_rounding_only() -> None:
    answer = torch.linspace(-4, 4, 9)
    assert compare_answers({"plain": answer}, {"plain": answer + 1e-6}).max_difference == pytest.approx(1e-6, rel=0.3)
    for other, message in (
        ({"plain": answer + 1e-4}, "differs by 1.0e-04"),
        ({"plain": answer * torch.nan}, "differs by nan"),
        ({"plain": answer[:-1]}, "another shape or dtype"),
        ({"plain": answer.double()}, "another shape or dtype"),
        ({}, r"with the package the answers are \['plain'\], without it \[\]"),
    ):
        with pytest.raises(UserError, match=message):
            compare_answers({"plain": answer}, other)
    with pytest.raises(UserError, match="generated"):
        compare_answers({"generated": torch.tensor([1, 2])}, {"generated": torch.tensor([1, 3])})


def test_the_probe_covers_padding_and_caches(original: Path) -> None:
    answers = answers_with_package(read_checkpoint(str(original)))
    assert set(answers) == {"plain", "left-padded", "cached", "generated", "tokenizer"}
    assert answers["plain"].shape == (probe.ROWS, probe.LENGTH, SMALL["vocab_size"])
    torch.testing.assert_close(answers["cached"], answers["plain"], rtol=1e-3, atol=1e-3)
    assert (answers["left-padded"][-1] == 0).all(-1).sum() == probe.LENGTH // 2


def test_the_probe_generates_under_any_settings(checkpoint: Path) -> None:
    expected = answers_with_package(read_checkpoint(str(checkpoint)))
    file = checkpoint / "generation_config.json"
    settings = {"num_return_sequences": 3, "num_beams": 4, "return_dict_in_generate": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    assert compare_answers(expected, answers_with_package(read_checkpoint(str(checkpoint)))).max_difference == 0


def test_interpreter_of_the_probe_is_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], dict[str, Any]]] = []
    monkeypatch.setenv("HF_TOKEN", "secret")

    def record(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append((command, options))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", record)
    run_probe(tmp_path)
    ((command, options),) = calls
    assert command[1] == "-I"
    assert options["cwd"] == tmp_path
    assert "HF_TOKEN" not in options["env"]
    assert options["env"]["HF_HUB_OFFLINE"] == "1"


def test_what_the_probe_says_in_another_encoding_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers write what they say in that of the system, which Python's isolated mode may not share."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf 'no \\377\\n' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UserError, match="does not work without the package, so it was not written: no \ufffd"):
        run_probe(tmp_path)
