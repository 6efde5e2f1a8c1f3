"""What serving requires of the engine, the model, the settings and each request, checked before it generates."""

import copy
import reprlib
from bisect import bisect_right
from collections.abc import Sequence
from importlib.metadata import version
from numbers import Integral, Real
from typing import Any

from packaging.version import Version

from ..positions.rotary import rope_types

# The versions of Transformers whose continuous batching this package supports: from the first up to before the second.
TRANSFORMERS = ("5.23", "5.25")
# What errors advise in place of serving, because it also answers several prompts at once.
ADVICE = "use generate() with a batch that is padded on the left"

# Settings that `generate` obeys and continuous batching ignores. With the value here, or None, a setting has no effect.
# Some are other ways of generating; others need all tokens of a request, but would get only those of a step.
UNSERVED: dict[str, Any] = {
    "num_beams": 1,
    "force_words_ids": None,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": False,
    "stop_strings": None,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "watermarking_config": None,
    "token_healing": False,
}
# What Transformers applies to all requests of a manager alike, and the value at which it does nothing. The second group
# matters only where tokens are sampled.
SHARED: dict[str, Any] = {
    "do_sample": False,
    "num_return_sequences": 1,
    "eos_token_id": -1,
    "suppress_tokens": None,
    "sequence_bias": None,
}
SHARED_IN_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "top_h": None,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}


def check_transformers() -> None:
    """Raises ImportError if this package does not support continuous batching of the installed Transformers."""
    (first, end), found = TRANSFORMERS, version("transformers")
    if not Version(first) <= Version(Version(found).base_version) < Version(end):
        supported = f"transformers>={first},<{end}"
        raise ImportError(
            f"serving models with composed heads is made for {supported}, and {found} is installed; "
            f"pip install '{supported}', or {ADVICE}"
        )


def check_paged_cache(model: Any, *, raw: bool = False) -> None:
    """Raises ValueError unless a paged cache keeps what the layers of a model need of earlier tokens.

    Args:
        raw: whether the model gets Transformers' own cache, which lacks the rows of composition factors and positions.
    """
    if not model.supports_paged_cache:
        raise ValueError(
            f"continuous batching keeps only keys and values of earlier tokens, and {type(model).__name__} with "
            f"this configuration needs more; {ADVICE}"
        )
    if raw and model.attends_to_paged_cache:
        raise ValueError(
            f"Transformers' own paged cache lacks rows that {type(model).__name__} needs with this configuration; get "
            "the manager from init_continuous_batching(), or call generate_batch()"
        )


def check_positions(config: Any) -> None:
    """Raises ValueError if rows do not hold all that positions need, or rotary angles depend on the other requests."""
    if "carope" in getattr(config, "schemes", ()):
        raise ValueError(
            f"position_scheme={config.position_scheme!r} needs more of earlier tokens than a paged cache keeps, their "
            f"phases; {ADVICE}"
        )
    if "longrope" in rope_types(config):
        raise ValueError(
            "rope_type 'longrope' rotates all tokens of a batch by angles that depend on its longest request, so that "
            "requests would change each other; use generate() with one of them at a time"
        )


def with_defaults_of(model: Any, generation_config: Any) -> Any:
    """A copy of a `GenerationConfig`, or of the model's; unset fields become those of the model's, as in `generate`.

    `GenerationConfig.update` would also refuse several greedy answers to one prompt, which are served.
    """
    complete = copy.copy(generation_config or model.generation_config)
    for name, value in vars(model.generation_config).items():
        if getattr(complete, name, None) is None:
            setattr(complete, name, value)
    return complete


def check_settings(vocab_size: int, generation_config: Any, settings: Any) -> None:
    """Raises ValueError for what only `generate` does, biases of no token, quantized caches, steps of fixed shape.

    Args:
        settings: a `ContinuousBatchingConfig`.
    """
    for name, neutral in UNSERVED.items():
        if (value := _setting(generation_config, name, neutral)) != neutral:
            raise ValueError(f"continuous batching does not serve {name}={value!r}; leave it out, or {ADVICE}")
    _check_biases(vocab_size, generation_config.sequence_bias or {})
    if generation_config.cache_implementation == "quantized":
        raise ValueError(
            "cache_implementation='quantized' would quantize composition factors with the keys, and continuous "
            "batching keeps a cache of its own; leave cache_implementation unset"
        )
    graphs = settings.use_cuda_graph
    if any(graphs) if isinstance(graphs, tuple) else graphs:
        raise ValueError(
            "use_cuda_graph needs steps of fixed shapes, and those of composed heads are not; leave it out"
        )
    if settings.use_async_batching:
        raise ValueError("use_async_batching is not served with composed heads, whose steps read lengths; leave it out")


def _check_biases(vocab_size: int, biased: Any) -> None:
    """Raises ValueError unless `sequence_bias`, a dictionary or a list of pairs, is of single tokens that exist."""
    sequences = list(biased) if isinstance(biased, dict) else [tokens for tokens, _ in biased]
    for tokens in sequences:
        if not isinstance(tokens, tuple | list) or not all(0 <= token < vocab_size for token in tokens):
            raise ValueError(
                f"sequence_bias (logit_bias) names {tokens!r}, which is no sequence of tokens of the vocabulary of "
                f"{vocab_size}; give {{(token,): bias}}"
            )
    if longer := [tokens for tokens in sequences if len(tokens) > 1]:
        raise ValueError(
            f"continuous batching does not serve a sequence_bias of several tokens, such as {longer[0]}, which depends "
            f"on earlier ones; give single tokens, or {ADVICE}"
        )


