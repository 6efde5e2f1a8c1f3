"""Which files hold the weights of a checkpoint, and what is believed of their index."""

import json
import sys
from pathlib import Path

import pytest

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.common.weight_files import find_weight_files, read_weight_map


@pytest.mark.parametrize(("stem", "suffix"), [("model", ".safetensors"), ("pytorch_model", ".bin")])
def test_a_single_file_comes_before_shards_as_in_transformers(stem: str, suffix: str, tmp_path: Path) -> None:
    shard, single = tmp_path / f"{stem}-00001-of-00001{suffix}", tmp_path / f"{stem}{suffix}"
    index = {"weight_map": {"norm.weight": shard.name}}
    (tmp_path / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    shard.touch()
    assert find_weight_files(tmp_path) == ([shard], {"norm.weight": shard})
    single.touch()
    assert find_weight_files(tmp_path) == ([single], {})


@pytest.mark.skipif(sys.getfilesystemencoding() != "utf-8", reason="this Python's files have names in ASCII alone")
def test_names_in_an_index(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-é.safetensors"}}))
    assert read_weight_map(index) == {"a": tmp_path / "model-é.safetensors"}
    for name in ("é" * 200, "..", "a/b", None):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(UserError, match="no file name in that folder"):
            read_weight_map(index)
    for content, message in (([], "is no index"), ({"weight_map": 1}, "is no index"), ({"weight_map": {}}, "names no")):
        index.write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            read_weight_map(index)
