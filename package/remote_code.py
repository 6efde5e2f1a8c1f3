"""The code that travels with a checkpoint: flat files, made from this package, for places where it is not installed.

Transformers loads such code from one folder without sub-packages. So the modules that the classes need are found by
following their imports, and every import is rewritten to a module of the same folder. The classes may also be variants
that somebody else registered, whose modules import this package by name, or models of Transformers with composed heads.
"""

import ast
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_imports
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dynattn import __version__, with_composed_heads
from dynattn.modeling.other_models.composed_classes import composed_name, plain_models

PACKAGE = __name__.partition(".")[0]
# The package in which Transformers puts code that it loads from a checkpoint's folder.
REMOTE = "transformers_modules"
# A module that defines this name is replaced by its constants (see `constants_instead`).
FLAT_CONSTANTS = re.compile(r"^FLAT_CONSTANTS\b", re.MULTILINE)
IMPORT_SOURCE = re.compile(r"from\s+[\w.]+")
# The module with the classes of models of Transformers that have composed heads. Another version may lack some of the
# plain classes.
COMPOSED_MODULE = "modeling_composed"
COMPOSED_HEAD = """\
# Made by {package} {version}, for loading with trust_remote_code.
import transformers

from .{defined_in} import {composed}
"""
COMPOSED_CLASS = """\

if hasattr(transformers, "{plain}"):

    class {name}({composed}(transformers.{plain})):
        pass
"""


class Code(NamedTuple):
    """Code of classes, and the `auto_map` of a configuration that names them."""

    files: dict[str, str]  # the text of each file
    auto_map: dict[str, str]  # MODULE.CLASS by the name of the Auto class that returns it


def write_code(config: PreTrainedConfig, folder: str | Path) -> list[str]:
    """Writes the code of all classes registered for `config` into `folder` and points its `auto_map` at them.

    For a model of Transformers with composed heads, it is the code of the class that `config.architectures` names, and
    of those with other heads.

    Returns:
        The names of the files; none for a configuration class whose code does not travel.

    Raises:
        ValueError: the code of the package cannot be made flat.
    """
    if plain := plain_classes(config):
        code = _code_of_composed({**_with_other_heads(config), **plain})
    elif travels(type(config)):
        code = _code_of_registered(registered_classes(type(config)))
    else:
        return []
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, source in code.files.items():
        Path(folder, name).write_text(source, encoding="utf-8")
        _check_what_transformers_sees(Path(folder, name))
    config.auto_map = code.auto_map
    return sorted(code.files)


def _code_of_registered(classes: dict[str, type]) -> Code:
    """The code of classes whose modules travel, given by the Auto classes that return them."""
    auto_map = {auto: f"{flat_name(cls.__module__)}.{cls.__name__}" for auto, cls in classes.items()}
    return Code(flat_code(classes.values()), auto_map)


def _code_of_composed(plain: dict[str, type]) -> Code:
    """The code of the composed forms of classes of Transformers, given by the Auto classes that return them."""
    composed = with_composed_heads.__name__
    defined_in = flat_name(with_composed_heads.__module__)
    source = COMPOSED_HEAD.format(package=PACKAGE, version=__version__, defined_in=defined_in, composed=composed)
    names = {cls.__name__: composed_name(cls.__name__) for cls in plain.values()}
    source += "".join(COMPOSED_CLASS.format(plain=of, name=name, composed=composed) for of, name in names.items())
    files = {**flat_code([with_composed_heads]), f"{COMPOSED_MODULE}.py": source}
    return Code(files, {auto: f"{COMPOSED_MODULE}.{names[cls.__name__]}" for auto, cls in plain.items()})


def _with_other_heads(config: PreTrainedConfig) -> dict[str, type]:
    """The classes of Transformers for the configuration of a model with composed heads, by the Auto class.

    Without code of theirs, an Auto class would load a plain model and drop the composition. There are none for a
    composition that names its modules, which have other names in these classes.
    """
    if config.composed_heads.get("names") is not None:
        return {}
    known = [(auto, cls) for auto, cls in _auto_classes(type(config)) if root_of(cls) == "transformers"]
    return dict(reversed(known))  # the first of several classes that an Auto class returns


def plain_classes(config: PreTrainedConfig) -> dict[str, type]:
    """For a model with composed heads, its class without them, by each Auto class that returns it.

    Empty if the first one of `config.architectures` is no such class of a model of Transformers.
    """
    wanted = next(iter(config.architectures or ()), None)
    if getattr(config, "composed_heads", None) is None:
        return {}
    return {
        auto: cls
        for auto, cls in _auto_classes(type(config))
        if root_of(cls) == "transformers" and composed_name(cls.__name__) == wanted
    }


def travels(config_class: type[PreTrainedConfig]) -> bool:
    """Whether a configuration's code is written: it is of this package, or a registered variant.

    A variant is a subclass from elsewhere that `AutoConfig` returns for its model type. Code that Transformers loaded
    from a checkpoint is not written here, because Transformers copies such files itself.
    """
    if root_of(config_class) in (PACKAGE, REMOTE):
        return root_of(config_class) == PACKAGE
    is_variant = any(root_of(base) == PACKAGE for base in config_class.__mro__)
    model_type = config_class.model_type
    return is_variant and model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] is config_class


def root_of(cls: type) -> str:
    """The package that a class is defined in."""
    return cls.__module__.partition(".")[0]


def owner_of(config_class: type[PreTrainedConfig]) -> str:
    """The package to import before the Auto classes know a configuration: this one, or the user's own of a variant.

    A module that defines a model imports that of its configuration, but not the other way round.
    """
    if root_of(config_class) == "transformers":
        return PACKAGE
    roots = map(root_of, reversed(registered_classes(config_class).values()))
    return next((root for root in roots if root != PACKAGE), PACKAGE)


