"""Loads a checkpoint to be scored, and refuses one whose scores would mean nothing."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from .checkpoint_files import check_has_config
from .errors import UserError, first_line, refusal_of
from .folder_names import may_be_on_the_hub
from .offline import offline_if_unreachable

# Types that have no class for masked language modeling, and whose tokens see later ones all the same.
BOTH_WAYS_TYPES = ("bert-generation", "cpmant", "xlnet")
NAN_LOGITS = "the model's logits are NaN: its weights are damaged, or overflow in this dtype; try float32"


def load_checkpoint(
    path: str,
    *,
    tokenizer: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    config_changes: Callable[[PreTrainedConfig], Mapping[str, Any]] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model, in evaluation mode, and its tokenizer from a folder or a Hub name.

    Args:
        path: folder or Hub name of the model.
        tokenizer: folder or Hub name of the tokenizer; `path` by default.
        dtype: a torch dtype's name, or "auto" for the one that the checkpoint was saved in.
        device: where to put the model; by default a GPU if there is one.
        trust_remote_code: whether to run model code that comes with the checkpoint.
        config_changes: returns, for the checkpoint's configuration, the fields to replace in it.

    Raises:
        UserError: either is missing or damaged, a field is not valid, or the device is not there.
    """
    target, tokenizer = find_device(device), tokenizer or path
    for place in (path, tokenizer):
        check_place(place)
    if Path(path).is_dir():
        check_has_config(Path(path))
    remote = not (Path(path).is_dir() and Path(tokenizer).is_dir())
    with offline_if_unreachable() if remote else nullcontext():
        model = _load_model(path, dtype, trust_remote_code, config_changes)
        loaded_tokenizer = load_tokenizer(tokenizer, trust_remote_code, "save one there or give --tokenizer PATH")
    model.to(target)  # type: ignore[arg-type]
    return model.eval(), loaded_tokenizer


def find_device(name: str | None) -> torch.device:
    """The device called `name`, or the first GPU, or the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA fails an assertion
        raise UserError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return device


def check_pair(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError if `tokenizer` has ids that `model` does not embed, or no token to begin a text with."""
    check_vocabulary(model, tokenizer)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has neither a bos nor an eos token, one of which must begin a scored text; set one, or give "
            "another tokenizer (--tokenizer)"
        )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError if `tokenizer` has ids that `model` does not embed."""
    rows = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if (highest := highest_id(tokenizer)) >= rows:
        raise UserError(
            f"the tokenizer has ids up to {highest} but the model embeds {rows} (0 ... {rows - 1}); "
            "give the tokenizer that the model was trained with"
        )


def highest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The highest id of a tokenizer's tokens, between which there may be gaps; -1 if it has no tokens."""
    return max(tokenizer.get_vocab().values(), default=-1)


def refuse_nan(logits: torch.Tensor) -> None:
    """Raises UserError if any of the logits `[B, T, V]` is NaN."""
    if logits.isnan().any():
        raise UserError(NAN_LOGITS)


def check_place(place: str) -> None:
    """Raises UserError unless `place` is a folder with something in it, or may be the name of a model on the Hub."""
    folder = Path(place)
    if folder.is_dir():
        if not any(folder.iterdir()):
            raise UserError(f"{place} is an empty folder; give the folder of a checkpoint")
    elif folder.exists():
        raise UserError(f"{place} is a file; give the folder that `save_pretrained` wrote")
    elif not may_be_on_the_hub(place):
        raise UserError(f"there is no folder {place}, and no model on the Hub can have this name; give one of them")


