"""Which models processes can share the sequences of, by `ContextParallel`."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ..common.decoder_heads import causal_model_in
from ..ops.chunked_loss import IGNORED
from ..ops.readable import is_readable
from ..positions.rotary import batch_dependent_rope
from ..serving.served_layers import Probe, configured_windows, is_of_family, no_mask


def unwrapped(model: Any) -> PreTrainedModel:
    """The model in the wrappers of DistributedDataParallel, `torch.compile` and PEFT's adapters.

    Raises:
        ValueError: it has no language modeling head, or PEFT puts a trained prompt before the tokens.
    """
    while (inside := getattr(model, "_orig_mod", getattr(model, "module", None))) is not None:
        model = inside
    return causal_model_in(model)


def check_model(model: PreTrainedModel) -> None:
    """Raises ValueError unless processes can share sequences of a model, which `unwrapped` returned."""
    if not getattr(model, "supports_paged_cache", False):
        raise ValueError(
            f"processes cannot share sequences of {type(model).__name__}; they can those of DCFormer and DCPythia "
            "without CARoPE, and of decoders of with_composed_heads, with a language modeling head"
        )
    check_fields(model)
    if model.device.type != "meta":
        check_loss(model, loss_of_family(model) if is_of_family(model) else check_layers(model))


def check_mesh(model: PreTrainedModel, parts: set[int], mesh: DeviceMesh) -> None:
    """Raises ValueError if processes of the mesh have `parts` of the model's layers, whose outputs they add up.

    Then they would add up outputs for different tokens.
    """
    both = parts.intersection(mesh.mesh.flatten().tolist())
    if len(both) > 1:
        raise ValueError(
            f"processes {sorted(both)} share sequences and have parts of the model by tensor parallelism "
            f"(tp_size={model._tp_size}), but those with parts must read the same tokens; give a mesh of processes "
            "with the same part, or load the model whole"
        )


def parts_of_layers(model: Any) -> set[int]:
    """The processes among which tensor parallelism divides the layers of this one; none if they are whole."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
        return set()
    return {*(mesh["tp"] if mesh.ndim > 1 else mesh).mesh.flatten().tolist()}


def check_fields(model: PreTrainedModel) -> None:
    """Raises ValueError for fields of a configuration that make parts differ from whole sequences."""
    config = model.config.get_text_config(decoder=True)
    if rope_type := batch_dependent_rope(config):
        raise ValueError(f"rope_type {rope_type!r} rotates by the longest part, which differs between processes")
    if getattr(config, "layerdrop", 0):
        raise ValueError(f"layerdrop={config.layerdrop} skips other layers in each process; set it to 0")
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True adds a loss of the routers, which is no sum over tokens that parts could share; "
            "set it to False"
        )
    if is_of_family(model) and config.attention_dropout:
        raise ValueError(
            f"attention_dropout={config.attention_dropout} drops probabilities, which attention to the keys of all "
            "processes cannot; set it to 0"
        )


@torch.no_grad()
def check_layers(model: PreTrainedModel) -> Tensor | None:
    """Raises ValueError unless every layer of a model of Transformers attends by a `key_source`.

    Returns:
        The loss of `shifted_target`; None in a model that has none.
    """
    name, probe = type(model).__name__, Probe()
    try:
        windows = configured_windows(model)
    except ValueError as error:
        cause = str(error).partition("; ")[0]  # what follows it is advice for generation
        raise ValueError(
            f"processes cannot share sequences of {name}, as engines cannot serve it: {cause}; let each process read "
            "whole sequences"
        ) from error
    zero = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    given: Any = {"input_ids": zero, "position_ids": zero, "use_cache": False, **shifted_target(model)}
    output = model(**given, attention_mask=no_mask(model, 1, model.device), key_source=probe)
    found = [(call.layer, call.window) for call in probe.calls]
    if len(found) != len(windows) or dict(found) != dict(enumerate(windows)):
        raise ValueError(
            f"layers of {name} attend as (layer, window) {found}, and its configuration says "
            f"{list(enumerate(windows))}; processes can share sequences only if every layer has composed heads, "
            "attends once, gets the model's keywords and has the window of the configuration"
        )
    return getattr(output, "loss", None)


@torch.no_grad()
def loss_of_family(model: Any) -> Tensor:
    """The loss of `shifted_target` in a model of a family, which may be a function of the user's."""
    size = model.config.vocab_size
    return model.loss_function(
        logits=torch.zeros(1, 1, size, device=model.device), vocab_size=size, **shifted_target(model)
    )


def shifted_target(model: PreTrainedModel) -> dict[str, Tensor]:
    """The labels of one token, whose target is in `shift_labels` alone."""
    target = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    return {"labels": torch.full_like(target, IGNORED), "shift_labels": target}


def check_loss(model: PreTrainedModel, loss: Tensor | None) -> None:
    """Raises ValueError if a loss of `shifted_target` has found no target: a mean of none is no number, a sum 0."""
    if loss is None or not is_readable(loss) or (loss.isfinite() and loss):
        return
    raise ValueError(
        f"the loss of {type(model).__name__} does not read shift_labels, so that targets between parts would be lost; "
        "take the model class for causal language modeling, or a loss_function that reads them"
    )
