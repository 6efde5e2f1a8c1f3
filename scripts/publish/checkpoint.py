"""Reads the checkpoint that is to be published, and refuses one that could not work anywhere else."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from dynattn.families import FAMILIES, Family
from dynattn.remote_code import registered_classes

from ..common.checkpoint_files import COMPANION_PATTERNS, TOKENIZER_PATTERNS, read_config
from ..common.errors import UserError, last_line
from .weights import Weights, read_weights

PICTURES = ("*.png", "*.svg")  # of the card


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder of one of our families, whose configuration, weight files and tokenizer were found sound."""

    folder: Path
    config: PreTrainedConfig
    auto_class: str  # the Auto class of its architecture, such as "AutoModelForCausalLM"
    model_class: type
    weights: Weights
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def family(self) -> Family:
        """The family of its configuration."""
        return FAMILIES[self.config.model_type]

    @property
    def files_to_copy(self) -> list[str]:
        """What is published as it is: weights, tokenizer, generation configuration, license, pictures of the card."""
        patterns = (*COMPANION_PATTERNS, *PICTURES, *(TOKENIZER_PATTERNS if self.tokenizer else ()))
        found = {path.name for pattern in patterns for path in self.folder.glob(pattern) if path.is_file()}
        return [*self.weights.files, *sorted(found - set(self.weights.files))]


def read_checkpoint(path: str) -> Checkpoint:
    """Reads everything but the weights themselves.

    Raises:
        UserError: something is missing, damaged, or not of this package.
    """
    folder = Path(path).resolve()
    config_class = _find_config_class(read_config(folder), folder)
    try:
        config = config_class.from_pretrained(folder)
    except (StrictDataclassError, ValueError, TypeError, OSError) as error:
        raise UserError(
            f"{folder / 'config.json'} is not a valid {config_class.__name__}: {last_line(error)}"
        ) from error
    auto_class, model_class = _find_model_class(config, folder)
    tokenizer = _load_tokenizer(folder)
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens but the model embeds {config.vocab_size}; "
            "put the tokenizer there that the model was trained with"
        )
    return Checkpoint(folder, config, auto_class, model_class, read_weights(folder), tokenizer)


def _find_config_class(config: dict[str, Any], folder: Path) -> type[PreTrainedConfig]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(f"{folder} holds a model of type {model_type!r}; only {', '.join(FAMILIES)} can be published")
    return FAMILIES[model_type].load_config_class()


def _find_model_class(config: PreTrainedConfig, folder: Path) -> tuple[str, type]:
    registered = registered_classes(type(config))
    by_name = {cls.__name__: (auto, cls) for auto, cls in registered.items() if auto != "AutoConfig"}
    architecture = next(iter(config.architectures or ()), None)
    if architecture not in by_name:
        raise UserError(
            f"the architecture {architecture!r} in {folder / 'config.json'} is none of {', '.join(sorted(by_name))}; "
            "save the model with `save_pretrained`"
        )
    return by_name[architecture]


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not any(path.is_file() for pattern in TOKENIZER_PATTERNS for path in folder.glob(pattern)):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        raise UserError(f"the tokenizer in {folder} does not load: {last_line(error)}") from error
