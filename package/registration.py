"""Makes every family, and models with composed heads, known to the Auto classes of Transformers.

They are known now, or as soon as these classes are imported.

Importing Transformers and the models takes seconds, which `import dynattn` and the command line's help must not take.
So a finder on `sys.meta_path` adds our entries right after a module that defines Auto classes is imported, and an
entry imports its model when it is looked up. The models cannot be imported together with the Auto classes: this would
be circular, because modules that the models need import the Auto classes.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from .families import FAMILIES, Family

# The linear layers that PEFT's LoRA adapts in models of our families if a `LoraConfig` names none.
LORA_TARGETS = ("q_proj", "v_proj")
COMPOSED_CLASSES = "dynattn.modeling.other_models.composed_classes"


class ModelEntries(dict[type, Any]):
    """The registered models of one Auto class by configuration class; those of our families are imported on look-up.

    A value that is a `Family` stands for the class that the family has for `auto_class`.
    """

    def __init__(self, auto_class: str, entries: dict[type, Any]):
        super().__init__(entries)
        self._auto_class = auto_class

    def __getitem__(self, config_class: type) -> Any:
        value = super().__getitem__(config_class)
        return value.load_model_class(self._auto_class) if isinstance(value, Family) else value

    def __iter__(self) -> Iterator[type]:  # a subclass with `__iter__` makes `dict(self)` call `__getitem__`
        return super().__iter__()

    def values(self) -> list[Any]:  # type: ignore[override]
        return [self[config_class] for config_class in self]

    def items(self) -> list[tuple[type, Any]]:  # type: ignore[override]
        return [(config_class, self[config_class]) for config_class in self]


def register_configurations(configuration_auto: ModuleType) -> None:
    """Registers the configuration of every family with `AutoConfig`."""
    for family in FAMILIES.values():
        configuration_auto.AutoConfig.register(family.model_type, family.load_config_class(), exist_ok=True)


def register_models(modeling_auto: ModuleType) -> None:
    """Gives every Auto class of a model an entry for each family that has such a model, without importing it."""
    for family in FAMILIES.values():
        for auto_class in family.heads:
            mapping = getattr(modeling_auto, auto_class)._model_mapping
            if not isinstance(mapping._extra_content, ModelEntries):
                mapping._extra_content = ModelEntries(auto_class, mapping._extra_content)
            mapping.register(family.load_config_class(), family, exist_ok=True)


def find_composed_classes(auto_factory: Any) -> None:
    """Makes Auto classes return a class with composed heads where the configuration has `composed_heads`.

    Such a configuration names the class of a model of Transformers with a prefix, by which Auto classes do not know it.
    Some of them make a model of the part of a configuration that is for texts.
    """
    find = auto_factory._get_model_class

    def find_class(config: Any, models: Any) -> Any:
        parts = (config, getattr(config, "text_config", None))
        if all(getattr(part, "composed_heads", None) is None for part in parts):
            return find(config, models)
        return import_module(COMPOSED_CLASSES).composing_class(find, config, models)

    if find.__module__ != __name__:
        auto_factory._get_model_class = find_class


def make_composed_models(modeling_utils: Any) -> None:
    """Makes all classes of models compose heads where the configuration has `composed_heads`.

    Also the plain one that a model has in Transformers, which many models call themselves for their parts, and users to
    load a checkpoint.
    """
    plain_class = modeling_utils.PreTrainedModel

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = args[0] if args else kwargs.get("config")
        if getattr(config, "composed_heads", None) is not None:
            cls = import_module(COMPOSED_CLASSES).with_own_options(cls)
        # A user's class may have other bases, whose `__new__` may read the arguments.
        following = super(plain_class, cls).__new__
        # Python calls the `__init__` of the class that this object has.
        return following(cls) if following is object.__new__ else following(cls, *args, **kwargs)

    if "__new__" not in vars(plain_class):
        plain_class.__new__ = staticmethod(make)  # `DataParallel` calls that of an object


def name_lora_targets(constants: ModuleType) -> None:
    """Adds the layers that LoRA adapts to PEFT's tables, which have them for Transformers' own families.

    Every method has a table of its own; some of them adapt other layers.
    """
    tables = [table for name, table in vars(constants).items() if name.endswith("_TARGET_MODULES_MAPPING")]
    as_lora = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["llama"]
    for targets in tables:
        if targets.get("llama") == as_lora:
            for model_type in FAMILIES:
                targets.setdefault(model_type, list(LORA_TARGETS))


def keep_code(portable_config: ModuleType) -> None:
    """Makes configurations write the code of their classes beside them when they are saved (see `remote_code`)."""
    portable_config.PortableConfig.code_writer = _write_code


def _write_code(config: Any, folder: Path) -> list[str]:
    """`write_code`, imported only when it is called: it needs all of Transformers' Auto classes."""
    return import_module("dynattn.remote_code").write_code(config, folder)


# What to do with a module right after its import.
ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    "dynattn.configuration.portable_config": keep_code,
    "peft.utils.constants": name_lora_targets,
    "transformers.modeling_utils": make_composed_models,
    "transformers.models.auto.auto_factory": find_composed_classes,
    "transformers.models.auto.configuration_auto": register_configurations,
    "transformers.models.auto.modeling_auto": register_models,
}


class ActionFinder(MetaPathFinder):
    """Finds the modules of `pending` as the other finders do, but with a loader that does their actions.

    After the last action it removes itself from `sys.meta_path`.
    """

    def __init__(self, pending: set[str]):
        self.pending = pending

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.pending:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path) if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader = ActionLoader(spec.loader, self)
        return spec

    def finish(self, module: ModuleType) -> None:
        """Does the action of a module that was just executed; after an error it is still pending."""
        ACTIONS[module.__name__](module)
        self.pending.discard(module.__name__)
        if not self.pending and self in sys.meta_path:
            sys.meta_path.remove(self)


class ActionLoader(Loader):
    """Loads a module as its own loader does, then does its action. The module keeps its own loader."""

    def __init__(self, loader: Loader, finder: ActionFinder):
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        """All other methods are those of the module's own loader, for code that uses the spec without an import."""
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.finish(module)


def register_with_transformers() -> None:
    """Does the actions of modules that are imported already, and installs a finder that does the others."""
    finder = ActionFinder({name for name in ACTIONS if name not in sys.modules})
    sys.meta_path[:] = [other for other in sys.meta_path if not isinstance(other, ActionFinder)]
    if finder.pending:
        sys.meta_path.insert(0, finder)
    for name in ACTIONS.keys() - finder.pending:
        ACTIONS[name](import_module(name))  # waits for a thread that is importing the module
