"""Writes out what Transformers derives from the model type in `config.json`, because the result has another type.

From the type Transformers derives the class of a tokenizer or an image processor whose own files name none. If there is
no file of generation settings, it reads them from `config.json`, and our configurations do not have all of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoImageProcessor, AutoTokenizer, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from ...common.atomic_file import write_json
from ...common.builtin_corpus import builtin_documents
from ...common.checkpoint_files import TOKENIZER_PATTERNS, matching_files, read_config, read_foreign_json
from ...common.checkpoint_loading import quiet_loading
from ...common.errors import UserError, first_line

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Preprocessor:
    """What prepares the inputs of a model, and where its class is named.

    Attributes:
        word: what it is called in messages.
        patterns: patterns of its files' names.
        file: the file that names its class.
        field: the field of that file that has the name.
        behaviour: loads it from a folder, and returns the name of its class and what else must stay the same.
        default: returns the name of the class that a model type stands for; None if it stands for none.
    """

    word: str
    patterns: tuple[str, ...]
    file: str
    field: str
    behaviour: Callable[[Path], tuple[str, Any]]
    default: Callable[[str], str | None]


def write_preprocessors(source: Path, written: Path) -> Iterator[str]:
    """Names the classes with which the tokenizer and the image processor of `source` load; yields warnings.

    Args:
        source: the folder that was read.
        written: the result, with their files and a `config.json` of another model type.

    Raises:
        UserError: one of them would behave differently in the result.
    """
    for kind in (TOKENIZER, IMAGE_PROCESSOR):
        if matching_files(source, kind.patterns):
            yield from _write_class(kind, source, written)


def write_generation_settings(source: Path, written: Path) -> None:
    """Writes the settings of generation that `config.json` in `source` holds and the one in `written` does not."""
    if (written / GENERATION).exists():
        return
    theirs, ours = (_generation_settings(folder) for folder in (source, written))
    if theirs != ours:
        write_json(written / GENERATION, theirs)


def _write_class(kind: Preprocessor, source: Path, written: Path) -> Iterator[str]:
    try:
        theirs = kind.behaviour(source)
    except Exception:  # tokenizers raises bare Exception, and a package may be missing
        yield from _write_default_class(kind, source, written)
        return
    if _behaves_as(kind, written, theirs):
        return
    _name_class(kind, written, theirs[0])
    if not _behaves_as(kind, written, theirs):
        raise UserError(
            f"the {kind.word} in {source} is a {theirs[0]}, and beside a model of the new type it would behave "
            "differently; load it and save it there with `save_pretrained`"
        )


def _write_default_class(kind: Preprocessor, source: Path, written: Path) -> Iterator[str]:
    """Where the files of `source` do not load: names the class that its model type stands for, if they name none."""
    default = kind.default(read_config(source).get("model_type", ""))
    if default is not None and not _content(kind, source).get(kind.field):
        _name_class(kind, written, default)
    try:
        kind.behaviour(written)
    except Exception as error:  # for the same reasons
        yield f"the {kind.word} was copied but does not load here: {first_line(error)}"


def _behaves_as(kind: Preprocessor, folder: Path, theirs: tuple[str, Any]) -> bool:
    try:
        return kind.behaviour(folder) == theirs
    except Exception:  # without a name it may be tried with a class that cannot read the files at all
        return False


def _name_class(kind: Preprocessor, written: Path, name: str) -> None:
    write_json(written / kind.file, {**_content(kind, written), kind.field: name})


def _content(kind: Preprocessor, folder: Path) -> dict[str, Any]:
    """The content of the file that may name the class; empty where there is none, or it holds something else."""
    path = folder / kind.file
    content = read_foreign_json(path) if path.exists() else {}
    return content if isinstance(content, dict) else {}


def _tokenizer_behaviour(folder: Path) -> tuple[str, Any]:
    text = " ".join(builtin_documents("validation"))[:2000]
    with quiet_loading():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        ids = tokenizer(text).input_ids
    return type(tokenizer).__name__, (ids, tokenizer.special_tokens_map, tokenizer.chat_template)


def _default_tokenizer(model_type: str) -> str | None:
    """Transformers' table has None where the class needs a package that is not installed; its name says the family."""
    if model_type not in TOKENIZER_MAPPING_NAMES:
        return None
    conventional = CONFIG_MAPPING_NAMES[model_type].removesuffix("Config") + "Tokenizer"
    return TOKENIZER_MAPPING_NAMES[model_type] or (conventional if hasattr(transformers, conventional) else None)


def _image_processor_behaviour(folder: Path) -> tuple[str, Any]:
    with quiet_loading():
        settings = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False).to_dict()
    settings.pop("auto_map", None)  # names of code do not go along
    return settings.pop("image_processor_type"), settings


def _default_image_processor(model_type: str) -> str | None:
    return IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {}).get("torchvision")


def _generation_settings(folder: Path) -> dict[str, Any]:
    """What Transformers reads from the `config.json` in `folder` where there is no other file."""
    settings = GenerationConfig.from_model_config(read_config(folder)).to_diff_dict()
    return {name: value for name, value in settings.items() if name != "transformers_version" and name[0] != "_"}


TOKENIZER = Preprocessor(
    word="tokenizer",
    patterns=TOKENIZER_PATTERNS,
    file="tokenizer_config.json",
    field="tokenizer_class",
    behaviour=_tokenizer_behaviour,
    default=_default_tokenizer,
)
IMAGE_PROCESSOR = Preprocessor(
    word="image processor",
    patterns=("preprocessor_config.json",),
    file="preprocessor_config.json",
    field="image_processor_type",
    behaviour=_image_processor_behaviour,
    default=_default_image_processor,
)
