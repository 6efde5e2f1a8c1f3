"""Registers every family with the Auto classes of Transformers: at once, or as soon as Transformers is imported.

Importing Transformers' models takes seconds, which `import dynattn` and the command line's help must not. Where
Transformers is not imported yet, a finder therefore waits for its import on `sys.meta_path`.

Why the import of the package `transformers` is the right moment: a package is imported before its modules, so none of
them is half imported while the families are. After a module of Transformers, such as `modeling_auto`, that would not
hold, because modules that the families need import it themselves. For the same reason importing one of this package's
own folders by its path imports Transformers before any module of that folder.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from .families import FAMILIES

OWN_FOLDERS = ("dynattn.configuration", "dynattn.modeling")


def register_families() -> None:
    """Registers configurations and models with the Auto classes, as often as it is called with the same result."""
    transformers = import_module("transformers")
    for family in FAMILIES.values():
        config_class = family.load_config_class()
        transformers.AutoConfig.register(family.model_type, config_class, exist_ok=True)
        for auto_class, model_class in family.load_model_classes().items():
            getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)
    # What was loaded from a folder with code is saved with code.
    import_module("dynattn.configuration.portable_config").PortableConfig.code_writer = _write_code


def register_with_transformers() -> None:
    """Registers the families now if Transformers is imported, else right after it will have been."""
    if "transformers" in sys.modules:
        register_families()
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class RegistrationFinder(MetaPathFinder):
    """Finds Transformers, and this package's folders, as the other finders do, but with a `RegistrationLoader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers" and fullname not in OWN_FOLDERS:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path) if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader = RegistrationLoader(spec.loader)
        return spec


class RegistrationLoader(Loader):
    """Loads a package as its own loader does, then registers the families. The module keeps its own loader."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        """Whoever asks for the specification without importing the package finds all methods of its loader."""
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if module.__name__ == "transformers":
            _register_and_leave()
        else:
            import_module("transformers")


def _register_and_leave() -> None:
    """Registers and stops waiting. After an error the finder waits again, so that the next import tells it, too."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    try:
        register_families()
    except BaseException:
        sys.meta_path.insert(0, _finder)
        raise


def _write_code(config: Any, folder: Path) -> list[str]:
    """`write_code`, imported when a checkpoint with code is saved: that module may be what imports Transformers."""
    return import_module("dynattn.remote_code").write_code(config, folder)


_finder = RegistrationFinder()
