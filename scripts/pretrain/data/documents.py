"""Where training text comes from: the built-in corpus, local files, or the Hugging Face Hub."""

import glob
import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, IterableDataset, Value, concatenate_datasets, load_dataset
from datasets.table import CastError

from ...common.builtin_corpus import Split, builtin_conversations, builtin_corpus_name, builtin_documents
from ...common.errors import UserError, first_line, in_one_line
from ..arguments import PretrainArguments
from .files import LOADERS, find_files, leave_out_empty, warn_of_unread
from .indexed_names import is_indexed

logger = logging.getLogger(__name__)

# The same documents are held out whatever the seed of the run, so that runs with different seeds can be compared.
HOLD_OUT_SEED = 0
BATCH_DOCUMENTS = 1000
# Arrow's types of text.
TEXT_TYPES = ("string", "large_string", "string_view")
# Bytes at the start of a file by which it is told from another one.
BEGINNING = 4096


@dataclass(frozen=True)
class Documents:
    """The documents of a run, as datasets with one column `text`.

    Attributes:
        train: the training documents of each source, except for sources whose tokens exist already.
        validation: the validation documents; None if validation reads tokens that exist already.
    """

    train: Mapping[str, Dataset]
    validation: Dataset | None


def load_documents(arguments: PretrainArguments) -> Documents:
    """Loads all splits. Held-out documents are taken out of the training split, but copies of them may remain there.

    Raises:
        UserError: the data cannot be found or read, lacks the column, or holds no text.
    """
    train = {
        name: load_builtin("train", arguments)
        if source.dataset == "builtin"
        else load_text(source.dataset, arguments, arguments.train_split)
        for name, source in arguments.sources.items()
        if not is_indexed(source.dataset)
    }
    validation = load_validation(arguments)
    if validation is None and arguments.validation_dataset is None and train:
        share, divisible = arguments.validation_share, arguments.chat_column is None
        parts = {name: hold_out(dataset, share, divisible=divisible) for name, dataset in train.items()}
        train = {name: part[0] for name, part in parts.items()}
        validation = concatenate_datasets([part[1] for part in parts.values()])
    return Documents(train, validation)


def check_splits(arguments: PretrainArguments) -> None:
    """Refuses splits of files, which have none: a file named for two splits would be learned and then scored.

    Raises:
        UserError: a split or a configuration is named, and none of the data that could have it is on the Hub.
    """
    trained = [source.dataset for source in arguments.sources.values()]
    if arguments.train_split != "train" and not any(map(is_hub_name, trained)):
        raise UserError(f"train_split={arguments.train_split} is a split of a Hub dataset, not of {', '.join(trained)}")
    named = [*trained, *filter(None, [arguments.validation_dataset])]
    if arguments.dataset_config is not None and not any(map(is_hub_name, named)):
        raise UserError(f"dataset_config={arguments.dataset_config} is of a Hub dataset, not of {', '.join(named)}")
    validated = arguments.validation_dataset or arguments.dataset
    if arguments.validation_split is not None and not is_hub_name(validated):
        raise UserError(
            f"validation_split={arguments.validation_split} is a split of a Hub dataset, not of {validated}; name a "
            "file in validation_dataset, or leave it out to hold out documents"
        )


def load_builtin(split: Split, arguments: PretrainArguments) -> Dataset:
    """The documents of the built-in corpus, or conversations about them."""
    if arguments.chat_column is None:
        return Dataset.from_dict({"text": builtin_documents(split)})
    return Dataset.from_dict({"text": [as_json(turns) for turns in builtin_conversations(split)]})


def load_validation(arguments: PretrainArguments) -> Dataset | None:
    """The validation documents that the arguments name, or those of the built-in corpus; None if there are none."""
    if arguments.validation_dataset is not None:
        if is_indexed(arguments.validation_dataset):
            return None
        return load_text(arguments.validation_dataset, arguments, arguments.validation_split or "validation")
    if arguments.validation_split is not None:
        return load_text(arguments.dataset, arguments, arguments.validation_split)
    if arguments.mixture is None and arguments.dataset == "builtin":
        return load_builtin("validation", arguments)
    return None


