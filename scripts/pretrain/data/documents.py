"""Where training text comes from: the built-in corpus, local files, or the Hugging Face Hub."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, Value, concatenate_datasets, load_dataset
from numpy.typing import NDArray

from ...common.builtin_corpus import builtin_corpus_name, builtin_documents
from ...common.errors import UserError, first_line
from ..arguments import PretrainArguments

logger = logging.getLogger(__name__)

LOADERS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}
# The same documents are held out whatever the seed of the run, so that runs with different seeds can be compared.
HOLD_OUT_SEED = 0


@dataclass(frozen=True)
class Documents:
    """Training and validation documents, each a dataset with one column `text`, and a name for records."""

    train: Dataset
    validation: Dataset
    name: str


def load_documents(arguments: PretrainArguments) -> Documents:
    """Loads both splits; documents that are held out are not in the training split, but copies of them may be.

    Raises:
        UserError: the data cannot be found or read, lacks the column, or holds no text.
    """
    if arguments.dataset == "builtin":
        train = Dataset.from_dict({"text": builtin_documents("train")})
    else:
        train = load_text(arguments.dataset, arguments, arguments.train_split)
    validation = load_validation(arguments)
    if validation is None:
        train, validation = hold_out(train, arguments.validation_share)
    return Documents(train, validation, describe_source(arguments))


def load_validation(arguments: PretrainArguments) -> Dataset | None:
    """The validation documents that the arguments name, or those of the built-in corpus; None if there are none."""
    if arguments.validation_dataset is not None:
        return load_text(arguments.validation_dataset, arguments, arguments.validation_split or "validation")
    if arguments.validation_split is not None:
        return load_text(arguments.dataset, arguments, arguments.validation_split)
    if arguments.dataset == "builtin":
        return Dataset.from_dict({"text": builtin_documents("validation")})
    return None


def describe_source(arguments: PretrainArguments) -> str:
    """What records and model cards call the training data."""
    if arguments.dataset == "builtin":
        return builtin_corpus_name()
    if is_hub_name(arguments.dataset):
        return " ".join(filter(None, [arguments.dataset, arguments.dataset_config]))
    return Path(arguments.dataset).name


def load_text(source: str, arguments: PretrainArguments, split: str) -> Dataset:
    """Loads one source as a dataset with the column `text`; documents without text are left out."""
    files = find_files(source)
    if files is None:
        parts = [_load_hub(source, arguments.dataset_config, split)]
    else:
        parts = [_load_files(suffix, files) for suffix in LOADERS if any(path.suffix == suffix for path in files)]
    dataset = concatenate_datasets([_select_text(part, arguments.text_column, source) for part in parts])
    dataset = dataset.filter(
        lambda texts: [bool(text and text.strip()) for text in texts], input_columns="text", batched=True
    )
    if len(dataset) == 0:
        raise UserError(
            f"{source} holds no text in the column {arguments.text_column!r}; give data with at least one document"
        )
    return dataset


def is_hub_name(source: str) -> bool:
    """Whether `source` is neither the built-in corpus nor something on this machine."""
    return source != "builtin" and find_files(source) is None


def find_files(source: str) -> list[Path] | None:
    """Returns the files that a path, folder or glob names, or None when `source` can only be a Hub name."""
    path = Path(source)
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.suffix in LOADERS]
    elif any(character in source for character in "*?["):
        found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    elif path.is_file():
        found = [path]
    elif path.suffix in LOADERS or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"there is no file or folder {source}; give builtin, a path, or a Hub dataset name")
    else:
        return None
    if not found:
        raise UserError(f"{source} holds no file that ends in {', '.join(LOADERS)}")
    if unknown := [file.name for file in found if file.suffix not in LOADERS]:
        raise UserError(f"{unknown[0]} ends in none of {', '.join(LOADERS)}; convert it to one of them")
    return found


def hold_out(dataset: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """Splits off `share` of the documents, at least one and not all; of a single document its end, after a line."""
    if len(dataset) == 1:
        head, tail = cut_tail(dataset[0]["text"], share)
        return Dataset.from_dict({"text": [head]}), Dataset.from_dict({"text": [tail]})
    count = min(max(1, round(share * len(dataset))), len(dataset) - 1)
    order = np.random.default_rng(HOLD_OUT_SEED).permutation(len(dataset))
    return dataset.select(np.sort(order[count:])), dataset.select(np.sort(order[:count]))


def cut_tail(text: str, share: float) -> tuple[str, str]:
    """Cuts a text in two; the second part has about `share` of the characters."""
    cut = len(text) - max(1, round(share * len(text)))
    line_end = text.find("\n", cut, len(text) - 1)
    cut = cut if line_end < 0 else line_end + 1
    return text[:cut], text[cut:]


def iterate_texts(dataset: Dataset, batch_size: int = 1000) -> Iterator[list[str]]:
    """Yields the documents in batches."""
    for batch in dataset.iter(batch_size=batch_size):
        yield batch["text"]


@dataclass(frozen=True)
class Digest:
    """Documents by their content; it does not depend on where they are stored.

    Attributes:
        fingerprint: of the documents and their order.
        documents: `[N]` a hash of each document.
    """

    fingerprint: str
    documents: NDArray[np.uint64]


def digest(dataset: Dataset) -> Digest:
    """Reads all documents once."""
    whole = hashlib.blake2b(digest_size=16)
    hashes = bytearray()
    for texts in iterate_texts(dataset):
        for text in texts:
            encoded = text.encode("utf-8", "surrogatepass")
            whole.update(len(encoded).to_bytes(8, "little"))
            whole.update(encoded)
            hashes += hashlib.blake2b(encoded, digest_size=8).digest()
    return Digest(whole.hexdigest(), np.frombuffer(hashes, dtype=np.uint64))


def warn_of_copies(train: Digest, validation: Digest) -> None:
    """Tells how many documents occur more than once, in a split or in both."""
    for name, split in {"training": train, "validation": validation}.items():
        if copies := len(split.documents) - len(np.unique(split.documents)):
            logger.warning(
                "%d of the %d %s documents are copies of others; was a file given twice?",
                copies,
                len(split.documents),
                name,
            )
    if shared := int(np.isin(validation.documents, train.documents).sum()):
        logger.warning(
            "%d of the %d validation documents are also training documents, so the validation loss is too low; remove "
            "the copies, or name other validation data",
            shared,
            len(validation.documents),
        )


def _load_files(suffix: str, files: list[Path]) -> Dataset:
    chosen = [str(path) for path in files if path.suffix == suffix]
    options = {"sample_by": "document"} if suffix == ".txt" else {}
    if not any(Path(name).stat().st_size for name in chosen):
        raise UserError(f"{', '.join(chosen)} is empty; give a file with text")
    try:
        return load_dataset(LOADERS[suffix], data_files=chosen, split="train", **options)
    except Exception as error:  # the loaders raise whatever their parser raised
        cause = error.__cause__ or error
        raise UserError(f"cannot read {', '.join(chosen)} as {LOADERS[suffix]}: {first_line(cause)}") from error


def _load_hub(name: str, config: str | None, split: str) -> Dataset:
    try:
        dataset = load_dataset(name, config, split=split)
    except Exception as error:  # network, missing name, missing configuration and missing split all differ in type
        raise UserError(
            f"cannot load the split {split!r} of the dataset {name!r}: {first_line(error)}; check the name, its "
            "configuration and the network, or give builtin or a local file"
        ) from error
    if isinstance(dataset, DatasetDict) or not isinstance(dataset, Dataset):
        raise UserError(f"the split {split!r} of {name!r} is not one table of examples; choose one split")
    return dataset


def _select_text(dataset: Dataset, column: str, source: str) -> Dataset:
    if column not in dataset.column_names:
        raise UserError(
            f"{source} has no column {column!r}, only {dataset.column_names}; set text_column to one of them"
        )
    kind = dataset.features[column]
    if not isinstance(kind, Value) or kind.dtype not in ("string", "large_string"):
        raise UserError(
            f"the column {column!r} of {source} holds {kind}, not text; set text_column to a column of strings"
        )
    dataset = dataset.select_columns([column])
    dataset = dataset if column == "text" else dataset.rename_column(column, "text")
    return dataset if kind.dtype == "string" else dataset.cast_column("text", Value("string"))
