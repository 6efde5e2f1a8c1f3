"""The code that travels with a checkpoint: flat files, made from this package, for places where it is not installed.

Transformers loads such code from one folder without sub-packages, so the modules that the classes need are found by
following their relative imports, and every import is rewritten to a module of the same folder.
"""

import ast
import re
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_imports
from transformers.models.auto import modeling_auto

from dynattn import __version__

PACKAGE = __name__.partition(".")[0]
FLAT_CONSTANTS = re.compile(r"^FLAT_CONSTANTS\b", re.MULTILINE)
IMPORT_SOURCE = re.compile(r"from\s+\.[\w.]*")


def write_code(config: PreTrainedConfig, folder: str | Path) -> list[str]:
    """Writes the code of all classes registered for `config` into `folder` and points its `auto_map` at them.

    Returns:
        The names of the files; none for a configuration class that is not of this package.

    Raises:
        ValueError: the code of the package cannot be made flat.
    """
    if not is_ours(type(config)):
        return []
    classes = registered_classes(type(config))
    files = flat_code(classes.values())
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        Path(folder, name).write_text(source, encoding="utf-8")
        _check_what_transformers_sees(Path(folder, name))
    config.auto_map = {auto: f"{flat_name(cls.__module__)}.{cls.__name__}" for auto, cls in classes.items()}
    return sorted(files)


def is_ours(cls: type) -> bool:
    """Whether a class is the package's own, neither a subclass defined elsewhere nor remote code."""
    return cls.__module__.partition(".")[0] == PACKAGE


def registered_classes(config_class: type[PreTrainedConfig]) -> dict[str, type]:
    """The classes of this package that each Auto class makes for `config_class`, `AutoConfig` first."""
    classes: dict[str, type] = {"AutoConfig": config_class}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if name.startswith("Auto") and mapping is not None and config_class in mapping:
            classes[name] = mapping[config_class]
    return {name: cls for name, cls in classes.items() if is_ours(cls)}


def flat_code(classes: Iterable[type]) -> dict[str, str]:
    """The source of the modules of `classes` and of all that they import from this package, by file name.

    Raises:
        ValueError: two modules have the same file name, or an import has no flat form.
    """
    pending = sorted({cls.__module__ for cls in classes})
    modules: dict[str, str] = {}
    files: dict[str, str] = {}
    while pending:
        module = pending.pop()
        name = f"{flat_name(module)}.py"
        if modules.setdefault(name, module) != module:
            raise ValueError(f"{modules[name]} and {module} would both be {name}; rename one of them")
        if name not in files:
            flat, imported = flatten_imports(constants_instead(_source(module), module), module)
            files[name] = (
                f"# {module} of {PACKAGE} {__version__}, made flat for loading with trust_remote_code.\n{flat}"
            )
            pending += imported
    return files


def flatten_imports(source: str, module: str) -> tuple[str, list[str]]:
    """Rewrites the relative imports of a module's source to its own folder.

    Args:
        source: text of the module.
        module: its full name, which relative imports are resolved against.

    Returns:
        The text, and the full names of the modules that it imports.

    Raises:
        ValueError: an import names the package itself, or a package instead of a module in it.
    """
    lines = source.splitlines(keepends=True)
    imported = []
    for node in ast.walk(ast.parse(source)):
        _refuse_absolute_import(node, module)
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        target = resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
        if node.module is None or _is_package(target):
            raise ValueError(f"line {node.lineno} of {module} imports from the package {target}; name the module in it")
        line = lines[node.lineno - 1]
        head, tail = line[: node.col_offset], line[node.col_offset :]
        lines[node.lineno - 1] = head + IMPORT_SOURCE.sub(f"from .{flat_name(target)}", tail, count=1)
        imported.append(target)
    return "".join(lines), imported


def constants_instead(source: str, module: str) -> str:
    """Returns `source`, or what travels in place of a module that reads other files: the values of its constants.

    Transformers fetches Python files only. Such a module names the constants, which are texts, in `FLAT_CONSTANTS`.
    """
    if not FLAT_CONSTANTS.search(source):
        return source
    loaded = import_module(module)
    return "\n".join(_assignment(name, getattr(loaded, name)) for name in loaded.FLAT_CONSTANTS)


def _assignment(name: str, text: str) -> str:
    lines = "".join(f"    {line!r}\n" for line in text.splitlines(keepends=True))
    return f"{name} = (\n{lines})\n"


def _refuse_absolute_import(node: ast.AST, module: str) -> None:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module or ""]
    if any(name.partition(".")[0] == PACKAGE for name in names):
        raise ValueError(f"{module} imports {names[0]}; only relative imports can be made flat")


def _check_what_transformers_sees(path: Path) -> None:
    """Transformers finds imports by pattern and not by syntax: a docstring that shows one would break loading."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    real = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
    if unreal := set(get_relative_imports(path)) ^ real:
        raise ValueError(
            f"Transformers misreads the imports {sorted(map(str, unreal))} of {path.name}; reword that text"
        )


def _is_package(module: str) -> bool:
    spec = find_spec(module)
    return spec is not None and spec.submodule_search_locations is not None


def _source(module: str) -> str:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"the source of {module} is not on this machine, so it cannot travel with a checkpoint")
    return Path(spec.origin).read_text(encoding="utf-8")


def flat_name(module: str) -> str:
    """The path below `configuration` or `modeling`, in one word: `modeling.ops.masking` is `ops_masking`."""
    return "_".join(module.split(".")[2:])
