"""The notebooks hold the code of their guides, and run."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest
from cases.guides import environment_of_guides
from cases.text import BLOCK

ROOT = Path(__file__).parents[2]
nbformat = pytest.importorskip("nbformat", reason="pip install 'dynattn[docs]'")


def builder() -> ModuleType:
    """docs/notebooks.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs/notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOTEBOOKS = builder()


@pytest.mark.parametrize("name", NOTEBOOKS.NOTEBOOKS)
def test_cells_are_the_blocks_of_the_guide(name: str, tmp_path: Path) -> None:
    NOTEBOOKS.main(tmp_path)
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    text = (ROOT / f"docs/guides/{name}.md").read_text(encoding="utf-8")
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    written = [
        block.rstrip("\n") for reason, language, block in BLOCK.findall(text) if language != "yaml" and not reason
    ]
    assert sorted(source.removeprefix("%%bash -e\n") for source in code) == sorted(written)
    assert all("](" not in cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def test_a_block_that_does_not_run_is_text() -> None:
    text = "First.\n\n<!-- not run: no GPU -->\n```bash\nfalse\n```\n\nThen:\n\n```bash\nls\n```\n"
    first, then = NOTEBOOKS.as_notebook(text).cells
    assert (first.cell_type, then.cell_type) == ("markdown", "code")
    assert "```bash\nfalse\n```" in first.source and then.source == "%%bash -e\nls"


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS.NOTEBOOKS)
def test_notebooks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install 'dynattn[docs]'")
    for variable, value in environment_of_guides(tmp_path).items():
        monkeypatch.setitem(os.environ, variable, value)
    notebook = NOTEBOOKS.as_notebook((ROOT / f"docs/guides/{name}.md").read_text(encoding="utf-8"))
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
