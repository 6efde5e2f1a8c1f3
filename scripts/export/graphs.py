"""The two graphs of an export: their inputs, which of their dimensions vary, and how they are traced."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import Dim
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from dynattn.modeling.other_models.interface_attention import ComposedInterfaceAttention

from .formats import Format

if TYPE_CHECKING:  # older versions of Transformers do not have it
    from transformers.exporters import ExportedModel

# Rows and tokens of the prompt for tracing. Both are at least two, because PyTorch treats a size of 1 as constant, and
# other than in the proof, which else would not see a graph that takes only the sizes it was traced with.
SAMPLE_ROWS, SAMPLE_TOKENS = 3, 8
# The axes that vary, by a tensor's number of dimensions: `[B, T]`, a convolution's context `[B, T, H * D]`, and keys,
# values and factors `[B, heads or terms, S, width]`.
VARYING_AXES = {2: (0, 1), 3: (0, 1), 4: (0, 2)}
# Implementations made of PyTorch's operators; the others are custom operators, which exporters do not know.
EXPORTABLE = ("eager", "sdpa")


def graph_inputs(tokens: Tensor, mask: Tensor, cache: Cache) -> dict[str, Any]:
    """The inputs of the prefill and the decoding graph.

    Args:
        tokens: `[B, T]`, those that the cache does not hold; a single one for the decoding graph.
        mask: `[B, S]`, 1 for real tokens and 0 for padding, of cached and new tokens.
        cache: an empty `DynamicCache`, or the one that the call before returned.
    """
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}


def export_graphs(model: PreTrainedModel, target: Format) -> "ExportedModel":
    """Traces `prefill` and `decode`, both with any batch size and length, or any up to the limits of the format.

    A windowed layer's cache keeps all tokens in these graphs, and the mask applies the window: a graph cannot count how
    many tokens it has dropped. The decoding graph is traced with the cache that the prefill graph returns, so that the
    two fit.
    """
    from transformers.exporters import ExportedModel

    exporter = target.make_exporter()
    tokens = torch.zeros(target.most_rows or SAMPLE_ROWS, SAMPLE_TOKENS, dtype=torch.long, device=model.device)
    mask = torch.ones_like(tokens)
    components = {}
    with exportable_attention(model):
        components["prefill"] = _export(exporter, model, target, graph_inputs(tokens, mask, DynamicCache()))
        prefill = ExportedModel(components, exporter.export_format)
        cache = prefill(**graph_inputs(tokens, mask, DynamicCache())).past_key_values
        longer = torch.cat([mask, mask[:, :1]], dim=1)
        components["decode"] = _export(exporter, model, target, graph_inputs(tokens[:, :1], longer, cache))
    return ExportedModel(components, exporter.export_format, model.config, model.generation_config)


@contextmanager
def exportable_attention(model: PreTrainedModel) -> Iterator[None]:
    """In the block, the model runs with an attention implementation that can be exported."""
    before = model.config._attn_implementation
    composed = [module for module in model.modules() if isinstance(module, ComposedInterfaceAttention)]
    choices = [module.choices for module in composed]
    if before not in EXPORTABLE:
        model.set_attn_implementation("eager")
    for module in composed:  # in a model of Transformers, which makes only the masks
        module.choices = module.choices._replace(implementation="eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for module, choice in zip(composed, choices, strict=True):
            module.choices = choice


def dynamic_shapes(inputs: dict[str, Any], largest: Sequence[int | None] = (None, None)) -> dict[str, Any]:
    """The axes that vary, for each input of a graph; for a cache it is a list, in the order of its tensors.

    Args:
        largest: the largest number of rows and the largest number of tokens; None without a limit.
    """
    from transformers.exporters.utils import get_leaf_tensors

    return {
        name: _varying_axes(value, largest)
        if isinstance(value, Tensor)
        else [_varying_axes(leaf, largest) for leaf in get_leaf_tensors(value).values()]
        for name, value in inputs.items()
    }


def _varying_axes(tensor: Tensor, largest: Sequence[int | None]) -> dict[int, Any]:
    limits = dict(zip(VARYING_AXES.get(tensor.ndim, ()), largest, strict=False))
    return {
        axis: Dim.AUTO if limit is None else Dim.AUTO(min=1, max=limit)
        for axis, limit in limits.items()
        if tensor.shape[axis] > 1
    }


def _export(exporter: Any, model: PreTrainedModel, target: Format, inputs: dict[str, Any]) -> Any:
    """One graph as a component of an `ExportedModel`."""
    largest = (target.most_rows, model.config.max_position_embeddings) if target.most_rows else (None, None)
    exported = exporter.export(model, inputs, target.make_config(dynamic_shapes(inputs, largest)))
    component = exported.components["model"]
    if isinstance(component.program, torch.export.ExportedProgram):
        # Sample inputs would be pickled into the file, and loading a pickle can run code.
        component.program.example_inputs = None
    return component
