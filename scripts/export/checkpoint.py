"""Loads the checkpoint to export, in float32, and refuses one that cannot be exported."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from dynattn.families import FAMILIES
from dynattn.modeling.positions.rotary import batch_dependent_rope

from ..common.checkpoint_files import read_config
from ..common.checkpoint_loading import check_loaded, check_reads_one_way
from ..common.errors import UserError, refusal_of


def load_checkpoint(folder: Path) -> PreTrainedModel:
    """Returns the causal language model in `folder`, in evaluation mode on the CPU.

    Raises:
        UserError: it is not of this package, has no causal language model or one whose tokens see later ones, has a
            memory, rotary embedding or layers that cannot be exported, is quantized, or is damaged.
    """
    config = read_config(folder)
    model_type, composed = config.get("model_type"), config.get("composed_heads") is not None
    if model_type not in FAMILIES and not composed:
        raise UserError(
            f"{folder} holds a model of type {model_type!r}; only {', '.join(FAMILIES)} can be exported, and models of "
            "Transformers with composed heads"
        )
    if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.get("architectures") or ()):
        raise UserError(f"{folder} holds no causal language model; only these have a prefill and a decoding graph")
    refuse_segments(config.get("memory_type"), folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            use_cache=True,  # the graphs take and return a cache and logits, whatever training has left here
            output_attentions=False,
            output_hidden_states=False,
        )
    except Exception as error:  # damaged files and bad values in them raise errors of many types
        raise UserError(f"the model in {folder} does not load: {refusal_of(error)}") from error
    model, info = loaded
    check_loaded(str(folder), info, exactly=True)
    check_reads_one_way(str(folder), model.config)
    refuse_batch_dependent_rope(model.config, folder)
    refuse_states(model.config, folder)
    return model.eval()


def refuse_segments(memory_type: object, folder: Path) -> None:
    """Raises UserError for a memory that is projected anew for every segment, which no graph of one step can hold."""
    if memory_type == "segment":
        raise UserError(
            f"{folder} has memory_type='segment', whose cache cannot be exported; set memory_type='streaming' in its "
            "config.json if tokens may be read one by one"
        )


def refuse_batch_dependent_rope(config: Any, folder: Path) -> None:
    """Raises UserError for rotary angles that depend on the longest row: no graph holds the choice between them."""
    if rope_type := batch_dependent_rope(config):
        raise UserError(
            f"{folder} has rope_type {rope_type!r}, which chooses other angles for longer texts, and a graph cannot; "
            "export a model with another rope_type, such as yarn or linear"
        )


def refuse_states(config: PreTrainedConfig, folder: Path) -> None:
    """Raises UserError for layers that keep more than keys and values, as in Falcon-H1: graphs have no place for it."""
    if any(hasattr(layer, "update_conv_state") for layer in DynamicCache(config=config).layers):
        raise UserError(
            f"{folder} has layers of linear attention or convolutions, whose states are in no cache of the graphs; "
            "only models whose layers all attend can be exported"
        )
