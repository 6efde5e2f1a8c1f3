"""Imports run downwards, never in a circle, jobs do not import one another, and models need no POSIX system."""

import ast
import subprocess
import sys
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each level may import those before it in this list. Parts of one level do not import each other.
LEVELS = (
    ("configuration", "modeling.ops"),
    ("modeling.positions", "modeling.caches"),
    ("modeling.layers", "modeling.serving"),
    ("modeling.common",),
    ("modeling.generation", "modeling.inspection", "modeling.other_models", "modeling.parallel"),
    ("modeling",),
    ("package",),
    ("modeling.serving.vllm",),  # a plugin of vLLM, which imports dynattn as users do
    ("scripts.common",),
    (
        "scripts.pretrain",
        "scripts.evaluate",
        "scripts.convert",
        "scripts.publish",
        "scripts.benchmark",
        "scripts.doctor",
        "scripts.serve",
        "scripts.run",
        "scripts.inspect",
        "scripts.export",
        "scripts.report",
    ),
    ("scripts.compare",),  # trains its variants
    ("scripts.reproduce",),  # a study runs the other jobs
    ("scripts",),
    ("package.__main__",),
)


def modules() -> dict[str, Path]:
    """Every module by the name that it is imported by; a package by the name of its folder."""
    found = {}
    for top in ("configuration", "modeling", "package", "scripts"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[1:] if top == "package" else parts
            found[".".join(("dynattn", *(parts[:-1] if path.stem == "__init__" else parts)))] = path
    return found


MODULES = modules()


@cache
def imports_of(module: str) -> set[str]:
    """The modules of this project that a module imports, wherever in its text, also for type checkers alone."""
    found = set()
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            names = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= set(filter(None, map(find_module, names)))
    return found


def find_module(name: str) -> str | None:
    """The module that `name` is, or is defined in; None for what other projects define."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def part_of(module: str) -> tuple[int, str]:
    """The number of the level of a module, and the part that it belongs to."""
    place = ".".join(MODULES[module].relative_to(ROOT).with_suffix("").parts) + "."
    found = [(level, part) for level, parts in enumerate(LEVELS) for part in parts if place.startswith(f"{part}.")]
    return max(found, key=lambda one: len(one[1]))


def test_every_job_has_a_level() -> None:
    """A job without one would count as part of `scripts`, which may import everything."""
    jobs = {f"scripts.{caption.parent.name}" for caption in (ROOT / "scripts").glob("*/__init__.py")}
    assert jobs <= {part for parts in LEVELS for part in parts}


def test_imports_run_downwards() -> None:
    wrong = []
    for module in MODULES:
        level, part = part_of(module)
        for imported in imports_of(module):
            below, other = part_of(imported)
            if other != part and below >= level:
                wrong.append(f"{module} ({part}) imports {imported} ({other})")
    assert not wrong, "\n".join(wrong)


def test_there_is_no_circle_of_imports() -> None:
    graph = {module: imports_of(module) - {module} for module in MODULES}
    while leaves := [module for module, imported in graph.items() if not imported & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert not graph, f"these modules, or what they import, import each other: {sorted(graph)}"


@pytest.mark.parametrize("top", ["configuration", "modeling"])
def test_inner_folders_have_a_caption_and_nothing_else(top: str) -> None:
    for path in (ROOT / top).rglob("__init__.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), path
        assert len(tree.body) == 1, path


# A process without what Python's own modules have on POSIX systems alone. Other packages are loaded before.
WINDOWS = """
import os, shutil, signal, sys, types, warnings
import torch
from transformers import GenerationMixin, Trainer
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("fork", "geteuid", "getuid", "killpg", "register_at_fork", "sched_getaffinity", "statvfs", "sysconf"):
    delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGPIPE", "pthread_sigmask"):
    delattr(signal, name)
sys.platform = "win32"
shutil._winapi = types.SimpleNamespace(NeedCurrentDirectoryForExePath=bool)  # which Python 3.12 asks there
import dynattn
for name in dynattn.__all__:
    getattr(dynattn, name)
model = dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig.from_size("tiny", vocab_size=99))
tokens = torch.arange(40).reshape(2, 20)
with warnings.catch_warnings(record=True) as warned:
    output = model(tokens, labels=tokens)
output.loss.backward()
messages = [str(warning.message) for warning in warned]  # builds of PyTorch for CUDA may warn that they find no driver
assert any("C code is not compiled on Windows" in message for message in messages), messages
model.set_attn_implementation("eager")
torch.testing.assert_close(model(tokens).logits, output.logits)
try:
    import dynattn.scripts.cli
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_models_work_where_posix_is_missing_and_commands_say_what_to_do() -> None:
    done = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("the commands of dynattn need Linux or macOS"), done.stderr
