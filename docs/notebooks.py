"""Guides as notebooks: their text in cells of Markdown, their Python and their commands in cells to run.

    python docs/notebooks.py FOLDER

`make docs` calls it, so that a guide and its notebook have one source.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

GUIDES = Path(__file__).parent / "guides"
NOTEBOOKS = ("first_model", "compose_a_model")
# A block of a language that a notebook can run, after a comment if it cannot run everywhere. A command that fails ends
# its cell.
BLOCK = re.compile(r"(^<!-- not run: .+? -->\n+)?^```(python|bash)\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
PREFIXES = {"python": "", "bash": "%%bash -e\n"}
# Links to other pages lead nowhere from a notebook that was downloaded.
RELATIVE_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]+\)")


def main(folder: Path) -> None:
    """Writes the notebook of each guide in `NOTEBOOKS`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NOTEBOOKS:
        text = (GUIDES / f"{name}.md").read_text(encoding="utf-8")
        nbformat.write(as_notebook(text), folder / f"{name}.ipynb")


def as_notebook(text: str) -> nbformat.NotebookNode:
    """The notebook of a guide."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    cells = list(cells_of(text))
    for index, cell in enumerate(cells):
        cell.id = f"cell-{index}"  # the same for the same guide
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def cells_of(text: str) -> Iterator[nbformat.NotebookNode]:
    """Text and blocks in their order; those that cannot run everywhere are left in the text."""
    end = 0
    for block in BLOCK.finditer(text):
        cannot_run, language, content = block.groups()
        if not cannot_run:
            yield from markdown(text[end : block.start()])
            yield new_code_cell(PREFIXES[language] + content)
            end = block.end()
    yield from markdown(text[end:])


def markdown(text: str) -> Iterator[nbformat.NotebookNode]:
    """A cell of text, if there is any."""
    if text.strip():
        yield new_markdown_cell(RELATIVE_LINK.sub(r"\1", text.strip()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
