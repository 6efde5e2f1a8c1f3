"""`dynattn doctor` tells what is there, what is missing and how to get it."""

import re
from pathlib import Path

import pytest

from dynattn.scripts.doctor import findings, main


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """What was printed: for each subject its state and text."""
    words = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    return {subject: (state, text) for state, subject, text in words}


def test_a_sound_installation_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    shown = lines(capsys)
    assert {"dynattn", "torch", "transformers", "lm-eval[hf]", "triton", "cpu", "C", "attention"} <= shown.keys()
    assert "fails" not in {state for state, _ in shown.values()}
    assert "'chunked' for composed heads" in shown["attention"][1]


@pytest.mark.parametrize(
    ("requirement", "state", "text"),
    [
        ("no-such-package>=2", "fails", "not installed; pip install 'no-such-package>=2'"),
        ('no-such-package>=2; extra == "gpu"', "missing", "not installed; pip install 'dynattn[gpu]'"),
        ("torch>=999", "fails", "needs >=999; pip install 'torch>=999'"),
        ('torch>=999; sys_platform == "linux" and extra == "vllm"', "missing", "pip install 'dynattn[vllm]'"),
    ],
)
def test_what_is_missing_is_told_with_its_fix(
    requirement: str, state: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(findings, "requires", lambda name: [requirement])
    assert main.main([]) == int(state == "fails")
    found = lines(capsys)[requirement.partition(">")[0]]
    assert found[0] == state
    assert text in found[1]


def test_an_extra_of_a_requirement_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {
        "dynattn": ['torch[server]; extra == "serving"', 'torch[there]; extra == "serving"'],
        "torch": ['no-such-package; extra == "server"', 'numpy; extra == "there"', "never-asked-for; extra == 'x'"],
    }
    monkeypatch.setattr(findings, "requires", asked.get)
    found = {finding.subject: finding for finding in findings.examine()}
    assert found["torch[there]"].state == "ok"
    assert found["torch[server]"].state == "missing"
    assert "without no-such-package; pip install 'dynattn[serving]'" in found["torch[server]"].text


def test_requirements_for_development_and_other_systems_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ['none>=1; extra == "dev"', 'none>=1; extra == "docs"', 'none>=1; sys_platform == "elsewhere"']
    monkeypatch.setattr(findings, "requires", lambda name: others)
    assert "none" not in {finding.subject for finding in findings.examine()}


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "find_compiler", lambda: None)
    [found] = [finding for finding in findings.examine() if finding.subject == "C compiler"]
    assert found.state == "missing"
    assert "install gcc or clang" in found.text


@pytest.mark.skipif(findings.find_compiler() is None, reason="there is no C compiler")
def test_a_named_compiler_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/gcc")
    [found] = [finding for finding in findings.examine() if finding.subject == "C compiler"]
    assert found.state == "missing" and "CC='/no/such/gcc' names no program" in found.text


@pytest.mark.parametrize(
    ("mode", "state", "text"),
    [
        ("0", "missing", "not used, because DYNATTN_COMPILE=0"),
        ("yes", "fails", "DYNATTN_COMPILE='yes' is not known; use '0', '1' or 'auto'"),
    ],
)
def test_a_compiler_that_may_not_be_used_is_told(
    mode: str, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", mode)
    [found] = [finding for finding in findings.examine() if finding.subject == "C compiler"]
    assert (found.state, found.text) == (state, text)


def test_the_variables_that_are_shown_are_those_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[3] / "docs" / "environment.md"
    assert re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE) == list(findings.VARIABLES)
    for name in findings.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    shown = {finding.subject: finding.text for finding in findings.examine()}
    assert shown["OMP_NUM_THREADS"] == "3"
    assert "CC" not in shown