def describe_sources(arguments: PretrainArguments) -> str:
    """What records and model cards call the training data."""

    def describe(dataset: str) -> str:
        if dataset == "builtin":
            return builtin_corpus_name()
        if is_hub_name(dataset):
            return " ".join(filter(None, [dataset, arguments.dataset_config]))
        return Path(dataset).name

    return ", ".join(describe(source.dataset) for source in arguments.sources.values())


def load_text(source: str, arguments: PretrainArguments, split: str) -> Dataset:
    """Loads one source as a dataset with the column `text`; documents without text are left out with a warning."""
    files = find_files(source)
    if files is None:
        parts = [_load_hub(source, arguments.dataset_config, split)]
    else:
        warn_of_unread(source)
        filled = leave_out_empty(files)
        kinds = ([path for path in filled if path.suffix == suffix] for suffix in LOADERS)
        parts = [_load_files(kind) for kind in kinds if kind]
    try:
        selected = concatenate_datasets([_select(part, arguments, source) for part in parts])
        dataset = selected.filter(
            lambda texts: [bool(text and text.strip()) for text in texts], input_columns="text", batched=True
        )
    except UnicodeDecodeError as error:  # the loaders of JSON and Parquet do not look at the text
        raise UserError(f"cannot read the text of {source}: {error}; convert it to UTF-8") from error
    if len(dataset) == 0:
        raise UserError(
            f"{source} holds no text in the column {arguments.text_column!r}; give data with at least one document"
        )
    if empty := len(selected) - len(dataset):
        logger.warning("%d of %d documents of %s hold no text and are left out", empty, len(selected), source)
    return dataset


def load_stream(source: str, arguments: PretrainArguments) -> IterableDataset:
    """The documents of one source one after the other, as they arrive; those without text are left out."""
    files = find_files(source)
    if files is None:
        stream = _load_hub(source, arguments.dataset_config, arguments.train_split, streaming=True)
    else:
        warn_of_unread(source)
        files = leave_out_empty(files)
        if len(kinds := sorted({file.suffix for file in files})) > 1:
            raise UserError(f"{source} mixes {' and '.join(kinds)} files, and streaming reads one kind; convert them")
        stream = _load_files(files, streaming=True)
    column = arguments.chat_column or arguments.text_column
    if stream.column_names is not None:
        _check_column(stream.column_names, column, "chat_column" if arguments.chat_column else "text_column", source)

    def to_text(row: dict[str, Any]) -> dict[str, str]:
        value = row[column]
        if arguments.chat_column:
            return {"text": as_json(value)}
        if not isinstance(value, str | None):
            raise UserError(f"the column {column!r} of {source} holds {value!r}, not text; set text_column to another")
        return {"text": value or ""}

    return stream.map(to_text).filter(lambda row: bool(row["text"].strip()))


def is_hub_name(source: str) -> bool:
    """Whether `source` is neither the built-in corpus nor something on this machine."""
    try:
        return source != "builtin" and not is_indexed(source) and find_files(source) is None
    except UserError:  # a file that is gone; a card may be written long after it was read
        return False


def hold_out(dataset: Dataset, share: float, *, divisible: bool) -> tuple[Dataset, Dataset]:
    """Splits off `share` of the documents, at least one and not all; a single document is cut in two between lines.

    Raises:
        UserError: there is a single document, and it is not divisible.
    """
    if len(dataset) == 1 and not divisible:
        raise UserError(
            "one conversation cannot be divided into training and validation data; give more of them, or name "
            "validation_dataset"
        )
    if len(dataset) == 1:
        head, tail = cut_tail(dataset[0]["text"], share)
        return Dataset.from_dict({"text": [head]}), Dataset.from_dict({"text": [tail]})
    count = min(max(1, round(share * len(dataset))), len(dataset) - 1)
    order = np.random.default_rng(HOLD_OUT_SEED).permutation(len(dataset))
    return dataset.select(np.sort(order[count:])), dataset.select(np.sort(order[:count]))


def cut_tail(text: str, share: float) -> tuple[str, str]:
    """Cuts a text in two, if possible between lines; the second part has about `share` of the characters."""
    cut = len(text) - max(1, round(share * len(text)))
    line_end = text.find("\n", cut, len(text) - 1)
    cut = cut if line_end < 0 else line_end + 1
    return text[:cut], text[cut:]


