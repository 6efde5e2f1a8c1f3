"""Every block of a guide runs, from its top to its bottom, in an empty folder with what other guides left."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases.guides import environment_of_guides, write_starting_points
from cases.text import FILE_NAME, blocks_of

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
# The server of this one has to be asked while it runs.
WITH_TESTS_OF_THEIR_OWN = {"serving.md": "test_serving_guide.py"}
RUN = sorted(page.name for page in GUIDES.glob("*.md") if page.name not in WITH_TESTS_OF_THEIR_OWN)
# What a page needs beyond the packages of the tests.
NEEDED = re.compile(
    r"^(?:from|import|dynattn export) (trl|torchao|bitsandbytes|onnx|openvino|executorch|timm|nnsight)\b", re.MULTILINE
)


def as_program(text: str, page: str) -> str:
    """One program of Python that does what a reader of the page does, in one session."""
    lines = ["import subprocess", "def run(command): subprocess.run(['bash', '-ec', command], check=True)"]
    for language, content in blocks_of(text):
        if name := FILE_NAME.match(content):
            lines.append(f"open({name[1]!r}, 'w').write({content!r})")
        if language == "bash" and content.strip():
            lines.append(f"run({content!r})")
        if language == "python":
            lines.append(f"exec(compile({content!r}, {page!r}, 'exec'))")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_every_block_runs(page: str, tmp_path: Path) -> None:
    text = (GUIDES / page).read_text(encoding="utf-8")
    for module in NEEDED.findall("\n".join(content for _, content in blocks_of(text))):
        pytest.importorskip(module)
    environment = environment_of_guides(tmp_path)
    if page != "first_model.md":  # it makes what others start from
        write_starting_points(tmp_path)
    (tmp_path / ".guide.py").write_text(as_program(text, page))
    ended = subprocess.run([sys.executable, ".guide.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


def test_a_block_that_does_not_run_says_why_and_others_become_files_and_commands() -> None:
    text = (
        "```yaml\n# a.yaml\nx: 1\n```\n<!-- not run: no GPU -->\n```bash\nfalse\n```\n```bash\npip install x\nls\n```\n"
    )
    assert list(blocks_of(text)) == [("yaml", "# a.yaml\nx: 1\n"), ("bash", "\nls\n")]
    program = as_program(text, "page")
    assert "open('a.yaml', 'w')" in program and "ls" in program and "false" not in program


def test_pages_with_tests_of_their_own_have_them() -> None:
    for page, test in WITH_TESTS_OF_THEIR_OWN.items():
        assert page in (Path(__file__).parent / test).read_text()
