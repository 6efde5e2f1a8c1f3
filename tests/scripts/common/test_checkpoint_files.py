"""What is believed of a checkpoint folder: links, JSON, sizes."""

import json
import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
from safetensors import SafetensorError, deserialize

from dynattn.scripts.common.checkpoint_files import (
    DEEPEST,
    TOKENIZER_CONFIG,
    check_sizes,
    copy_files,
    file_sizes,
    matching_files,
    read_config,
    read_foreign_json,
    require_inside,
)
from dynattn.scripts.common.errors import UserError, refusal_of


def link(path: Path, target: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def test_links_stay_in_the_folder_or_in_the_cache_of_their_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123abc"
    inside = [
        link(tmp_path / "plain" / "a", "b"),
        link(snapshot / "a", "../../blobs/0123"),
        link(snapshot / "part" / "a", "../../../blobs/0123"),
    ]
    assert [require_inside(path) for path in inside] == inside
    outside = [
        link(tmp_path / "plain" / "c", "../b"),
        link(tmp_path / "plain" / "blobs", "../../blobs/0123"),
        link(snapshot / "b", "../../../models--org--other/blobs/0123"),
        link(snapshot / "c", "/etc/hosts"),
    ]
    for path in outside:
        with pytest.raises(UserError, match=f"{path.name} is a link to .*, outside the checkpoint's folder"):
            require_inside(path)
    with pytest.raises(UserError, match="leads nowhere"):
        require_inside(link(tmp_path / "plain" / "circle", "circle"))


def test_patterns_match_files_but_no_folders(tmp_path: Path) -> None:
    (tmp_path / "LICENSE.txt").touch()
    (tmp_path / "LICENSES").mkdir()
    assert matching_files(tmp_path, ["LICENSE*", "*.txt"]) == ["LICENSE.txt"]
    link(tmp_path / "LICENSE", "../elsewhere")
    assert matching_files(tmp_path, ["LICENSE*"]) == ["LICENSE.txt"]  # there is no such file to copy
    tmp_path.with_name("elsewhere").touch()
    with pytest.raises(UserError, match="LICENSE is a link"):
        matching_files(tmp_path, ["LICENSE*"])


def test_files_of_sub_folders_are_found_and_copied_with_them(tmp_path: Path) -> None:
    source, copied = tmp_path / "source", tmp_path / "copied"
    (source / "part").mkdir(parents=True)
    copied.mkdir()
    (source / "a.txt").write_text("a")
    (source / "part" / "b.txt").write_text("bb")
    names = matching_files(source, ["*.txt", "part/*.txt"])
    copy_files(names, source, copied)
    assert names == ["a.txt", "part/b.txt"]
    assert file_sizes(copied) == file_sizes(source) == {"a.txt": 1, "part/b.txt": 2}
    link(source / "linked", "../copied/part")
    with pytest.raises(UserError, match=r"b\.txt is a link to .*, outside the checkpoint's folder"):
        matching_files(source, ["linked/*.txt"])


@pytest.mark.parametrize("name", ["/home/me/runs/tiny", "~/tiny", "./tiny", "runs/first/model"])
def test_a_path_in_the_tokenizers_configuration_is_not_copied(name: str, tmp_path: Path) -> None:
    copied, kept = tmp_path / "copied", {"eos_token": "<eos>"}
    copied.mkdir()
    for written, expected in ({**kept, "name_or_path": name}, kept), ({**kept, "name_or_path": "gpt2"}, None):
        (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps(written))
        copy_files([TOKENIZER_CONFIG], tmp_path, copied)
        assert json.loads((copied / TOKENIZER_CONFIG).read_text()) == (expected or written)


def test_json_may_be_deep_but_not_too_deep(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    levels = DEEPEST - 1  # the innermost value is a level of its own
    file.write_text('{"a":' * levels + "1" + "}" * levels)
    assert "a" in read_foreign_json(file)
    file.write_text('{"a":' * DEEPEST + "1" + "}" * DEEPEST)
    with pytest.raises(UserError, match="levels deep"):
        read_foreign_json(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must hold an object, not a list"),
        ('{"eos_token_id": "x"}', r"eos_token_id \('x'\) must be the number of a token"),
        ('{"eos_token_id": [2, true]}', r"eos_token_id \(\[2, True\]\) must be"),
        ('{"eos_token_id": [2, 3], "pad_token_id": null, "temperature": 0.7}', None),
    ],
)
def test_settings_of_generation_have_tokens_that_are_numbers(text: str, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(text)
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        assert read_config(tmp_path) == {}


def test_sizes_fit_the_tensors() -> None:
    shapes = {"embedding": (61, 32), "layer.0": (32, 48), "layer.1": (32, 48)}
    check_sizes({"n_layer": 2, "vocab_size": 61, "head_dim": None, "dim": "32", "heads": True}, shapes)
    for config in ({"n_layer": 4}, {"vocab_size": 62}, {"head_dim": 0}, {"dim": -1}):
        with pytest.raises(UserError, match=rf"{next(iter(config))} in config.json is .* at most (3|61) \("):
            check_sizes(config, shapes)


def test_reasons_are_sentences_or_name_their_kind() -> None:
    assert refusal_of(ValueError("first\nheads (0) must be positive")) == "heads (0) must be positive"
    advice = pickle.UnpicklingError("Weights only load failed\nRe-running with weights_only=False will likely succeed")
    assert refusal_of(advice) == "a file is damaged, or a pickle that runs code, and was not opened"
    assert refusal_of(KeyError("gelu2")) == "KeyError: 'gelu2'"
    with pytest.raises(SafetensorError) as damaged:
        deserialize(b"cut")
    assert refusal_of(damaged.value).startswith("a weight file is truncated or damaged (")
