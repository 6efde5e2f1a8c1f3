"""Which versions of Python, PyTorch and Transformers the package works with, each in an environment of its own.

    python -m tests.package.version_matrix --rows 3.11/2.11/5.17 3.13/2.13/5.24

uv finds or downloads the Python of a row, and installs the newest patch releases. The package index has torch for CUDA
alone, which brings several gigabytes of libraries along; they are shared by the rows. Rows that the record holds
already are replaced, others stay. Run by `make matrix`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dynattn.scripts.common import markdown
from dynattn.scripts.common.atomic_file import write_json, write_whole
from dynattn.scripts.common.environment import hardware, source_commit

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "model_cards/records/compatibility"
ROWS = (
    "3.11/2.11/5.17",
    "3.11/2.13/5.17",
    "3.11/2.15/5.24",
    "3.12/2.15/5.23",
    "3.13/2.12/5.20",
    "3.13/2.13/5.24",
    "3.14/2.15/5.24",
)
TOOLS = ("pytest>=9.0", "peft>=0.18", "hypothesis>=6.150", "setuptools>=77")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "numpy", "triton")
# What stands for each promise; the whole suite in each environment would take hours.
AREAS = {
    "golden numbers": ("tests/modeling/test_golden.py", "tests/modeling/test_golden_rcmha.py"),
    "Auto classes, saving": ("tests/package/test_registration.py", "tests/modeling/test_contract.py"),
    "caches, generation": (
        "tests/modeling/caches/test_composed_cache.py",
        "tests/modeling/test_ladder.py::test_generation_agrees_with_the_model_without_a_cache",
        "tests/modeling/test_speculation.py",
    ),
    "configurations, positions": (
        "tests/configuration/test_configuration.py",
        "tests/modeling/positions/test_schemes.py",
    ),
    "compiled": ("tests/modeling/test_compile.py",),
    "equal to Transformers": ("tests/modeling/test_plain_equality.py",),
    "publishing": (
        "tests/package/test_remote_code.py",
        "tests/scripts/publish/test_folder.py::test_every_family_and_head_works_without_the_package",
    ),
    "conversion": ("tests/scripts/convert/test_upcycle_models.py",),
    "training": ("tests/scripts/pretrain/test_run.py",),
    "several processes": (
        "tests/modeling/parallel/test_context_parallel.py",
        "tests/modeling/parallel/test_tensor_parallel.py",
    ),
}
SHOW_VERSIONS = f"""
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {{"python": platform.python_version()}}
for name in {PACKAGES!r}:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rows one after the other, writes the record after each, and returns 0 if nothing failed in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="PYTHON/TORCH/TRANSFORMERS")
    parser.add_argument("--work", type=Path, default=ROOT / "build/matrix", help="where environments are made")
    parser.add_argument("--output", type=Path, default=RECORD, help="folder of the record")
    arguments = parser.parse_args(argv)
    shutil.rmtree(arguments.work, ignore_errors=True)
    wheel = build_wheel(arguments.work)
    passed = True
    for row in arguments.rows:
        result = run_row(row, wheel, arguments.work)
        passed &= not any(area["failed"] for area in result["areas"].values())
        write_record(arguments.output, row, result)
    print((arguments.output / "table.md").read_text())
    return 0 if passed else 1


def build_wheel(work: Path) -> Path:
    """The package as users get it."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(work), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(work.glob("*.whl"))


def run_row(row: str, wheel: Path, work: Path) -> dict[str, Any]:
    """Makes the environment of one row, runs the tests in it, and removes it."""
    python, torch, transformers = row.split("/")
    folder = work / row.replace("/", "-")
    inside = folder / "bin/python"
    wanted = [f"torch=={torch}.*", f"transformers=={transformers}.*", str(wheel), *TOOLS]
    uv = [sys.executable, "-m", "uv"]
    print(f"{row}: making the environment", flush=True)
    try:
        subprocess.run([*uv, "venv", "--quiet", "--python", python, folder], check=True)
        subprocess.run([*uv, "pip", "install", "--quiet", "--python", inside, *wanted], check=True)
        shown = subprocess.run([inside, "-c", SHOW_VERSIONS], check=True, capture_output=True, text=True).stdout
        began = time.monotonic()
        areas = run_tests(inside, row, folder)
        seconds = round(time.monotonic() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "versions": json.loads(shown),
        "hardware": processor(),
        "commit": source_commit(),
        "seconds": seconds,
        "areas": areas,
    }


def run_tests(python: Path, row: str, folder: Path) -> dict[str, dict[str, Any]]:
    """For each area how many tests passed, failed and were skipped, and the names of those that failed.

    Raises:
        RuntimeError: the tests did not run to their end.
    """
    report = folder / "report.xml"
    chosen = [test for tests in AREAS.values() for test in tests]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # The tests see the installed package alone, not the one that runs them.
    environment.pop("PYTHONPATH", None)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode not in (0, 1):  # 1: some tests failed
        raise RuntimeError(f"{row}: pytest ended with {ended.returncode}\n{ended.stdout}{ended.stderr}")
    if ended.returncode:
        print(ended.stdout[-8000:], flush=True)
    cases = list(ElementTree.parse(report).iter("testcase"))
    return {name: count([case for case in cases if is_in(case, name)]) for name in AREAS}


def is_in(case: ElementTree.Element, area: str) -> bool:
    """Whether a test belongs to an area; a file that could not be read is a failed test of its area."""
    module = case.get("classname") or case.get("name") or ""
    return any(module == test.partition("::")[0].removesuffix(".py").replace("/", ".") for test in AREAS[area])


def count(cases: Sequence[ElementTree.Element]) -> dict[str, Any]:
    """The outcomes of tests, and the names of those that failed."""
    counts = Counter(map(outcome, cases))
    failures = sorted(f"{case.get('classname')}.{case.get('name')}" for case in cases if outcome(case) == "failed")
    return {kind: counts[kind] for kind in ("passed", "failed", "skipped")} | {"failures": failures}


def outcome(case: ElementTree.Element) -> str:
    """`passed`, `failed` or `skipped`."""
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


def write_record(output: Path, row: str, result: dict[str, Any]) -> None:
    """Puts one row into the record, and draws the table anew."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / "record.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = dict(sorted({**rows, row: result}.items()))
    write_json(path, rows, indent=1)
    write_whole(output / "table.md", table(rows) + "\n")


def table(rows: dict[str, Any]) -> str:
    """The record in Markdown: for each row and area, how many tests passed, and how many of them failed if any."""
    packages = ("python", "torch", "transformers")
    cells = [
        [*(result["versions"][name] for name in packages), *(cell(result["areas"].get(name)) for name in AREAS)]
        for result in rows.values()
    ]
    return markdown.table(["Python", "torch", "transformers", *AREAS], cells)


def cell(area: dict[str, Any] | None) -> str:
    """What the table says of one area; nothing of one that an earlier run did not know."""
    if area is None:
        return ""
    failed = f", **{area['failed']} failed**" if area["failed"] else ""
    return f"{area['passed']} passed{failed}"


def processor() -> str:
    """The machine's processor, as records name it."""
    import torch

    return hardware(torch.device("cpu"))


if __name__ == "__main__":
    sys.exit(main())
