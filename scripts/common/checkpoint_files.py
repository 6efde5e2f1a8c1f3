"""The files of a checkpoint folder that a user named: finding and reading them, and refusing what is no checkpoint.

A folder may come from anywhere, so nothing in it is trusted: not its links, its JSON, or its sizes.
"""

import hashlib
import json
import reprlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .atomic_file import write_json
from .errors import UserError
from .folder_names import follow_links, may_be_on_the_hub

# The files that can name code beside the weights, by which Transformers would load tokenizers and processors.
TOKENIZER_CONFIG = "tokenizer_config.json"
PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json")
# Path patterns in a checkpoint folder: files of the tokenizer, and what else is copied along with the weights.
TOKENIZER_PATTERNS = (
    *("tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "*.model", "*.spm", "target_vocab.json", "*.tiktoken", "tekken.json"),
    *("*.jinja", "additional_chat_templates/*.jinja"),
)
COMPANION_PATTERNS = ("generation_config.json", *PROCESSOR_CONFIGS, "LICENSE*", "NOTICE*")
# Fields of configurations, at any depth, that name code for Transformers to load.
NAMES_OF_CODE = ("auto_map", "custom_pipelines")
# What Transformers, the Hub and the jobs of this package also write into the folder of a model or of its graphs.
WRITTEN_PATTERNS = (
    *(*TOKENIZER_PATTERNS, *COMPANION_PATTERNS, "config.json", "*.safetensors", "*.safetensors.index.json", "*.py"),
    *("README.md", ".gitattributes", "*.bin", "*.bin.index.json", "export.json", "*.pt2", "*.onnx", "*.onnx.data"),
    *("*.xml", "*.pte", "*.png", "*.svg", "__pycache__/*", ".cache/huggingface/**/*"),
)
# In a folder with this file Transformers loads the base model that the file names, which may be anywhere.
ADAPTER = "adapter_config.json"
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Names that any checkpoint format has for the number of layers, and for sizes that are, or divide, a tensor dimension.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
WIDTHS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("dim", "n_head", "vocab", "d_model", "d_ff", "heads"),
)
# Limits of JSON files: levels of nested lists and objects, and the largest 64-bit integer, as tensors hold no larger.
DEEPEST, LARGEST = 64, 2**63 - 1


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of `config.json`. A `generation_config.json` beside it, which jobs copy, is checked, too.

    Raises:
        UserError: the folder, or a file, is missing or damaged, or the model is quantized or an adapter.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist (a model on the Hub must be downloaded first)"
        raise UserError(f"{folder} {what}; give the folder of a checkpoint")
    refuse_adapter(folder)
    check_has_config(folder)
    content = _read_object(folder / "config.json")
    check_fields(content)
    if (generation := folder / "generation_config.json").is_file():
        _check_token_ids(generation)
    return content


def refuse_adapter(folder: Path) -> None:
    """Raises UserError if PEFT wrote an adapter into the folder."""
    if (folder / ADAPTER).exists():
        raise UserError(f"{folder} holds an adapter ({ADAPTER}); merge it into its model, and save that")


def check_has_config(folder: Path) -> None:
    """Raises UserError if a folder has no `config.json`: one of an adapter alone, or of a `dynattn pretrain` run.

    The latter has its model in its folder `model`.
    """
    if (folder / "config.json").is_file():
        return
    refuse_adapter(folder)
    what = "has no config.json" if any(folder.iterdir()) else "is empty"
    model = folder / "model"
    fix = f"the model of this run is in {model}" if (model / "config.json").is_file() else "give that of a checkpoint"
    raise UserError(f"the folder {folder} {what}; {fix}")


def check_fields(config: Mapping[str, Any]) -> None:
    """Raises UserError if a field of `config.json` that configuration classes do not check has an impossible value."""
    for name in ("dtype", "torch_dtype"):
        if config.get(name) is not None and config[name] not in DTYPES:
            raise UserError(_impossible(config, name, f"it can be {', '.join(DTYPES)}"))
    if config.get("quantization_config") is not None:
        needed = "quantized weights are not supported; take the checkpoint that they were made from"
        raise UserError(_impossible(config, "quantization_config", needed))
    if not isinstance(config.get("model_type", ""), str):
        raise UserError(_impossible(config, "model_type", "it must be text"))
    architectures = config.get("architectures") or []
    if not (isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)):
        raise UserError(_impossible(config, "architectures", "it must be a list of class names"))
    for name, value in config.items():
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(_impossible(config, name, f"integers go up to {LARGEST}"))


