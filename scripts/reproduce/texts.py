"""The texts of a study of language models. Nothing here imports PyTorch, so that mistakes are told at once."""

from typing import Any

from ..common.errors import UserError


def check_texts(dataset: str, validation_dataset: str | None) -> None:
    """Raises UserError unless there is either the built-in corpus alone, which has held-out text, or two texts."""
    if (dataset == "builtin") != (validation_dataset is None):
        raise UserError(f"dataset={dataset} and validation_dataset={validation_dataset}: give both, or neither")


def text_options(dataset: str, validation_dataset: str | None) -> dict[str, Any]:
    """The options of `dynattn pretrain` that name the texts."""
    return {"dataset": dataset, **({"validation_dataset": validation_dataset} if validation_dataset else {})}
