"""Reads the checkpoint to publish, and refuses one that would not work elsewhere."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dynattn.families import FAMILIES, family_of
from dynattn.modeling.other_models.composed_classes import with_composed_heads
from dynattn.remote_code import plain_classes, registered_classes, root_of, travels

from ..common.checkpoint_files import COMPANION_PATTERNS, TOKENIZER_PATTERNS, check_sizes, matching_files, read_config
from ..common.checkpoint_loading import highest_id
from ..common.errors import UserError, last_line, refusal_of
from ..common.folder_names import resolve_folder
from ..common.weight_files import WEIGHTS, WEIGHTS_INDEX, StoredTensor, check_places, find_weight_files, read_header
from .sentence_modules import class_name, module_files

PICTURES = ("*.png", "*.svg")  # of the card
# The main inputs of models that `probe` can measure.
INPUTS = ("input_ids", "pixel_values")
# The task of a model is that of the first Auto class here that returns it; BART's of translation fills masks, too.
TASKS = {
    "AutoModelForSeq2SeqLM": "translation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForVisualQuestionAnswering": "visual-question-answering",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForZeroShotImageClassification": "zero-shot-image-classification",
    "AutoModelForImageSegmentation": "image-segmentation",
    "AutoModelForSemanticSegmentation": "image-segmentation",
    "AutoModelForObjectDetection": "object-detection",
    "AutoModelForDepthEstimation": "depth-estimation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose configuration, weights and tokenizer were checked.

    It is of one of this package's families, or of a model of Transformers with composed heads.
    """

    folder: Path
    config: PreTrainedConfig
    auto_class: str  # the Auto class of its architecture, such as "AutoModelForCausalLM"
    model_class: type[PreTrainedModel]
    plain_class: type | None  # what `model_class` adds composed heads to, in a model of Transformers
    elements: Counter[str]  # of the parameters, by dtype; each of tied ones counts once
    tokenizer: PreTrainedTokenizerBase | None
    sentence_class: str | None  # of Sentence Transformers, if it is a model of that library
    files_to_copy: list[str]  # what is published unchanged: weights, tokenizer, license, pictures of the card ...

    @property
    def reads(self) -> str:
        """The main input of its model, one of `INPUTS`."""
        return self.model_class.main_input_name

    @property
    def paper(self) -> str:
        """The identifier on arXiv of what introduced its architecture.

        Raises:
            UserError: its configuration is a registered one that derives from no family of this package.
        """
        if self.plain_class is not None:
            return FAMILIES["dcformer"].paper
        family = family_of(self.config)
        if family is None:
            made_of = ", ".join(FAMILIES)
            raise UserError(f"{type(self.config).__name__} is a variant of none of {made_of}; only these are published")
        return family.paper


def read_checkpoint(path: str) -> Checkpoint:
    """Reads everything but the contents of the weights.

    Raises:
        UserError: something is missing, damaged, or not of this package.
    """
    folder = resolve_folder(path)
    raw = read_config(folder)
    config_class = _find_config_class(raw, folder)
    weight_files, tensors = _read_headers(folder)
    check_sizes(raw, {name: tensor.shape for name, tensor in tensors.items()})
    try:
        config = config_class.from_pretrained(folder)
    except Exception as error:  # Transformers checks few fields, so bad values raise errors of many types
        raise UserError(
            f"{folder / 'config.json'} is not a valid {config_class.__name__}: {refusal_of(error)}"
        ) from error
    auto_class, model_class, plain_class = _find_model_class(config, folder)
    if model_class.main_input_name not in INPUTS:
        raise UserError(
            f"{model_class.__name__} reads {model_class.main_input_name}, and only models that read "
            f"{' or '.join(INPUTS)} can be verified; its own `push_to_hub` needs no code: dynattn.with_composed_heads "
            "loads it"
        )
    tokenizer = _load_tokenizer(folder, rows=getattr(config.get_text_config(), "vocab_size", 0))
    patterns = (*COMPANION_PATTERNS, *PICTURES, *(TOKENIZER_PATTERNS if tokenizer is not None else ()))
    modules = module_files(folder)
    files = list(dict.fromkeys([*weight_files, *matching_files(folder, patterns), *modules]))
    others = _no_parameters(model_class, config, folder)
    elements = Counter[str]()
    for name, tensor in tensors.items():
        if name not in others:
            elements[tensor.dtype] += math.prod(tensor.shape)
    sentence_class = class_name(folder) if modules else None
    return Checkpoint(folder, config, auto_class, model_class, plain_class, elements, tokenizer, sentence_class, files)