def iterate_texts(dataset: Dataset) -> Iterator[list[str]]:
    """Yields the documents in batches."""
    for batch in dataset.iter(batch_size=BATCH_DOCUMENTS):
        yield batch["text"]


def _load_files(files: list[Path], streaming: bool = False) -> Any:
    """A `Dataset` of all `files`, which are of one kind, or an `IterableDataset`."""
    patterns, loader = [glob.escape(str(path)) for path in files], LOADERS[files[0].suffix]
    # A byte order mark is no part of a text; JSON and Parquet files are read without it.
    options = {"sample_by": "document", "encoding": "utf-8-sig"} if loader == "text" else {}
    try:
        # The cache of datasets tells files apart by path and time, and `rsync` may leave another file with the same.
        name = f"beginnings-{checksum_of_beginnings(files):08x}"
        return load_dataset(loader, name, data_files=patterns, split="train", streaming=streaming, **options)
    except Exception as error:  # the loaders raise whatever their parser raised
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.filename and Path(str(cause.filename)) not in files:
            raise UserError(
                f"the cache of datasets cannot be written: {first_line(cause)}; set HF_HOME to a folder that can"
            ) from error
        rest = f" and {len(files) - 1} more files" if len(files) > 1 else ""
        raise UserError(f"cannot read {files[0]}{rest} as {loader}: {reason_of(cause)}") from error


def checksum_of_beginnings(files: list[Path]) -> int:
    """A checksum of the sizes and the first bytes of files, which is quick to compute however long they are."""
    checksum = 0
    for path in files:
        with path.open("rb") as file:
            checksum = zlib.crc32(b"%d " % path.stat().st_size + file.read(BEGINNING), checksum)
    return checksum


def reason_of(error: BaseException) -> str:
    """What an error of `datasets` says, in one line."""
    # The first line of this error says nothing; all of it names the columns that files do not share.
    return in_one_line(error) if isinstance(error, CastError) else first_line(error)


def _load_hub(name: str, config: str | None, split: str, streaming: bool = False) -> Any:
    """A `Dataset` of the Hub, or an `IterableDataset`."""
    try:
        dataset = load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # network, missing name, missing configuration and missing split all differ in type
        raise UserError(
            f"cannot load the split {split!r} of the dataset {name!r}: {first_line(error)}; check the name, its "
            "configuration and the network, or give builtin or a local file"
        ) from error
    if isinstance(dataset, DatasetDict) or not isinstance(dataset, Dataset | IterableDataset):
        raise UserError(f"the split {split!r} of {name!r} is not one table of examples; choose one split")
    return dataset


def _select(dataset: Dataset, arguments: PretrainArguments, source: str) -> Dataset:
    """The documents as a dataset with one column `text`; conversations as JSON."""
    if arguments.chat_column is None:
        return _select_text(dataset, arguments.text_column, source)
    column = arguments.chat_column
    _check_column(dataset.column_names, column, "chat_column", source)
    for turns in dataset.select(range(1))[column]:
        if not isinstance(turns, list) or not all(isinstance(turn, dict) and "role" in turn for turn in turns):
            raise UserError(
                f"the column {column!r} of {source} holds {str(turns)[:80]!r}, not messages with role and content; set "
                "chat_column to a column of conversations"
            )
    return dataset.map(lambda row: {"text": as_json(row[column])}, remove_columns=dataset.column_names)


def _check_column(names: list[str], column: str, option: str, source: str) -> None:
    """Raises UserError if the column that an option names is not among the `names` of a source."""
    if column not in names:
        raise UserError(f"{source} has no column {column!r}, only {names}; set {option} to one of them")


def as_json(turns: Any) -> str:
    """A conversation as JSON with sorted keys, so that equal conversations give equal text."""
    return json.dumps(turns, ensure_ascii=False, sort_keys=True)


def _select_text(dataset: Dataset, column: str, source: str) -> Dataset:
    _check_column(dataset.column_names, column, "text_column", source)
    kind = dataset.features[column]
    if not isinstance(kind, Value) or kind.dtype not in TEXT_TYPES:
        raise UserError(
            f"the column {column!r} of {source} holds {kind}, not text; set text_column to a column of strings"
        )
    dataset = dataset.select_columns([column])
    dataset = dataset if column == "text" else dataset.rename_column(column, "text")
    return dataset if kind.dtype == "string" else dataset.cast_column("text", Value("string"))
