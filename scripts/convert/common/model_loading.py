"""Loading configurations and models to compare their logits in float32."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ...common.checkpoint_files import read_config
from ...common.checkpoint_loading import is_unknown, quiet_loading
from ...common.errors import UserError, first_line, last_line, refusal_of
from .probe import Probe
from .tensor_source import TensorSource

logger = logging.get_logger(__name__)

# Makes Transformers report weights that do not fit, of which `find_misfits` names the first, instead of raising.
TELLING: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def load_config(folder: Path) -> PreTrainedConfig:
    """Reads the configuration in `folder` with Transformers.

    Raises:
        UserError: it is not valid.
    """
    read_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # Transformers checks few fields, so that a bad value ends in any exception
        told = first_line(error) if is_unknown(error) else refusal_of(error)
        raise UserError(f"{folder / 'config.json'} is not valid: {told}") from error


def load_converted(folder: Path, dtype: torch.dtype, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Loads one of our models with weights rounded to `dtype`, to compute in float32.

    Args:
        folder: of the checkpoint.
        dtype: weights are rounded to it.
        config: instead of the one in the folder.

    Raises:
        UserError: it does not load, its weights do not fit its configuration, or memory is short.
    """
    require_memory(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, trust_remote_code=False, **TELLING
        )
        model, info = loaded
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the converted model does not load: {last_line(error)}") from error
    if misfits := find_misfits(info, "missing_keys", "unexpected_keys", "mismatched_keys"):
        raise UserError(f"the weights do not fit the converted configuration: {misfits}")
    return model.float().eval()


def load_for_probe(
    folder: Path,
    probe: Probe,
    *,
    dtype: torch.dtype = torch.float32,
    config: PreTrainedConfig | None = None,
    architectures: list[str] | None = None,
) -> PreTrainedModel:
    """Loads the model that a probe is for, with weights rounded to `dtype`, to compute in float32 with eager attention.

    Warns of stored tensors that the model does not read, since another program may read them; a given `config` may
    leave some out on purpose.

    Args:
        folder: of the checkpoint.
        probe: tells the class, and which tensors may be missing.
        dtype: weights are rounded to it.
        config: instead of the one in the folder.
        architectures: class names that tell the head, instead of those in the folder's `config.json`.

    Raises:
        UserError: it does not load, tensors are missing, or memory is short.
    """
    require_memory(folder)
    auto_class = probe.auto_class(architectures or read_config(folder).get("architectures") or [])
    options = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": False, **TELLING}
    try:
        with quiet_loading():
            loaded: Any = getattr(transformers, auto_class).from_pretrained(folder, config=config, **options)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"the model in {folder} does not load: {refusal_of(error)}") from error
    model, info = loaded
    info["missing_keys"] = [name for name in info["missing_keys"] if not name.startswith(probe.unread)]
    if misfits := find_misfits(info, "missing_keys", "mismatched_keys"):
        raise UserError(f"the weights in {folder} do not fit its config.json: {misfits}")
    if config is None and (unread := find_misfits(info, "unexpected_keys")):
        logger.warning("%s stores tensors that its model does not read: %s", folder, unread)
    if dtype.itemsize < torch.float32.itemsize:
        round_weights(model, dtype)
    return model.eval()


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Rounds what files store of `model` to `dtype`, in place; Marian's sinusoids, which it computes, stay exact."""
    computed = model._keys_to_ignore_on_save or ()
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and name not in computed:
            weight.copy_(weight.to(dtype))


def find_misfits(info: dict[str, Any], *kinds: str) -> str:
    """The first tensor name that Transformers reports under one of `kinds`, and how many there are; empty if none."""
    names = sorted(str(name) for kind in kinds for name in info[kind])
    return f"{names[0]} ({len(names)} in all)" if names else ""


def require_memory(folder: Path) -> None:
    """Raises UserError where the machine has less memory than the weights in `folder` need in float32."""
    needed = torch.float32.itemsize * TensorSource(folder).elements
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise UserError(
            f"comparing logits needs about {needed / 1e9:.0f} GB of memory and the machine has {there / 1e9:.0f} GB; "
            "use a larger machine, or convert with --no-verify"
        )