def _read_headers(folder: Path) -> tuple[list[str], dict[str, StoredTensor]]:
    """Finds the weights as Transformers does; returns their files, an index included, and what headers say of tensors.

    Raises:
        UserError: there are no weights, or a file is missing, damaged, a link to elsewhere or not what its index says.
    """
    if not (folder / WEIGHTS).is_file() and not (folder / WEIGHTS_INDEX).is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.safetensors") for path in folder.glob(pattern))
        found = f" (there is {others[0]})" if others else ""
        raise UserError(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}{found}; write them with `save_pretrained`")
    files, placed = find_weight_files(folder)
    headers = {path: read_header(path) for path in files}
    check_places(headers, placed)
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    return [*(path.name for path in files), *([WEIGHTS_INDEX] if placed else [])], tensors


def _no_parameters(model_class: type[PreTrainedModel], config: PreTrainedConfig, folder: Path) -> set[str]:
    """The names of what weight files may hold besides parameters.

    These are buffers, such as the bias by which DeepSeek-V3 balances its experts, and the copies of the embedding that
    a model with a tied head makes by itself, which some trainers also write.

    Raises:
        UserError: the configuration makes no model.
    """
    try:
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # bad values raise errors of many types
        raise UserError(f"{folder} does not load: {refusal_of(error)}") from error
    is_tied = getattr(config, "tie_word_embeddings", False)
    copies = (is_tied and getattr(model_class, "_tied_weights_keys", None)) or {}
    return {name for name, _ in model.named_buffers()}.union(copies)


def _find_config_class(raw: Mapping[str, Any], folder: Path) -> type[PreTrainedConfig]:
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        known = CONFIG_MAPPING[model_type]
        composed = raw.get("composed_heads") is not None and root_of(known) == "transformers"
        if composed or travels(known):
            return known
    raise UserError(
        f"{folder} holds a model of type {model_type!r}; only {', '.join(FAMILIES)} can be published, variants of them "
        "that a module registers (name it with --import), and models of Transformers with composed heads"
    )


def _find_model_class(config: PreTrainedConfig, folder: Path) -> tuple[str, type[PreTrainedModel], type | None]:
    """The Auto class of the architecture, its class, and the class to which that one adds composed heads."""
    if plain := plain_classes(config):
        without_task = min(plain, key="AutoModelForPreTraining".__eq__)  # any other one is better
        auto_class = next((name for name in TASKS if name in plain), without_task)
        return auto_class, with_composed_heads(plain[auto_class]), plain[auto_class]
    registered = registered_classes(type(config)) if travels(type(config)) else {}
    by_name = {cls.__name__: (auto, cls) for auto, cls in registered.items() if auto != "AutoConfig"}
    architecture = next(iter(config.architectures or ()), None)
    if architecture not in by_name:
        composed = "those that dynattn.with_composed_heads makes of what an Auto class of Transformers returns"
        known = ", ".join(sorted(by_name)) or composed
        raise UserError(
            f"the architecture {architecture!r} in {folder / 'config.json'} is none of {known}; give a model of one of "
            "these classes, saved by its `save_pretrained`"
        )
    return (*by_name[architecture], None)


def _load_tokenizer(folder: Path, rows: int) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder, if there is one, of a model that embeds `rows` tokens."""
    if not matching_files(folder, TOKENIZER_PATTERNS):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        raise UserError(f"the tokenizer in {folder} does not load: {last_line(error)}") from error
    if (highest := highest_id(tokenizer)) >= rows:
        raise UserError(
            f"the tokenizer in {folder} has ids up to {highest} but the model embeds {rows}; "
            "put the tokenizer there that the model was trained with"
        )
    return tokenizer
