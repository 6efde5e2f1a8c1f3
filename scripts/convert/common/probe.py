"""What a model answers to a probe: a plain batch, a left-padded row, and tokens decoded one by one from a cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ...common.builtin_corpus import builtin_documents
from ...common.errors import UserError, last_line
from .comparison import AFFORDABLE_OPERATIONS, NOISE_MULTIPLE, SHORTEST_PROBE, WITHOUT_WINDOW, largest, require_memory
from .tensor_source import TensorSource

DECODED = 8


@dataclass(frozen=True)
class Answers:
    """Logits of a batch, of its second row's start behind padding, of its last tokens from a cache; and the loss."""

    full: Tensor  # [2, T, V]
    padded: Tensor  # [1, less than T, V]
    decoded: Tensor  # [2, DECODED, V]
    loss: float

    @property
    def noise(self) -> float:
        """How far the same logits are from each other, computed in the three ways; at least one rounding."""
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
    length, accepted = ids.shape[1], signature(model.forward).parameters
    if "past_key_values" not in accepted:
        raise UserError(f"{type(model).__name__} has no cache of keys and values; such models are not compared here")
    full = model(ids, use_cache=False).logits
    loss = functional.cross_entropy(full[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    pads = length // 3
    shifted = torch.cat([ids[1:, :1].expand(-1, pads), ids[1:, : length - pads]], dim=1)
    mask = (torch.arange(length) >= pads).long()
    inputs = {"attention_mask": torch.stack([torch.ones_like(mask), mask])}
    if "position_ids" in accepted:  # others count from the mask
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    padded = model(torch.cat([ids[:1], shifted]), use_cache=False, **inputs).logits[1:, pads:]
    output = model(ids[:, : length - DECODED], use_cache=True)
    decoded = []
    for position in range(length - DECODED, length):
        output = model(ids[:, position : position + 1], past_key_values=output.past_key_values, use_cache=True)
        decoded.append(output.logits)
    return Answers(full, padded, torch.cat(decoded, dim=1), loss)


def load_for_probe(
    folder: Path, *, dtype: torch.dtype = torch.float32, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """Loads a model with weights rounded to `dtype`, to compute in float32 with eager attention.

    Args:
        folder: of the checkpoint.
        dtype: weights are rounded to it.
        config: instead of the one in the folder.

    Raises:
        UserError: it does not load, tensors are missing, or memory is short.
    """
    require_memory(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    try:
        with quiet_loading():
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"the model in {folder} does not load: {last_line(error)}") from error
    model, info = loaded
    if wrong := sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"]))):
        raise UserError(f"the weights in {folder} do not fit its config.json: {wrong[0]} ({len(wrong)} in all)")
    if dtype.itemsize < torch.float32.itemsize:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).float()
    return model.eval()


def make_probe(folder: Path, *configs: PreTrainedConfig) -> Tensor:
    """Token ids `[2, T]` that all models can read: English if there is a tokenizer, else random.

    They are longer than two windows if the models allow and the time is bearable.

    Args:
        folder: of one of them, where a tokenizer may be.
        configs: of the models.
    """
    windows = [getattr(config, "sliding_window", None) or 0 for config in configs]
    parameters = sum(shape.numel() for shape in TensorSource(folder).shapes.values())
    affordable = max(SHORTEST_PROBE, int(AFFORDABLE_OPERATIONS / (6 * parameters)))
    shortest = min(getattr(config, "max_position_embeddings", None) or WITHOUT_WINDOW for config in configs)
    length = max(DECODED + 1, min(max(WITHOUT_WINDOW, 2 * max(windows) + 8), shortest, affordable))
    vocabulary = min(config.vocab_size for config in configs)
    random = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
    ids = text_ids(folder, 2 * length, vocabulary)
    return random if ids is None else ids.reshape(2, length)


def text_ids(folder: Path, count: int, vocabulary: int) -> Tensor | None:
    """The first `count` tokens of the built-in corpus, or None where no tokenizer loads or it does not fit."""
    try:
        with quiet_loading():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            ids = tokenizer(" ".join(builtin_documents("validation"))[: 16 * count], add_special_tokens=False).input_ids
    except Exception:  # tokenizers raises bare Exception for a damaged file, and there may be none
        return None
    usable = [token for token in ids if token < vocabulary][:count]
    return torch.tensor(usable) if len(usable) == count else None


def load_config(folder: Path) -> PreTrainedConfig:
    """Reads the configuration in `folder` with Transformers.

    Raises:
        UserError: it is not valid.
    """
    try:
        return AutoConfig.from_pretrained(folder)
    except (StrictDataclassError, ValueError, TypeError, OSError, KeyError) as error:
        raise UserError(f"{folder / 'config.json'} is not valid: {last_line(error)}") from error


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Leaves out Transformers' remarks on keys, which are checked here."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def describe(proof: Comparison) -> str:
    """What the proof says, in one line."""
    if proof.difference == 0:
        return f"{proof.tokens} tokens, plain, left-padded and cached: logits are equal bit for bit"
    return (
        f"{proof.tokens} tokens, plain, left-padded and cached: logits differ by {proof.difference:.1e} "
        f"(float32 rounding {proof.noise:.1e}, limit {proof.limit:.1e})"
    )


def describe_effect(effect: Comparison) -> str:
    """What starting differently does to the model, in one line."""
    before, after = effect.losses
    return (
        f"on {effect.tokens} tokens the loss changes from {before:.5f} to {after:.5f} ({after - before:+.1e}), "
        f"logits by up to {effect.difference:.1e}"
    )
