"""The texts of the study as character tokens."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from torch import Tensor

from ...common.errors import UserError, first_line

TRAIN_SHARE = 0.9
# Names of texts by their sha256.
KNOWN = {
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed": "Tiny Shakespeare",
    "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8": "WikiText-2 validation",
    "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0": "WikiText-2 test",
}


@dataclass(frozen=True)
class Corpus:
    """A text in two splits; a token is the index of a character in the sorted vocabulary of both.

    Attributes:
        train, validation: `[N]`, int64.
        sources: by split, what the text is, its length and its checksum.
    """

    train: Tensor
    validation: Tensor
    vocabulary: str
    sources: dict[str, dict[str, str | int]]

    @property
    def description(self) -> dict[str, Any]:
        """What results say about the text: its sources and the size of its vocabulary."""
        return {**self.sources, "vocabulary": len(self.vocabulary)}


def load_corpus(source: str, validation: str | None = None, *, expect: str | None = None) -> Corpus:
    """Reads a text; without a `validation` text, its last tenth is the validation split.

    Args:
        source, validation: a file, a folder, or the name of a Hub dataset with optional configuration and split,
            `NAME[:CONFIGURATION[:SPLIT]]`.
        expect: what `source` must be, a name in `KNOWN`; None takes any text.

    Raises:
        UserError: the text is missing, empty or another one.
    """
    text = read_text(source)
    if expect is not None and describe(text)["text"] != expect:
        raise UserError(
            f"{source} is not {expect}: its sha256 is {describe(text)['sha256']}; give that text, or --other_text to "
            "run the study on this one"
        )
    if validation is None:
        cut = int(TRAIN_SHARE * len(text))
        train, held_out = text[:cut], text[cut:]
        splits = {"train": (text, "first 90 %"), "validation": (text, "last 10 %")}
    else:
        train, held_out = text, read_text(validation)
        splits = {"train": (train, "whole"), "validation": (held_out, "whole")}
    sources = {name: {**describe(source), "split": split} for name, (source, split) in splits.items()}
    vocabulary = "".join(sorted(set(train) | set(held_out)))
    index_of = {character: index for index, character in enumerate(vocabulary)}
    train_tokens, validation_tokens = (torch.tensor([index_of[c] for c in part]) for part in (train, held_out))
    return Corpus(train_tokens, validation_tokens, vocabulary, sources)


def describe(text: str) -> dict[str, str | int]:
    """The name of a text if its checksum is known, its length and its checksum."""
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return {"text": KNOWN.get(digest, "unknown"), "characters": len(text), "sha256": digest}


def read_text(source: str) -> str:
    """The text of a file as it is, or of all rows of a dataset.

    Raises:
        UserError: the text cannot be found or read, or is too short to be split.
    """
    path = Path(source)
    if path.is_file():
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {source} as UTF-8 text: {error}") from error
    elif path.is_dir() or not _looks_like_path(source):
        text = _read_dataset(source)
    else:
        raise UserError(f"there is no file {source}; give a text file or the name of a Hub dataset")
    if len(text) < 1000:
        raise UserError(f"{source} has {len(text)} characters; give a text of 1,000 or more")
    return text


def _looks_like_path(source: str) -> bool:
    return Path(source).suffix == ".txt" or source.startswith((".", "/", "~")) or source.count("/") > 1


def _read_dataset(source: str) -> str:
    name, configuration, split = (*source.split(":"), "", "")[:3]
    try:
        dataset = load_dataset(name, configuration or None, split=split or "train")
    except Exception as error:  # network, missing name, missing configuration and missing split all differ in type
        raise UserError(
            f"cannot load the dataset {source}: {first_line(error)}; check the name and the network, "
            "or give a text file"
        ) from error
    if not isinstance(dataset, Dataset) or "text" not in dataset.column_names:
        raise UserError(f"the dataset {source} has no column 'text'; give another one, or a text file")
    return "".join(row if row.endswith("\n") else f"{row}\n" for row in dataset["text"])
