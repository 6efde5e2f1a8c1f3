"""The probe of text decoders: a plain batch, a left-padded row, and token by token from a cache."""

from inspect import signature
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from dynattn.modeling.caches.names import NEW_NAME, OLD_NAME, cache_in, named_cache

from ...common.builtin_corpus import builtin_documents
from ...common.checkpoint_loading import quiet_loading
from ...common.errors import UserError
from .probe import (
    PROBE_WITHOUT_WINDOW,
    Answers,
    Probe,
    affordable_tokens,
    longest_within_memory,
    random_ids,
    rounding_between,
)
from .tensor_source import TensorSource

DECODED = 8


@torch.no_grad()
def ask(model: PreTrainedModel, ids: Tensor) -> Answers:
    """Runs `model` on token ids `[2, T]` in the three ways.

    Raises:
        UserError: it cannot run in one of them.
    """
    if not {OLD_NAME, NEW_NAME} & signature(model.forward).parameters.keys():
        raise UserError(f"{type(model).__name__} has no cache of keys and values; such models are not compared here")
    full = model(ids, use_cache=False).logits
    padded, decoded = _padded_logits(model, ids), _decoded_logits(model, ids)
    return Answers(
        f"{ids.numel()} tokens, plain, left-padded and cached",
        (full, padded, decoded),
        rounding_between((full[1:, : padded.shape[1]], padded), (full[:, -DECODED:], decoded)),
        functional.cross_entropy(full[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item(),
    )


def _padded_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits `[1, T - pads, V]` of the start of the second row of `ids` `[2, T]`, with padding on its left."""
    length = ids.shape[1]
    pads = length // 3
    shifted = torch.cat([ids[1:, :1].expand(-1, pads), ids[1:, : length - pads]], dim=1)
    mask = (torch.arange(length) >= pads).long()
    inputs = {"attention_mask": torch.stack([torch.ones_like(mask), mask])}
    if "position_ids" in signature(model.forward).parameters:  # other models count positions from the mask
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return model(torch.cat([ids[:1], shifted]), use_cache=False, **inputs).logits[1:, pads:]


def _decoded_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits `[2, DECODED, V]` of the last tokens of `ids` `[2, T]`, one by one after a cache of those before."""
    length = ids.shape[1]
    output = model(ids[:, : length - DECODED], use_cache=True)
    decoded = []
    for position in range(length - DECODED, length):
        output = model(ids[:, position : position + 1], use_cache=True, **named_cache(cache_in(output)))
        decoded.append(output.logits)
    return torch.cat(decoded, dim=1)


def make_probe(folder: Path, *configs: PreTrainedConfig) -> Tensor:
    """Token ids `[2, T]` that all models can read: English if there is a tokenizer, else random.

    They are longer than two windows if the models allow, and time and memory are bearable.

    Args:
        folder: of one of them, where a tokenizer may be.
        configs: of the models.

    Raises:
        UserError: one of them has too few positions.
    """
    windows = [getattr(config, "sliding_window", None) or 0 for config in configs]
    heads = max(getattr(config, "num_attention_heads", 1) for config in configs)
    affordable = min(affordable_tokens(TensorSource(folder).elements), longest_within_memory(2, heads))
    shortest = min(getattr(config, "max_position_embeddings", None) or PROBE_WITHOUT_WINDOW for config in configs)
    if shortest <= DECODED:
        raise UserError(f"max_position_embeddings={shortest} is too short for a comparison, which needs {DECODED + 1}")
    length = max(DECODED + 1, min(max(PROBE_WITHOUT_WINDOW, 2 * max(windows) + 8), shortest, affordable))
    vocabulary = min(config.vocab_size for config in configs)
    ids = text_ids(folder, 2 * length, vocabulary)
    return random_ids(vocabulary, 2, length) if ids is None else ids.reshape(2, length)


def text_ids(folder: Path, count: int, vocabulary: int) -> Tensor | None:
    """The first tokens of the built-in corpus, `[count]`; None where no tokenizer loads or its tokens do not fit."""
    try:
        with quiet_loading():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            ids = tokenizer(" ".join(builtin_documents("validation"))[: 16 * count], add_special_tokens=False).input_ids
    except Exception:  # tokenizers raises bare Exception for a damaged file, and there may be none
        return None
    usable = [token for token in ids if token < vocabulary][:count]
    return torch.tensor(usable) if len(usable) == count else None


TEXT = Probe(lambda architectures: "AutoModelForCausalLM", make_probe, ask, generates=True)