def travels_with(name: str, module: str) -> bool:
    """Whether the module `name` travels with `module`: it is of this package, or of the same package or project."""
    root, own = name.partition(".")[0], module.partition(".")[0]
    if root in (PACKAGE, own):
        return True
    return own != PACKAGE and _project_of(own) is not None and _project_of(root) == _project_of(own)


def _project_of(root: str) -> Path | None:
    """The folder that a package, or a module outside of packages, lies in; None where many projects are installed."""
    try:
        spec = find_spec(root)
    except ValueError:  # `__main__` and others that no import has made
        return None
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    place = Path(spec.origin).parents[1 if spec.submodule_search_locations else 0].resolve()
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")}
    return None if place in installed else place


def registered_classes(config_class: type[PreTrainedConfig]) -> dict[str, type]:
    """The classes whose code travels, by the Auto class that returns them for `config_class`; `AutoConfig` first."""
    classes = {"AutoConfig": config_class, **dict(_auto_classes(config_class))}
    return {name: cls for name, cls in classes.items() if travels_with(cls.__module__, config_class.__module__)}


def _auto_classes(config_class: type[PreTrainedConfig]) -> Iterator[tuple[str, type]]:
    """The names of the Auto classes that know `config_class`, and what each returns for it."""
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if name.startswith("Auto") and mapping is not None and config_class in mapping:
            yield from ((name, cls) for cls in plain_models(auto, config_class))


def flat_code(classes: Iterable[type | Callable[..., object]]) -> dict[str, str]:
    """The source of the modules of `classes` and of all that they import from this package or their own, by file name.

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
    """Rewrites imports of all that travels with `module`, this package included, to modules of one folder.

    Args:
        source: text of the module.
        module: its full name, which relative imports are resolved against.

    Returns:
        The text, and the full names of the modules that it imports.

    Raises:
        ValueError: an import has no flat form, because it names a package instead of a module in it.
    """
    lines = source.splitlines(keepends=True)
    imported: list[str] = []
    for node in _statements(ast.parse(source)):
        targets = _imported_modules(node, module)
        if isinstance(node, ast.ImportFrom) and targets:
            _rewrite(lines, node, targets)
            imported += targets
    return "".join(lines), imported


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """What a syntax tree holds besides expressions, which are most of it and have no imports in them."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from _statements(child)


def _imported_modules(node: ast.AST, module: str) -> dict[str, list[ast.alias]]:
    """The names that a statement of `module` imports from modules that travel, by module; empty for other statements.

    Raises:
        ValueError: the statement imports a package, or a whole module (`import MODULE`).
    """
    if isinstance(node, ast.Import):
        whole = [alias.name for alias in node.names if travels_with(alias.name, module)]
        if whole:
            raise ValueError(f"line {node.lineno} of {module} imports {whole[0]}; write `from MODULE import NAME`")
    if not isinstance(node, ast.ImportFrom):
        return {}
    target = resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
    if not travels_with(target, module):
        return {}
    if target == PACKAGE and node.module:
        return _modules_behind_the_package(node)
    if _is_package(target):
        raise ValueError(f"line {node.lineno} of {module} imports from the package {target}; name the module in it")
    return {target: node.names}


def _modules_behind_the_package(node: ast.ImportFrom) -> dict[str, list[ast.alias]]:
    """The modules that define what `from dynattn import ...` imports."""
    targets: dict[str, list[ast.alias]] = {}
    for alias in node.names:
        targets.setdefault(getattr(import_module(PACKAGE), alias.name).__module__, []).append(alias)
    return targets


def _rewrite(lines: list[str], node: ast.ImportFrom, targets: dict[str, list[ast.alias]]) -> None:
    """Replaces the lines of an import by one import from each of `targets`; the length of `lines` stays the same."""
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    head, tail = lines[first][: node.col_offset], lines[first][node.col_offset :]
    if len(targets) == 1:
        [target] = targets
        lines[first] = head + IMPORT_SOURCE.sub(f"from .{flat_name(target)}", tail, count=1)
        return
    imports = [
        f"{head}from .{flat_name(target)} import {', '.join(map(ast.unparse, names))}\n"
        for target, names in targets.items()
    ]
    lines[first:last] = ["".join(imports), *[""] * (last - first - 1)]


def constants_instead(source: str, module: str) -> str:
    """Returns `source`, or for a module that reads other files the values of its constants, as Python source.

    Transformers fetches Python files only, so the other files could not be read. Such a module lists the names of its
    constants, which are strings, in `FLAT_CONSTANTS`.
    """
    if not FLAT_CONSTANTS.search(source):
        return source
    loaded = import_module(module)
    return "\n".join(_assignment(name, getattr(loaded, name)) for name in loaded.FLAT_CONSTANTS)


def _assignment(name: str, text: str) -> str:
    lines = "".join(f"    {line!r}\n" for line in text.splitlines(keepends=True))
    return f"{name} = (\n{lines})\n"


def _check_what_transformers_sees(path: Path) -> None:
    """Raises ValueError if Transformers would find other imports in a file than Python does.

    Transformers searches by regular expression, so an import in a docstring would break loading.
    """
    statements = _statements(ast.parse(path.read_text(encoding="utf-8")))
    real = {node.module for node in statements if isinstance(node, ast.ImportFrom) and node.level}
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
    """A module's name in the flat folder: `ops_masking` for `dynattn.modeling.ops.masking`.

    The names of modules of other packages keep all their words.
    """
    words = module.split(".")
    return "_".join(words[2:] if words[0] == PACKAGE else words)