def check_joins(running: Any, asked: Any) -> None:
    """Raises ValueError unless the `GenerationConfig` of a request has what all requests of a manager share.

    Args:
        running: the `GenerationConfig` of the manager.
    """
    shared = SHARED | (SHARED_IN_SAMPLING if running.do_sample else {})
    for name, neutral in shared.items():
        ours, theirs = (_setting(config, name, neutral) for config in (running, asked))
        if ours != theirs:
            raise ValueError(
                f"a request asks for {name}={theirs!r}, and all requests that are served together have "
                f"{name}={ours!r}, as the first of them asked; ask for the same, or start another server or manager"
            )


def _setting(generation_config: Any, name: str, neutral: Any) -> Any:
    """A setting; its neutral value if it is unset or empty, as some clients send `stop` and `logit_bias`."""
    value = getattr(generation_config, name, None)
    return neutral if value is None or value == [] or value == {} else value


def new_token_limit(generation_config: Any, prompt_length: int) -> int | None:
    """How many tokens the answer to a prompt may have, None if any number.

    Raises:
        ValueError: `max_length` leaves none.
    """
    if generation_config.max_new_tokens is not None or generation_config.max_length is None:
        return generation_config.max_new_tokens
    limit = generation_config.max_length
    if prompt_length >= limit:
        raise ValueError(
            f"a request of {prompt_length} tokens leaves no new one within max_length={limit}; shorten the prompt, or "
            "give max_new_tokens"
        )
    return limit - prompt_length


def check_prompts(inputs: Any) -> None:
    """Raises TypeError unless `inputs` of `generate_batch` is a list of prompts, each with a dimension of tokens."""
    if not isinstance(inputs, list | tuple) or not all(_is_prompt(prompt) for prompt in inputs):
        raise TypeError(
            "generate_batch takes a list of prompts, each a list of token ids, as in [[1, 2, 3]]; got "
            f"{reprlib.repr(inputs)}"
        )


def _is_prompt(prompt: Any) -> bool:
    """Whether this is a sequence of numbers, which may be tensors without dimensions, or a tensor or array `[T]`."""
    if hasattr(prompt, "ndim"):
        return prompt.ndim == 1
    return isinstance(prompt, Sequence) and all(
        isinstance(token, Real) or getattr(token, "ndim", None) == 0 for token in prompt
    )


def check_request(config: Any, input_ids: Sequence[int], max_new_tokens: int | None) -> None:
    """Checks that a prompt has tokens, all in the vocabulary, and that positions suffice for it and its answer.

    Args:
        max_new_tokens: None if the answer may have any length; then one position has to be left for it.

    Raises:
        ValueError: it does not, or no new token is asked for.
    """
    if not len(input_ids):
        raise ValueError("the prompt of a request is empty; give it at least one token")
    if wrong := [token for token in input_ids if not 0 <= token < config.vocab_size or token % 1]:
        raise ValueError(f"token {wrong[0]} of a request is not in the vocabulary of {config.vocab_size} tokens")
    limit, new = config.max_position_embeddings, 1 if max_new_tokens is None else max_new_tokens
    if not isinstance(new, Integral) or new < 1:
        raise ValueError(f"a request asks for {new} new tokens; it must ask for 1 or more, a whole number")
    if (left := limit - len(input_ids)) < new:
        advice = f", or ask for at most {left} new tokens" if left > 0 else ""
        raise ValueError(
            f"a request of {len(input_ids)} tokens and {new} new ones needs more than max_position_embeddings "
            f"({limit}) positions; shorten the prompt{advice}"
        )


def room_for_answer(cache: Any, prompt_length: int, max_new_tokens: int | None, positions: int) -> int:
    """Returns how many tokens the answer may have, so that the paged cache has room for the request if it is alone.

    Transformers would end the thread that computes all requests.

    Args:
        cache: Transformers' `PagedAttentionCache`.
        max_new_tokens: None if the answer may have any length; then the cache may end it, as the positions do.
        positions: the positions of the model that the prompt leaves.

    Raises:
        ValueError: there is no room for the prompt, or for an answer of the length that is asked for.
    """
    asked = positions if max_new_tokens is None else max_new_tokens
    # The last token of an answer is not stored.
    left = bisect_right(
        range(1, asked + 1), cache.num_sectors, key=lambda new: _sectors_of(cache, prompt_length + new - 1)
    )
    if left < (1 if max_new_tokens is None else asked):
        advice = f", or ask for at most {left} new tokens" if left else ""
        raise ValueError(
            f"a request of {prompt_length} tokens and {max_new_tokens or 1} new ones does not fit into the paged "
            f"cache; shorten the prompt{advice}, or give the cache more room (num_blocks, max_memory_percent)"
        )
    return left


def _sectors_of(cache: Any, tokens: int) -> int:
    """The sectors of the cache, its unit for layers of every type, that so many tokens of a request take."""
    return sum(
        -(-allocator._compute_blocks_needed(0, 0, tokens) // allocator.blocks_per_sector)
        for allocator in cache.cache_allocators.values()
    )
