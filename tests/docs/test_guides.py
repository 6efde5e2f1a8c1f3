"""The code of the guides runs as it stands, from top to bottom."""

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


@pytest.mark.parametrize("name", ["compose_a_detr.md", "mixers.md"])
def test_every_block_of_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (GUIDES / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, object] = {"__name__": name}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
