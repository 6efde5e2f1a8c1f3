"""Makes a Python process know this package's models: Python imports a module of this name when it starts."""

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path


def run_hidden_module() -> None:
    """Runs the module of this name that Python would import without this folder, if there is one."""
    elsewhere = [folder for folder in sys.path if Path(folder) != Path(__file__).parent]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def import_models() -> None:
    """Imports the package and the modules of `--import`, in an environment that has it."""
    if find_spec("dynattn") is not None:
        for name in ("dynattn", *import_module("dynattn.scripts.common.commands").imported_modules()):
            import_module(name)


run_hidden_module()
import_models()
