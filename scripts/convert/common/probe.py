"""A model's logits on a probe, computed in three ways: plain batch, left-padded row, token by token from a cache."""

from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ...common.builtin_corpus import builtin_documents
from ...common.errors import UserError
from .comparison import NOISE_MULTIPLE, PROBE_WITHOUT_WINDOW, affordable_tokens, largest, random_ids
from .model_loading import quiet_loading
from .tensor_source import TensorSource, count_elements

DECODED = 8


@dataclass(frozen=True)
class Answers:
    """Logits of a batch, of its second row behind padding, and of its last tokens from a cache; and the loss."""

    full: Tensor  # [2, T, V]
    padded: Tensor  # [1, less than T, V]
    decoded: Tensor  # [2, DECODED, V]
    loss: float

    @property
    def noise(self) -> float:
        """The largest difference between the three ways, which is rounding alone; at least one float32 rounding."""
        padded = largest(self.padded - self.full[1:, : self.padded.shape[1]])
        decoded = largest(self.decoded - self.full[:, -DECODED:])
        return max(padded, decoded, torch.finfo(torch.float32).eps * largest(self.full))


@dataclass(frozen=True)
class Comparison:
    """Two models' answers: the largest difference of logits over all ways, what rounding explains, and both losses."""

    tokens: int
    difference: float
    noise: float
    losses: tuple[float, float]

    @property
    def limit(self) -> float:
        """The largest difference that counts as rounding."""
        return NOISE_MULTIPLE * self.noise

    @property
    def equal(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.limit

    def describe(self) -> str:
        """How far the logits are from each other, in one line."""
        if self.difference == 0:
            return f"{self.tokens} tokens, plain, left-padded and cached: logits are equal bit for bit"
        return (
            f"{self.tokens} tokens, plain, left-padded and cached: logits differ by {self.difference:.1e} "
            f"(float32 rounding {self.noise:.1e}, limit {self.limit:.1e})"
        )

    def describe_effect(self) -> str:
        """What the second model's difference does to loss and logits, in one line."""
        before, after = self.losses
        return (
            f"on {self.tokens} tokens the loss changes from {before:.5f} to {after:.5f} ({after - before:+.1e}), "
            f"logits by up to {self.difference:.1e}"
        )


def compare_answers(first: Answers, second: Answers) -> Comparison:
    """Compares two models' answers to the same probe.

    Raises:
        UserError: the first model's logits are not finite.
    """
    if not first.full.isfinite().all():
        raise UserError("the first model's logits are not finite; its weights are damaged")
    pairs = ((first.full, second.full), (first.padded, second.padded), (first.decoded, second.decoded))
    difference = torch.tensor([largest(one - other) for one, other in pairs]).max().item()  # NaN if there is one
    return Comparison(first.full[..., 0].numel(), difference, first.noise, (first.loss, second.loss))


@torch.no_grad()
def ask(model: PreTrainedModel, ids: Tensor) -> Answers:
    """Runs `model` on token ids `[2, T]` in the three ways.

    Raises:
        UserError: it cannot run in one of them.
    """
    if "past_key_values" not in signature(model.forward).parameters:
        raise UserError(f"{type(model).__name__} has no cache of keys and values; such models are not compared here")
    full = model(ids, use_cache=False).logits
    loss = functional.cross_entropy(full[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    return Answers(full, _padded_logits(model, ids), _decoded_logits(model, ids), loss)


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
        output = model(ids[:, position : position + 1], past_key_values=output.past_key_values, use_cache=True)
        decoded.append(output.logits)
    return torch.cat(decoded, dim=1)


def make_probe(folder: Path, *configs: PreTrainedConfig) -> Tensor:
    """Token ids `[2, T]` that all models can read: English if there is a tokenizer, else random.

    They are longer than two windows if the models allow and the time is bearable.

    Args:
        folder: of one of them, where a tokenizer may be.
        configs: of the models.
    """
    windows = [getattr(config, "sliding_window", None) or 0 for config in configs]
    affordable = affordable_tokens(count_elements(TensorSource(folder).shapes.values()))
    shortest = min(getattr(config, "max_position_embeddings", None) or PROBE_WITHOUT_WINDOW for config in configs)
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
