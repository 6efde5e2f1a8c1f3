"""What is published goes to everybody: hostile folders, names and cards are refused in one line, or are harmless."""

import ast
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import edit_config, save_tokenizer
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import dynattn
from dynattn.scripts.cli import main

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SECRET = "not of this checkpoint"
INDEX = "model.safetensors.index.json"
# Each list stands for ten of the one before: 10^9 elements in all.
MULTIPLIED = "a0: &a0 [x]\n" + "\n".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 10}]" for i in range(1, 10))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "tiny"
    dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(**SMALL)).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage, beside a file that belongs to nobody's checkpoint."""
    (tmp_path / "outside").write_text(SECRET)
    return Path(shutil.copytree(original, tmp_path / "tiny"))


@pytest.fixture
def refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Publishes in vain, leaving nothing behind, and returns the one line that says why."""

    def run(*options: object, folder: object = checkpoint) -> str:
        before = sorted(path.name for path in checkpoint.parent.iterdir())
        capsys.readouterr()
        assert main(["publish", str(folder), "--no_verify", *map(str, options)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert sorted(path.name for path in checkpoint.parent.iterdir()) == before
        return line

    return run


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "README.md", "LICENSE", "tokenizer.json", "loss.png"]
)
def test_links_out_of_the_folder(name: str, checkpoint: Path, refused: Callable[..., str]) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to("../outside")
    assert f"{name} is a link to {checkpoint.with_name('outside')}, outside the checkpoint's folder" in refused()


def test_code_that_a_tokenizer_names_neither_runs_nor_is_published(checkpoint: Path, tmp_path: Path) -> None:
    elsewhere, ran = tmp_path / "elsewhere", tmp_path / "ran"
    elsewhere.mkdir()
    (elsewhere / "evil.py").write_text(
        f"from transformers import PreTrainedTokenizerFast\nopen({str(ran)!r}, 'w').close()\n"
        "class Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(**{**SMALL, "vocab_size": 300})).save_pretrained(checkpoint)
    save_tokenizer(checkpoint)
    shutil.copy(elsewhere / "evil.py", checkpoint / "NOTICE.py")
    code = {"auto_map": {"AutoTokenizer": [None, f"{elsewhere}--evil.Tokenizer"]}}
    names = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
    for name in names:
        content = json.loads((checkpoint / name).read_text()) if (checkpoint / name).exists() else {}
        (checkpoint / name).write_text(json.dumps({**content, **code, "parts": [code]}))
    edit_config(checkpoint, custom_pipelines={"text-generation": {"impl": f"{elsewhere}--evil.Pipeline"}})
    assert main(["publish", str(checkpoint), "--output", str(tmp_path / "published"), "--no_verify"]) == 0
    assert not ran.exists() and not (tmp_path / "published" / "NOTICE.py").exists()
    for name in (*names, "config.json"):
        assert "evil" not in (tmp_path / "published" / name).read_text()


def test_code_is_not_hidden_in_depth(checkpoint: Path, refused: Callable[..., str]) -> None:
    """Transformers reads JSON of any depth."""
    save_tokenizer(checkpoint)
    dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(**{**SMALL, "vocab_size": 300})).save_pretrained(checkpoint)
    file = checkpoint / "tokenizer_config.json"
    hidden = f'"auto_map": {{"AutoTokenizer": [null, "a.B"]}}, "note": {"[" * 70 + "]" * 70}'
    file.write_text(file.read_text().replace("{", f"{{{hidden},", 1))
    assert "tokenizer_config.json is nested more than 64 levels deep" in refused()


def test_names_of_files_do_not_command_the_terminal(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "junk\x1b]0;title\x07").touch()
    (checkpoint / "LICENSE\x1b[2J\nwritten     x").touch()
    assert main(["publish", str(checkpoint), "--output", str(tmp_path / "published"), "--no_verify"]) == 0
    printed = "".join(capsys.readouterr())
    assert r"junk\x1b]0;title\x07" in printed and r"LICENSE\x1b[2J\nwritten     x" in printed
    assert "\x1b" not in printed and "\x07" not in printed


def test_links_of_the_cache_of_the_hub(original: Path, tmp_path: Path) -> None:
    blobs, snapshot = (tmp_path / "models--org--name" / part for part in ("blobs", "snapshots/0123abc"))
    shutil.copytree(original, blobs)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(os.path.relpath(blob, snapshot))
    assert main(["publish", str(snapshot), "--output", str(tmp_path / "made"), "--no_verify"]) == 0
    assert not any(path.is_symlink() for path in (tmp_path / "made").iterdir())


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dtype", "float99", "dtype in config.json is 'float99'"),
        ("hidden_size", -32, "hidden_size in config.json is -32"),
        ("num_attention_heads", 0, "num_attention_heads in config.json is 0"),
        ("num_hidden_layers", 10**7, "num_hidden_layers in config.json is 10000000"),
        ("vocab_size", 10**12, "vocab_size in config.json is 1000000000000"),
        ("quantization_config", 3, "quantization_config in config.json is 3"),
        ("id2label", 3, "AttributeError: 'int' object"),
        ("architectures", 3, "architectures in config.json is 3"),
        ("model_type", [], "model_type in config.json is []"),
    ],
)
def test_hostile_values(field: str, value: Any, says: str, checkpoint: Path, refused: Callable[..., str]) -> None:
    edit_config(checkpoint, **{field: value})
    assert says in refused()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_deep_json(name: str, checkpoint: Path, refused: Callable[..., str]) -> None:
    if name == INDEX:
        (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_text("[" * 100_000 + "]" * 100_000)
    assert "more than 64 levels deep" in refused()


@pytest.mark.parametrize("name", ["../outside", "..", "", "a\0b", "x" * 400])
def test_an_index_that_names_files_elsewhere(name: str, checkpoint: Path, refused: Callable[..., str]) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert "which is no file name in that folder" in refused()


def test_a_tensor_in_two_shards(checkpoint: Path, refused: Callable[..., str]) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    save_file(weights, checkpoint / "a.safetensors", metadata={"format": "pt"})
    save_file({"x": torch.ones(1), "lm_head.weight": torch.ones(61, 32)}, checkpoint / "b.safetensors")
    places = {**dict.fromkeys(weights, "a.safetensors"), "x": "b.safetensors"}
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": places}))
    assert "lm_head.weight is in a.safetensors and in b.safetensors; keep one of them" in refused()


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("a\0b", "unprintable characters"),
        ("a\nb", "unprintable characters"),
        ("x" * 300, "File name too long"),
        ("x" * 240, "has 240 bytes; give one of at most 220"),
        ("../work", "holds the current folder"),
        ("../outside/inside", "is a file"),
        ("../link", "overlap"),
    ],
)
def test_hostile_destinations(
    output: str, says: str, checkpoint: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.with_name("work").mkdir()
    checkpoint.with_name("link").symlink_to("tiny")
    monkeypatch.chdir(checkpoint.with_name("work"))
    assert says in refused("--output", output)


@pytest.mark.parametrize(
    ("folder", "says"),
    [("a\0b", "unprintable characters"), ("x" * 300, "File name too long"), ("/", "no config.json"), ("", "empty")],
)
def test_hostile_sources(folder: str, says: str, refused: Callable[..., str]) -> None:
    assert says in refused(folder=f"--checkpoint={folder}")


@pytest.mark.parametrize("revision", ["../x", "a b", "a\nb", "-x", "x" * 300])
def test_hostile_revisions(revision: str, refused: Callable[..., str]) -> None:
    assert "is no branch, tag or commit" in refused("--repo", "org/name", "--dry_run", f"--revision={revision}")


def test_a_card_of_hostile_names_is_valid(checkpoint: Path, tmp_path: Path) -> None:
    folder = checkpoint.rename(checkpoint.with_name("ti\"ny: '{0}' # ---"))
    license_name = 'mit"\n---\nevil: [yes'
    assert (
        main(["publish", str(folder), "--output", str(tmp_path / "out"), "--no_verify", "--license", license_name]) == 0
    )
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == license_name
    assert "evil" not in card.data.to_dict()
    assert card.data.library_name == "transformers"
    for code in re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL):
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
        assert all(ast.literal_eval(call.args[0]) == folder.name for call in calls)


@pytest.mark.parametrize(
    ("front_matter", "says"),
    [
        ("tags: [3]", "tags in"),
        ("license: [mit]", "license in"),
        ("pipeline_tag: {a: b}", "pipeline_tag in"),
        ("base_model: /home/me/parent", "base_model in"),
        ("base_model: [gpt2, ../parent]", "base_model in"),
        ("base_model: 3", "base_model in"),
        ("a: " + "[" * 5000 + "]" * 5000, "no model card"),
        ("a: !!python/object/apply:os.mkdir [EXECUTED]", "no model card"),
        ("- a", "no model card"),
        ("model-index: 3", "no model card"),
        (MULTIPLIED, "more than 100,000 values"),
    ],
    ids=lambda value: value[:20],
)
def test_hostile_cards(front_matter: str, says: str, checkpoint: Path, refused: Callable[..., str]) -> None:
    (checkpoint / "README.md").write_text(f"---\n{front_matter}\n---\n# Tiny\n")
    assert says in refused()
