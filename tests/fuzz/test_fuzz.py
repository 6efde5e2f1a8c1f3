"""A small part of the fuzzing, with fixed seeds: `make fuzz` does the rest. Known defects stand in `known.py`."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynattn.modeling.ops.native_library import usable_threads

from .fast import findings
from .harness import Case, Kind, Outcome, as_line, check_apart, in_child
from .kinds.every import KINDS
from .known import KNOWN, Known

ROOT = Path(__file__).parents[2]
# Kinds of which even one case takes as long as all other tests here.
SLOW = ("faults", "commands", "files", "processes")
SANITIZED = 40


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in KINDS if name not in SLOW], id="fast kinds"),
        *(pytest.param([name], id=name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_hostile_cases_find_nothing_new(names: list[str]) -> None:
    """All fast kinds share a process, whose imports take as long as the cases of one kind."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.fast", *names]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(
            known,
            id=known.reason,
            marks=[pytest.mark.xfail(strict=True, reason=known.reason), *[pytest.mark.slow] * (known.kind in SLOW)],
        )
        for known in KNOWN
    ],
)
def test_known_defects_are_mended(known: Known) -> None:
    assert not findings(KINDS[known.kind], [known.case])


def test_a_seed_always_gives_the_same_case() -> None:
    for kind in KINDS.values():
        assert kind.case(7) == kind.case(7)
        assert as_line(kind.name, kind.case(7)).startswith(f"python -m tests.fuzz.main --repeat {kind.name} '")


def test_what_every_test_gets_is_found_without_pytest() -> None:
    """The fuzzing imports it, too, and pytest alone finds the folder of cases."""
    subprocess.run([sys.executable, "-c", "from tests import conftest"], cwd=ROOT, check=True)


@pytest.mark.parametrize(("status", "says"), [(9, "status 9"), (-9, "killed by SIGKILL")])
def test_a_process_that_dies_is_a_finding_of_its_case_alone(status: int, says: str) -> None:
    def die(case: Case) -> None:
        if case["dies"]:
            os.kill(os.getpid(), -status) if status < 0 else os._exit(status)

    kind = Kind("dying", lambda random: {}, die, seconds=20)
    outcomes = list(check_apart(kind, [{"dies": False}, {"dies": True}, {"dies": False}]))
    assert [outcome.finding for outcome in outcomes] == [None, f"the process ends: {says}", None]


def test_c_code_is_checked_with_threads() -> None:
    """It takes one in a forked process, unless nobody has used threads before the fork, as here."""

    def check(case: Case) -> None:
        torch.set_num_threads(3)
        assert usable_threads() == 3
        with in_child(lambda tell: tell(usable_threads())) as later:
            assert later.hear(20) == 1, "this one may be forked after threads were used"

    assert list(check_apart(Kind("threads", lambda random: {}, check), [{}])) == [Outcome({})]
    assert usable_threads() == torch.get_num_threads()


@pytest.mark.slow
def test_c_code_is_clean_under_sanitizers(tmp_path: Path) -> None:
    """Address and undefined behaviour sanitizers watch the compiled C code."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec gcc -g -fsanitize=address,undefined -fno-sanitize-recover=all "$@" -O1\n')
    compiler.chmod(0o755)
    # The sanitizer catches exceptions of C++ only where it finds the library that throws them.
    libraries = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "CC": shlex.quote(str(compiler)),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TRITON_INTERPRET": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.sanitized", str(SANITIZED)]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    assert list((tmp_path / "cache").rglob("*.so"))
