"""Files that paths, folders and patterns name."""

from dataclasses import asdict
from pathlib import Path

import pytest

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.files import find_files, warn_of_unread
from dynattn.scripts.pretrain.outputs.run_folder import RunFolder


def test_what_exists_is_no_pattern(tmp_path: Path):
    folder = tmp_path / "a[b]" / "c*"
    folder.mkdir(parents=True)
    for name in ("d.txt", "[d].txt", "e.txt"):
        (folder / name).write_text("text")
    for path, names in {folder / "[d].txt": ["[d].txt"], folder / "[de].txt": ["d.txt", "e.txt"]}.items():
        assert [file.name for file in find_files(str(path)) or []] == names


@pytest.mark.parametrize("pattern", ["", "*", "**/*.jsonl"])
def test_what_runs_have_left_below_a_folder_is_no_data(pattern: str, tmp_path: Path):
    texts = [tmp_path / "text.jsonl", tmp_path / "foreign" / "text.jsonl"]
    metrics = tmp_path / "runs" / "one" / "metrics.jsonl"
    for path in (*texts, metrics):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "x"}')
    RunFolder(metrics.parent).begin(asdict(PretrainArguments(output=str(metrics.parent))), None)
    metrics.write_text('{"loss": 1.0}')
    (tmp_path / "foreign" / "run.json").write_text('{"of": "another program"}')
    found = find_files(f"{tmp_path}/{pattern}")
    assert found == (texts[:1] if pattern == "*" else sorted(texts))
    assert find_files(str(metrics.parent / "*.jsonl")) == [metrics]


def test_data_of_a_kind_that_is_not_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name in ("a.jsonl", "README.md", ".cache/a.jsonl.metadata"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    warn_of_unread(str(tmp_path))
    warn_of_unread(str(tmp_path / "a.jsonl"))
    assert not caplog.messages
    for name in ("b.jsonl.gz", "c.TXT", "d.json"):
        (tmp_path / name).touch()
    warn_of_unread(str(tmp_path))
    (told,) = caplog.messages
    assert "3 files" in told and "the first is b.jsonl.gz" in told


@pytest.mark.parametrize("name", ["pile", "./pile", "data/pile_0.87"])
def test_the_name_that_megatron_gives_its_files_is_no_data_set_of_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    Path(f"{name}.bin").touch()
    with pytest.raises(UserError, match=rf"^{name} is the beginning .* of Megatron's files; give {name}\.bin$"):
        find_files(name)
