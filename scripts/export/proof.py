"""The proof of an export: the runtime generates greedily from the written graphs, and PyTorch from the checkpoint."""

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from dynattn.modeling.caches.names import cache_in

from ..common.errors import UserError
from ..common.rounding import NOISE_MULTIPLE, largest, rounding_error
from .formats import Format
from .graphs import exportable_attention, graph_inputs

# Tokens of a prompt: more than the sliding window has, so that it matters, but no more than `LONGEST_PROMPT`.
SHORTEST_PROMPT, LONGEST_PROMPT, BEYOND_WINDOW = 32, 512, 8
ROWS = 2

Call = Callable[..., Any]


class Generated(NamedTuple):
    """Generated `tokens` `[B, N]`, and the logits `[B, N, V]` from which they were chosen."""

    tokens: Tensor
    logits: Tensor


@torch.no_grad()
def prove(folder: Path, target: Format, model: PreTrainedModel, prompt: Tensor, mask: Tensor, tokens: int) -> str:
    """Loads the graphs in `folder` as a user would, generates with them, and compares; returns the outcome in one line.

    Converts `model` to float64.

    Args:
        prompt, mask: `[B, T]`, as `make_prompt` makes them.

    Raises:
        UserError: tokens or logits differ by more than rounding.
    """
    graphs = load_written(folder, target)
    observed = generate_greedily(graphs["prefill"], graphs["decode"], prompt, mask, tokens)
    expected = generate_greedily(model, model, prompt, mask, tokens)
    return compare(observed, expected, exact_logits(model, prompt, mask, expected.tokens), prompt.shape[1])


def load_written(folder: Path, target: Format) -> Mapping[str, Any]:
    """The graphs that this process has written into `folder`, by name, ready to run."""
    from transformers.exporters import ExportedModel

    options = dict(target.runtime_options)
    # Before it reads pickles, Transformers asks since 5.24 whether they are trusted. Nobody else has written these.
    if target.is_pickled and "trust_remote_code" in signature(ExportedModel.from_pretrained).parameters:
        options["trust_remote_code"] = True
    return ExportedModel.from_pretrained(folder, device="cpu", **options).runners


def make_prompt(config: PreTrainedConfig, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random prompts `[B, T]` and their mask; the last row is padded on its left.

    Raises:
        UserError: the model has too few positions for them and `tokens` more.
    """
    room = config.max_position_embeddings - tokens
    if room < 2:
        raise UserError(
            f"the model has {config.max_position_embeddings} positions, too few for a prompt of 2 tokens and {tokens} "
            f"more; give --tokens {max(1, config.max_position_embeddings - 2)} or fewer"
        )
    beyond = (getattr(config, "sliding_window", None) or 0) + BEYOND_WINDOW
    length = min(max(beyond, SHORTEST_PROMPT), LONGEST_PROMPT, room)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(config.vocab_size, (ROWS, length), generator=generator)
    mask = torch.ones_like(prompt)
    mask[-1, : length // 4] = 0
    return prompt, mask


def generate_greedily(prefill: Call, decode: Call, prompt: Tensor, mask: Tensor, count: int) -> Generated:
    """Generates `count` tokens after `prompt` `[B, T]`; `mask` `[B, T]` is 0 at padding.

    Args:
        prefill, decode: take `graph_inputs` and return logits `[B, T, V]` and a cache, as models do.
    """
    tokens, logits = [], []
    outputs = prefill(**graph_inputs(prompt, mask, DynamicCache()))
    for _ in range(count):
        logits.append(outputs.logits[:, -1].clone())
        tokens.append(logits[-1].argmax(dim=-1, keepdim=True))
        mask = torch.cat([mask, torch.ones_like(tokens[-1])], dim=1)
        if len(tokens) < count:
            outputs = decode(**graph_inputs(tokens[-1], mask, cache_in(outputs)))
    return Generated(torch.cat(tokens, dim=1), torch.stack(logits, dim=1))


def exact_logits(model: PreTrainedModel, prompt: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    """Logits `[B, N, V]` in float64 at the places where `tokens` `[B, N]` were chosen, in one pass without a cache."""
    sequence = torch.cat([prompt, tokens[:, :-1]], dim=1)
    mask = torch.cat([mask, torch.ones_like(tokens[:, :-1])], dim=1)
    inputs = graph_inputs(sequence, mask, DynamicCache())
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # their default has no float64
    with exportable_attention(model.double()):
        return model(**inputs).logits[:, prompt.shape[1] - 1 :]


def compare(observed: Generated, expected: Generated, exact: Tensor, prompt: int) -> str:
    """Compares what the runtime (`observed`) and PyTorch (`expected`) generated; returns the outcome in one line.

    Args:
        exact: exact logits `[B, N, V]` for PyTorch's tokens.
        prompt: number of tokens of a prompt.

    Raises:
        UserError: a token differs, or logits do by more than rounding.
    """
    count = expected.tokens.shape[1]
    same = int((observed.tokens == expected.tokens).all(dim=0).long().cumprod(dim=0).sum())
    if same < count:
        raise UserError(f"the graphs generate other tokens than PyTorch from token {same + 1} on; nothing was written")
    # PyTorch's own difference from exact logits is rounding, of which some more is allowed.
    difference, noise = largest(observed.logits - exact), rounding_error(expected.logits, exact)
    limit = NOISE_MULTIPLE * noise
    if not difference <= limit:
        raise UserError(
            f"the graphs' logits differ from PyTorch's by {difference:.1e}, and rounding explains {limit:.1e}; "
            "nothing was written"
        )
    return (
        f"{count} tokens after each of {ROWS} prompts of {prompt}, one padded: identical to PyTorch's; "
        f"logits differ by {difference:.1e} (float32 rounding {noise:.1e}, limit {limit:.1e})"
    )
