"""The configuration of a run's model, new or of a checkpoint, and whether it fits what the arguments ask for."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from dynattn.configuration.composition_config import CompositionConfig
from dynattn.families import family_of
from dynattn.modeling.positions.context_length import context_length

from ..common.arguments import suggest
from ..common.checkpoint_files import check_has_config
from ..common.checkpoint_loading import highest_id, reads_both_ways
from ..common.errors import UserError, in_one_line
from ..common.memory_limits import check_memory
from ..common.special_tokens import start_token_id
from .arguments import PretrainArguments
from .data.position_sampling import check_reads_positions
from .losses import computes_common_loss
from .width_transfer import check_transfer, transfer_config

# For each objective, the Auto class of its models, and the model type that is trained by default.
AUTO_CLASSES: Mapping[str, Any] = {"causal_lm": AutoModelForCausalLM, "masked_lm": AutoModelForMaskedLM}
DEFAULT_MODEL_TYPES = {"causal_lm": "dcformer", "masked_lm": "dcmodernbert"}
DEFAULT_MODEL_SIZE = "tiny"
HEAD_NAMES = {"causal_lm": "causal language model", "masked_lm": "masked language model"}
# A new model's vocabulary is rounded up to a multiple of this: matrix products are fastest with whole tiles.
VOCABULARY_MULTIPLE = 64


def build_config(arguments: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The configuration that the arguments describe, fitted to the tokenizer.

    Raises:
        UserError: the model type, size, a field or its value is not valid, the vocabulary is too small for the
            tokenizer, the sequences are longer than the model's positions, or it cannot do what the arguments ask for
            (carry memory, read sampled positions, keep documents apart).
    """
    needed = highest_id(tokenizer) + 1
    if arguments.init_from:
        config = plan_config(arguments)
        for name, token in _special_tokens(type(config), tokenizer).items():
            setattr(config, name, token)
    else:
        tokens = _special_tokens(_config_class(arguments), tokenizer)
        config = plan_config(arguments, {"vocab_size": pad_vocabulary(needed), **tokens})
    if needed > config.vocab_size:
        of_parent = "give the tokenizer that the model was trained with"
        fix = of_parent if arguments.init_from else "raise it in model_config or give a smaller tokenizer"
        raise UserError(
            f"the tokenizer has {needed} tokens, more than the model's vocab_size={config.vocab_size}; {fix}"
        )
    return config


