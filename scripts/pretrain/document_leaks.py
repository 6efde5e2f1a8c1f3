"""Whether a model of another package lets the documents of a packed sequence see each other."""

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from ..common.errors import UserError
from .arguments import PretrainArguments
from .model_config import mixing_documents


def check_keeps_documents_apart(model: PreTrainedModel, arguments: PretrainArguments) -> None:
    """Refuses a model of another package that would ignore `mask_documents`, as those of linear attention do.

    Flash attention, which needs a GPU, finds packed documents only where a forward pass reads a single sequence.

    Raises:
        UserError: it is one of them.
    """
    implementation = model.config._attn_implementation
    if "flash" in implementation:
        if arguments.batch_size > 1 or arguments.length_warmup_steps:
            raise UserError(
                f"attn_implementation={implementation} keeps the documents of a packed sequence apart only where a "
                "forward pass reads one sequence; give attn_implementation: sdpa, batch_size: 1 without "
                "length_warmup_steps, or mask_documents: false (--no_mask_documents)"
            )
    elif sees_other_documents(model):
        raise mixing_documents(model.config)


def sees_other_documents(model: PreTrainedModel, length: int = 8) -> bool:
    """Whether a document's logits depend on the document before it in a packed sequence of `2 * length` tokens.

    The gradient tells: it is exactly zero where a mask hides the earlier tokens. The model is left in evaluation mode.
    """
    implementation, embedding = model.config._attn_implementation, cast(Any, model.get_input_embeddings())
    positions, rows = torch.arange(length).repeat(2)[None], embedding.weight.shape[0]
    tokens = (rows - 1 - torch.arange(2 * length)[None]) % rows  # the last ones, because the first may be padding
    embedded: list[torch.Tensor] = []
    hook = embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    if implementation not in ("sdpa", "eager"):
        model.set_attn_implementation("eager")  # others may need a GPU
    try:
        logits = model.eval()(input_ids=tokens, position_ids=positions, use_cache=False).logits
        (gradient,) = torch.autograd.grad(logits[0, length:].square().sum(), embedded[:1])
    finally:
        hook.remove()
        if implementation not in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
    return bool(gradient[0, :length].any())
