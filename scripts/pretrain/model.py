"""The model of a run: fresh weights from a configuration, or the weights of a checkpoint."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from dynattn import keep_attention_outputs  # importing dynattn registers its model types
from dynattn.families import family_of
from dynattn.modeling.common.activation_checkpointing import checkpoint_activations
from dynattn.modeling.common.decoder_heads import CausalLMHead
from dynattn.modeling.layers.differential_heads import DifferentialHeads
from dynattn.modeling.layers.head_composition import DynamicComposition
from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS, default_implementation
from dynattn.modeling.ops.dcmha.triton.kernels.registry import load_kernels
from dynattn.modeling.other_models.interface_attention import check_makes_masks

from ..common.checkpoint_loading import check_composed, check_loaded
from ..common.errors import UserError, in_one_line, refusal_of
from .arguments import PretrainArguments
from .document_leaks import check_keeps_documents_apart
from .model_config import AUTO_CLASSES
from .width_transfer import scale_initial_weights


@dataclass(frozen=True)
class ParameterCounts:
    """Number of parameters: all of them, and all but the token embeddings and the output head."""

    total: int
    non_embedding: int


def build_model(arguments: PretrainArguments, config: PreTrainedConfig, *, on_meta: bool = False) -> PreTrainedModel:
    """The model with float32 weights, in training mode; new weights depend on torch's random state.

    Args:
        on_meta: build the model on the meta device, without weights; the engine sends it those of another process.

    Raises:
        UserError: the weights cannot be loaded, or the model lacks what the arguments ask for.
    """
    try:
        model = _load_or_initialize(arguments, config, on_meta)
        if not arguments.init_from:
            scale_initial_weights(model, arguments.base_width)
        checkpoint_activations_if_asked(model, arguments)
        if arguments.mask_documents and family_of(config) is None and not on_meta:
            check_keeps_documents_apart(model, arguments)
    except (OSError, ValueError, TypeError, ImportError, RuntimeError, SafetensorError) as error:
        source = arguments.init_from or config.model_type
        reason = refusal_of(error) if isinstance(error, SafetensorError) else in_one_line(error)
        raise UserError(f"cannot build the model {source!r}: {reason}") from error
    if arguments.treats_composition_apart and not composition_weights(model):
        raise UserError(
            f"composition_learning_rate={arguments.composition_learning_rate} and freeze_parent_steps="
            f"{arguments.freeze_parent_steps} are for models that compose heads, and this {config.model_type} has no "
            "weights for that; leave them out, upcycle the checkpoint first (with `dynattn convert`, or with "
            "dynattn.with_composed_heads if that does not know it), or give a new model composed_heads in model_config"
        )
    if arguments.z_loss and not isinstance(model, CausalLMHead):
        raise UserError(f"z_loss is part of the loss of this package's models, and this is a {config.model_type}")
    model.train()
    return model


def checkpoint_activations_if_asked(model: PreTrainedModel, arguments: PretrainArguments) -> None:
    """Makes the backward pass compute activations again instead of keeping them, if the arguments ask for that."""
    if arguments.gradient_checkpointing:
        checkpoint_activations(model, use_reentrant=False, context_fn=keep_attention_outputs)


def check_attention(arguments: PretrainArguments, device: torch.device) -> None:
    """Raises UserError, before the run begins, if the Triton kernels that were asked for do not run on the device."""
    if arguments.attn_implementation != "triton":
        return
    try:
        load_kernels(device)
    except (ImportError, ValueError) as error:
        raise UserError(f"attn_implementation=triton cannot be used: {in_one_line(error)}") from error


def choose_attention(model: PreTrainedModel, arguments: PretrainArguments, device: torch.device) -> str:
    """Sets the default attention implementation of `device` on a model that composes heads, unless one was asked for.

    Returns:
        A line for the terminal that names the implementation and the reason.
    """
    if getattr(model.config, "composed_heads", None) is not None:
        own = model.config._attn_implementation
        part = "by" if own in COMPOSING_IMPLEMENTATIONS else "with the masks of"
        return f"attention: heads composed in place {part} {own}"
    if arguments.attn_implementation is not None:
        return f"attention: {arguments.attn_implementation}, as asked for"
    if not getattr(model.config, "composes", False):
        return f"attention: {model.config._attn_implementation}"
    name, reason = default_implementation(device)
    if name != model.config._attn_implementation:
        model.set_attn_implementation(name)
    return f"attention: {name} ({reason})"


def reset_generation(model: PreTrainedModel) -> None:
    """Gives a model that generates its special tokens, and otherwise Transformers' defaults."""
    if model.can_generate():
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
        model.generation_config = GenerationConfig(**{name: getattr(model.config, name) for name in tokens})


def composition_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights that compose heads, as opposed to those that a plain Transformer has too."""
    modules = [module for module in model.modules() if isinstance(module, DynamicComposition | DifferentialHeads)]
    return [weight for module in modules for weight in module.parameters()]


def count_parameters(model: PreTrainedModel) -> ParameterCounts:
    """Counts each parameter once, tied ones too."""
    embeddings = {weight for module in embedding_modules(model) for weight in module.parameters()}
    total = model.num_parameters()
    return ParameterCounts(total, total - sum(weight.numel() for weight in embeddings))


def embedding_modules(model: PreTrainedModel) -> list[nn.Module]:
    """All embeddings and, if the model has one, the output head."""
    modules: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings()
    return modules if head is None else [*modules, head]


def _load_or_initialize(arguments: PretrainArguments, config: PreTrainedConfig, on_meta: bool) -> PreTrainedModel:
    """The model with the weights of `init_from`, or with new ones, or on the meta device without weights."""
    options: dict[str, Any] = {"dtype": torch.float32}
    if arguments.attn_implementation is not None:
        options["attn_implementation"] = arguments.attn_implementation
    if getattr(config, "composed_heads", None) is not None:
        check_makes_masks(arguments.attn_implementation)
    auto_class = AUTO_CLASSES[arguments.objective]
    if arguments.init_from and not on_meta:
        source = arguments.init_from
        model, info = auto_class.from_pretrained(
            source, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        check_loaded(f"init_from={source}", info)
        check_composed(f"init_from={source}", config, info)
        return model
    with torch.device("meta") if on_meta else nullcontext():
        return auto_class.from_config(config, **options)