def _load_model(
    path: str,
    dtype: str,
    trust_remote_code: bool,
    changes: Callable[[PreTrainedConfig], Mapping[str, Any]] | None,
) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if changes is not None:
            config = type(config).from_dict({**config.to_dict(), **changes(config)})
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        model, info = loaded
    except UserError:
        raise
    except Exception as error:  # damaged files and bad values in them raise errors of many types
        place = path if Path(path).is_dir() else f"{path}, which is no folder here, from the Hub"
        hint = "; a module of yours that registers it goes with --import" if is_unknown(error) else ""
        raise UserError(f"cannot load a causal language model from {place}: {_reason(error)}{hint}") from error
    check_reads_one_way(path, model.config)
    check_loaded(f"the checkpoint {path}", info)
    check_composed(f"the checkpoint {path}", model.config, info)
    return model


def check_loaded(place: str, info: Mapping[str, Any], *, exactly: bool = False) -> None:
    """Raises UserError unless a checkpoint had all weights of its model, in their shapes.

    Args:
        place: what the message calls the checkpoint.
        info: what `from_pretrained` returns with `output_loading_info=True`. Only with `ignore_mismatched_sizes=True`
            does it return at all if shapes differ.
        exactly: whether weights that the model does not have are refused, too.
    """
    if absent := sorted(info["missing_keys"]):
        raise UserError(f"{place} lacks {len(absent)} weights of the model, such as {absent[0]}; check it")
    if other := sorted(info["mismatched_keys"]):
        name, stored, needed = other[0]
        raise UserError(
            f"config.json of {place} does not fit the weights: {name} has the shape {list(stored)} and would need "
            f"{list(needed)}; use the configuration that belongs to them"
        )
    if exactly and (unread := sorted(info["unexpected_keys"])):
        raise UserError(
            f"{place} holds {len(unread)} weights that its config.json does not ask for, such as {unread[0]}; use the "
            "configuration that belongs to them"
        )


def check_reads_one_way(path: str, config: PreTrainedConfig) -> None:
    """Raises UserError for the checkpoint in `path` if its `config` says that tokens see those after them."""
    if reads_both_ways(config):
        raise UserError(
            f"{path} is a {config.model_type} that reads each token with those after it, so predicting the next "
            "token means nothing; if it was trained to read left to right, say so in its config.json (is_decoder: "
            "true, or in XLNet attn_type: uni)"
        )


def check_composed(place: str, config: PreTrainedConfig, info: Mapping[str, Any]) -> None:
    """Raises UserError if Transformers has dropped the composed heads of a checkpoint, whose configuration lacks them.

    Args:
        place, info: as those of `check_loaded`.
        config: that of the loaded model; one of this package says itself which heads are composed.
    """
    dropped = [name for name in sorted(info["unexpected_keys"]) if "composition." in name]
    if dropped and not hasattr(config, "composes"):
        raise UserError(
            f"{place} holds {len(dropped)} weights of composed heads, such as {dropped[0]}, which its config.json does "
            "not tell of (composed_heads); load it by with_composed_heads, with the options it had, and save it again"
        )


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silences Transformers' warnings, such as those about missing and unexpected keys, which the caller checks."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def reads_both_ways(config: PreTrainedConfig) -> bool:
    """Whether a model reads each token with those after it, though Transformers has a causal class for its type.

    BERT and its kin can read left to right, and XLNet too, and do so only if their configuration says it.
    """
    learns_masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    one_way = {"is_decoder": True, "causal": True, "attn_type": "uni"}
    is_one_way = any(getattr(config, name, None) == value for name, value in one_way.items())
    return (learns_masked or config.model_type in BOTH_WAYS_TYPES) and not is_one_way


def _reason(error: Exception) -> str:
    """Why a file does not load, in one line; Transformers' own messages begin with the cause."""
    return first_line(error) if isinstance(error, OSError | ValueError) else refusal_of(error)


def is_unknown(error: Exception) -> bool:
    """Whether the model type is one that Transformers does not know."""
    return isinstance(error, ValueError) and isinstance(error.__context__, KeyError)


def load_tokenizer(path: str, trust_remote_code: bool = False, fix: str = "save one there") -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a folder or a Hub name; `fix` says what the user can do if there is none.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files raise errors of many types
        raise UserError(f"there is no usable tokenizer in {path}; {fix}") from error