def check_sizes(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuses sizes in `config.json` that no model with these tensors can have, before such a model is built.

    Every layer has a tensor of its own, and no width exceeds the longest dimension of a tensor.

    Args:
        config: content of `config.json`, of any format.
        shapes: of the tensors in the weight files, by name.

    Raises:
        UserError: a size is not positive, or too large.
    """
    longest = max((length for shape in shapes.values() for length in shape), default=0)
    bounds = dict.fromkeys(LAYERS, (len(shapes), "tensors there are"))
    bounds |= dict.fromkeys(WIDTHS, (longest, "the longest dimension of a tensor"))
    for name, (limit, what) in bounds.items():
        if type(config.get(name)) is int and not 1 <= config[name] <= limit:
            needed = f"with these weights it must be positive and at most {limit} ({what})"
            raise UserError(_impossible(config, name, f"{needed}; use the configuration that belongs to the weights"))


def read_foreign_json(path: Path) -> Any:
    """Returns the content of a JSON file in a checkpoint folder.

    Raises:
        UserError: it is a link to a file elsewhere, cannot be read, is not JSON, or is nested too deeply.
    """
    require_inside(path)
    too_deep = UserError(f"{path} is nested more than {DEEPEST} levels deep; copy or save the checkpoint again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if _depth(content) > DEEPEST:
        raise too_deep
    return content


def matching_files(folder: Path, patterns: Iterable[str]) -> list[str]:
    """The sorted paths, relative to `folder`, of the files in it that match one of `patterns`, code excepted.

    Raises:
        UserError: one is a link to a file elsewhere, or in such a folder.
    """
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file() and path.suffix != ".py"}
    return sorted(require_inside(path, folder).relative_to(folder).as_posix() for path in found)


def copy_files(names: Iterable[str], source: Path, destination: Path) -> None:
    """Copies the files that `matching_files` has found in the folder `source`, and the sub-folders that they are in.

    Configurations of tokenizers and processors are copied without what points elsewhere, see `forget_places`.

    Raises:
        UserError: such a configuration is no JSON, or is nested too deeply.
    """
    for name in names:
        (destination / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, destination / name)
        if name in (TOKENIZER_CONFIG, *PROCESSOR_CONFIGS):
            forget_places(source / name, destination / name)


def _read_object(path: Path) -> dict[str, Any]:
    content = read_foreign_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold an object, not a {type(content).__name__}")
    return content


def _check_token_ids(path: Path) -> None:
    """Refuses tokens in a `generation_config.json` that are no numbers, which Transformers itself does not check."""
    for name, value in _read_object(path).items():
        tokens = value if isinstance(value, list) else [value]
        if name.endswith("_token_id") and not all(token is None or type(token) is int for token in tokens):
            raise UserError(f"{path}: {name} ({value!r}) must be the number of a token, or a list of such numbers")


def forget_places(path: Path, copy: Path) -> None:
    """Takes what points elsewhere out of the copy of a configuration.

    This is `name_or_path`, a path on some machine that old versions of Transformers wrote, unless it is a name on the
    Hub. And it is the names of code files, which are not copied.

    Raises:
        UserError: it is no JSON, or is nested too deeply.
    """
    content = _read_object(path)
    kept = without_code(content)
    if not may_be_on_the_hub(str(kept.get("name_or_path", ""))):
        kept.pop("name_or_path", None)
    if kept != content:
        write_json(copy, kept)


def without_code(content: Any) -> Any:
    """What `read_foreign_json` returned, without the names of code that Transformers would load."""
    if isinstance(content, dict):
        return {name: without_code(value) for name, value in content.items() if name not in NAMES_OF_CODE}
    return list(map(without_code, content)) if isinstance(content, list) else content


def weights_sha256(folder: Path) -> str | None:
    """A digest of the weights in a folder; None where there are none, as for the name of a model on the Hub."""
    whole = hashlib.sha256()
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())  # a pipe would never end
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest() if files else None


def file_sizes(folder: Path) -> dict[str, int]:
    """The bytes of all files in `folder` and its sub-folders, by their sorted relative paths."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def require_inside(path: Path, folder: Path | None = None) -> Path:
    """Returns `path` if, with links followed, it lies in `folder`, which is the folder that contains it by default.

    In the Hub's cache a snapshot's files are links to blobs outside the snapshot; these are allowed.

    Raises:
        UserError: it is another link that leaves the folder.
    """
    folder = (folder or path.parent).resolve()
    try:
        target = follow_links(path)
    except OSError as error:
        raise UserError(f"{path} is a link that leads nowhere: {error.strerror}; put the file itself there") from error
    if not target.is_relative_to(_hub_repository(folder) or folder):
        raise UserError(f"{path} is a link to {target}, outside the checkpoint's folder; put the file itself there")
    return path


def _hub_repository(folder: Path) -> Path | None:
    """The folder `models--*` of the Hub's cache if `folder` is a snapshot in it, whose files are links to blobs."""
    for parent in (folder, *folder.parents):
        repository = parent.parent.parent
        if parent.parent.name == "snapshots" and repository.name.startswith("models--"):
            return repository
    return None


def _depth(content: Any) -> int:
    """Levels of lists and objects in JSON, counting the innermost values as a level: `1` has one, `[1]` two."""
    depth, level = 0, [content]
    while level:
        lists = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        depth, level = depth + 1, [child for children in lists for child in children]
    return depth


def _impossible(config: Mapping[str, Any], name: str, needed: str) -> str:
    """What is wrong with a field of `config.json`, in one line."""
    return f"{name} in config.json is {reprlib.repr(config[name])}; {needed}"
