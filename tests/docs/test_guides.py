"""What the documentation tells to type works: its Python runs from top to bottom, its commands have these options."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases.text import FILE_NAME, blocks_of, commands_of
from transformers import AutoModelForCausalLM

from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS, IMPLEMENTATIONS
from dynattn.scripts.cli import JOBS
from dynattn.scripts.completion import OTHERS, following

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
PAGES_OF_SITE = sorted({*PAGES, *ROOT.glob("*.md"), *ROOT.glob("model_cards/*.md"), *(ROOT / "modeling").rglob("*.md")})


@pytest.fixture
def registrations() -> Iterator[None]:
    """The implementations and models that a guide registers are gone afterwards."""
    models = AutoModelForCausalLM._model_mapping._extra_content
    tables: list[dict[Any, Any]] = [COMPOSING_IMPLEMENTATIONS, IMPLEMENTATIONS, models]
    before = [set(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        for added in set(table) - kept:
            del table[added]


@pytest.mark.parametrize(
    "name", ["compose_a_model.md", "encoders.md", "mixers.md", "positions.md", "variants.md", "vision.md"]
)
@pytest.mark.usefixtures("registrations")
def test_every_block_of_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = (GUIDES / name).read_text(encoding="utf-8")
    blocks = [content for language, content in blocks_of(text) if language == "python"]
    assert blocks
    names: dict[str, object] = {"__name__": name}
    for block in blocks:
        if module := FILE_NAME.match(block):
            Path(module[1]).write_text(block)
        exec(compile(block, name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_has_the_options_that_it_is_given(page: Path) -> None:
    for words in commands_of(page.read_text(encoding="utf-8")):
        if words[0] in (*OTHERS, "--version"):
            continue
        assert words[0] in JOBS.commands, words
        known = {as_field(option) for option in following(words)} | {"import"}
        assert {as_field(word) for word in words if word.startswith("--")} <= known, words


def test_every_command_is_told_of() -> None:
    told = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    assert [name for name in JOBS.commands if f"`dynattn {name}" not in told] == []


@pytest.mark.parametrize("page", PAGES_OF_SITE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_of_a_table_is_a_line(page: Path) -> None:
    """A row that goes on in the next line ends the table."""
    rows = [line for line in text_of(page).splitlines() if line.startswith("|")]
    assert not [row for row in rows if not row.rstrip().endswith("|")]


@pytest.mark.parametrize("page", PAGES_OF_SITE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page: Path) -> None:
    """Sphinx, with which `make docs` builds the site, refuses links to folders."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text_of(page)):
        place = page.parent / target if target else page
        assert place.is_file(), target
        assert not anchor or place.suffix != ".md" or anchor in anchors_of(place), (target, anchor)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def text_of(page: Path) -> str:
    """The page without blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def as_field(option: str) -> str:
    """What an option sets: `--no-verify` sets `verify`."""
    return option.partition("=")[0].removeprefix("--").replace("-", "_").removeprefix("no_")