def pad_vocabulary(needed: int) -> int:
    """The vocabulary of a new model whose tokenizer needs that many embeddings."""
    return -(-needed // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def plan_config(arguments: PretrainArguments, defaults: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The configuration that the arguments describe, without a tokenizer.

    Args:
        defaults: fields of a new model, which those of the arguments override; without them, its vocabulary has the
            default size of the family.

    Raises:
        UserError: as `build_config`, without the tokenizer.
    """
    given = arguments.init_from
    fields = {**(defaults or {}), **arguments.config_overrides}
    config = _load_config(arguments) if given else _new_config(arguments, fields)
    check_transfer(config, arguments.base_width)
    if not given:
        transfer_config(config, arguments.base_width)
    _check_fit(config, arguments)
    return config


def _config_class(arguments: PretrainArguments) -> Any:
    """The configuration class of the model type that the arguments name."""
    default = DEFAULT_MODEL_TYPES[arguments.objective]
    model_type = arguments.model_type or default
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"model_type={model_type} is not known to Transformers or dynattn; {default} is")
    config_class = CONFIG_MAPPING[model_type]
    _check_objective(config_class, arguments.objective, f"model_type={model_type}")
    return config_class


def _check_objective(config_class: type[PreTrainedConfig], objective: str, source: str) -> None:
    """Refuses a model that cannot learn the objective, and says how it is trained."""
    having = [name for name, auto_class in AUTO_CLASSES.items() if config_class in auto_class._model_mapping]
    if objective in having:
        return
    fix = "train it with Transformers' Trainer (docs/guides)"
    if having:
        fix = f"give --objective {having[0]}"
    elif config_class in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        fix = "train it with Transformers' Seq2SeqTrainer (docs/guides/encoder_decoders.md)"
    elif config_class in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        fix = "train it with Transformers' Trainer (docs/guides/vision.md)"
    raise UserError(f"{source} has no {HEAD_NAMES[objective]}, which objective={objective} trains; {fix}")


def _special_tokens(config_class: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """The tokenizer's special tokens, under those names that a configuration has."""
    start, end = start_token_id(tokenizer), tokenizer.eos_token_id
    tokens = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    fields = {field.name for field in dataclasses.fields(config_class)}
    return tokens | {
        name: token for name, token in {"cls_token_id": start, "sep_token_id": end}.items() if name in fields
    }


def _new_config(arguments: PretrainArguments, overrides: dict[str, Any]) -> PreTrainedConfig:
    config_class = _config_class(arguments)
    model_type = config_class.model_type
    fields = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    # Not a field of the configuration: `from_size` replaces a mixer by the fields that it stands for, and models of
    # Transformers keep what `with_composed_heads` was told.
    fields.add("mixer" if issubclass(config_class, CompositionConfig) else "composed_heads")
    if unknown := sorted(set(arguments.config_overrides) - fields):
        hint = suggest(unknown[0], fields)
        raise UserError(
            f"model_config names {unknown}, which {model_type} does not have; {hint}it has {sorted(fields)}"
        )
    size = _choose_size(config_class, arguments.model_size)
    try:
        return config_class(**overrides) if size is None else config_class.from_size(size, **overrides)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise UserError(f"model_config is not valid for {model_type}: {in_one_line(error)}") from error


def _choose_size(config_class: Any, size: str | None) -> str | None:
    """The named size to build, or None for an architecture without named sizes."""
    model_type = config_class.model_type
    if not hasattr(config_class, "from_size"):
        if size:  # empty where an option takes back what a recipe says
            raise UserError(
                f"model_type={model_type} has no named sizes; leave model_size={size} out, or take it back with "
                "--model_size '', and give model_config"
            )
        return None
    chosen = size or DEFAULT_MODEL_SIZE
    if chosen not in config_class.sizes:
        raise UserError(
            f"model_size={chosen} is not a size of {model_type}; choose from {', '.join(config_class.sizes)}"
        )
    return chosen


def _load_config(arguments: PretrainArguments) -> PreTrainedConfig:
    name = str(arguments.init_from)
    if Path(name).is_dir():
        check_has_config(Path(name))
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UserError(f"cannot load init_from={name}: {in_one_line(error)}; give a folder or a Hub name") from error
    _check_objective(type(config), arguments.objective, f"init_from={name}, a {config.model_type},")
    return config


def _check_fit(config: PreTrainedConfig, arguments: PretrainArguments) -> None:
    """Raises UserError for sequences and objectives that are not for this model."""
    if arguments.objective == "causal_lm":
        _check_predicts_next(config)
    limit = context_length(config)
    if limit is not None and arguments.sequence_length > limit:
        others = "" if arguments.init_from else ", or raise the limit in model_config"
        raise UserError(
            f"sequence_length={arguments.sequence_length} is above the model's context of {limit} tokens "
            f"(max_position_embeddings); lower it{others}"
        )
    if arguments.packing == "anchor":
        check_reads_positions(config, "packing=anchor")
    if arguments.carry_memory:
        check_memory(config, arguments.sequence_length)
    if arguments.objective == "masked_lm" and arguments.mask_documents and family_of(config) is None:
        raise mixing_documents(config)


def mixing_documents(config: PreTrainedConfig) -> UserError:
    """The refusal of a model that would ignore `mask_documents`."""
    return UserError(
        f"mask_documents keeps documents apart by positions that restart, and a {config.model_type} does not "
        "read them so; give mask_documents: false (--no_mask_documents)"
    )


def _check_predicts_next(config: PreTrainedConfig) -> None:
    """Raises UserError for models that have a causal class, but would not learn to predict the next token."""
    name = config.model_type
    if not computes_common_loss(AutoModelForCausalLM._model_mapping[type(config)]):
        raise UserError(
            f"the loss of a {name} compares what it predicts at a token with this token itself, not with the next one, "
            "which teaches it to copy; give a model of another type"
        )
    if reads_both_ways(config):
        raise UserError(
            f"a {name} reads each token with those after it, so predicting the next token teaches nothing; give "
            "objective: masked_lm, or is_decoder: true in model_config"
        )
