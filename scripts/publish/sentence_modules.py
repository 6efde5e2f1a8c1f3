"""Models of Sentence Transformers, which make embeddings or scores of the outputs of a model by further modules.

Their folders hold a checkpoint of Transformers, a list of modules, and a folder for each other module, such as pooling.
"""

import re
import reprlib
from pathlib import Path
from typing import Any

from ..common.checkpoint_files import matching_files, read_foreign_json
from ..common.errors import UserError

LIBRARY = "sentence_transformers"
MODULES = "modules.json"
SETTINGS = (MODULES, "config_sentence_transformers.json", "sentence_*_config.json")
CLASSES = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "CrossEncoder")


def module_files(folder: Path) -> list[str]:
    """What a folder holds for Sentence Transformers alone: settings and other modules; nothing if it is no such folder.

    Raises:
        UserError: the list of modules is damaged, or one is elsewhere, or a class is neither of the library nor of
            PyTorch: whoever loads the folder with `trust_remote_code=True` would import it.
    """
    if not (folder / MODULES).is_file():
        return []
    modules = read_foreign_json(folder / MODULES)
    if not isinstance(modules, list) or not modules:
        raise UserError(f"{folder / MODULES} must hold a list of modules; save the model with Sentence Transformers")
    for module in modules:
        _check_module(module, folder)
    if modules[0]["path"] or not modules[0]["type"].endswith("Transformer"):
        raise UserError(f"{folder / MODULES} must begin with the Transformer of the folder itself")
    paths = [module["path"] for module in modules if module["path"]]
    inside = [f"{path}/*.{kind}" for path in paths for kind in ("json", "safetensors")]
    files = matching_files(folder, [*SETTINGS, *inside])
    for name in ("config.json", *(name for name in files if name.endswith(".json"))):
        _check_activations(read_foreign_json(folder / name), folder / name)
    return files


def class_name(folder: Path) -> str:
    """The class of the library that loads a folder, one of `CLASSES`.

    Raises:
        UserError: its settings name another one.
    """
    settings = folder / "config_sentence_transformers.json"
    content = read_foreign_json(settings) if settings.is_file() else {}
    name = content.get("model_type", CLASSES[0]) if isinstance(content, dict) else None
    if name not in CLASSES:
        raise UserError(f"model_type in {settings} is {name!r}; {', '.join(CLASSES)} can be published")
    return str(name)


def _check_module(module: Any, folder: Path) -> None:
    known = isinstance(module, dict) and all(isinstance(module.get(name), str) for name in ("path", "type"))
    if not known or not re.fullmatch(r"|\w[\w.-]*", module["path"]):
        raise UserError(
            f"{folder / MODULES} has {reprlib.repr(module)}; a module has a type, and a folder beside the file"
        )
    if not module["type"].startswith(f"{LIBRARY}."):
        raise UserError(
            f"{folder / MODULES} has a {module['type']}; only modules of Sentence Transformers are published"
        )


def _check_activations(content: Any, path: Path) -> None:
    """Raises UserError if a setting names a function to apply by the place of its class, which is not in PyTorch."""
    if not isinstance(content, dict):
        return
    for name, value in content.items():
        _check_activations(value, path)
        if "activation_f" in name and isinstance(value, str) and "." in value and not value.startswith("torch.nn."):
            raise UserError(f"{name} in {path} is {reprlib.repr(value)}; only classes in torch.nn are published")
