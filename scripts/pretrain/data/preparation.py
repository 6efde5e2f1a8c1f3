"""From documents to a tokenizer and token streams on disk, from which every process reads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ...common.atomic_file import write_json
from ...common.errors import UserError
from ..arguments import PretrainArguments
from ..outputs import checksums
from ..outputs.run_folder import RunFolder
from . import digests, documents, tokenizer
from .chat_template import digest_of, give_chat_template
from .encoders import ChatEncoder, Encoder, TextEncoder
from .indexed import IndexedTokens, is_indexed
from .objectives import make_objective
from .streaming import split_stream
from .token_cache import write_cached
from .token_stream import TOKENS

SOURCE_FILE = "source.json"
VALIDATION = "validation"
# What lies beside the folders of sources, each of which is called as its source is.
TAKEN_NAMES = (SOURCE_FILE, VALIDATION)
# What recognizes the texts of a run, by what they are for.
Fingerprints = Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """What the tokenizer and the token streams were made from, and what was made.

    Attributes:
        name: of the data, for records.
        training_data, validation_data: fingerprints of the texts.
        tokenizer: its origin.
        chat_template: a digest of the one that writes conversations; empty for texts, None if an earlier version has
            not stored it. A tokenizer's own is in no other field.
        files: size and checksum of every file that was made, relative to the folder of the run; sources of the same
            texts and tokenizer are equal whatever was made from them.
    """

    name: str
    training_data: str
    validation_data: str
    tokenizer: str
    chat_template: str | None = field(default=None, compare=False)
    files: Mapping[str, Sequence[int]] = field(default_factory=dict, compare=False)

    def makes_same_as(self, other: "Source") -> bool:
        """Whether the same tokens are made from both, as far as it is known of an earlier version."""
        templates = {self.chat_template, other.chat_template}
        return self == other and (None in templates or len(templates) == 1)

    def fingerprint(self) -> dict[str, Any]:
        """What a run resumes with: the same texts, cut into the same tokens."""
        made = {name: measured for name, measured in self.files.items() if name.endswith(f"/{TOKENS}")}
        training = {name: measured for name, measured in made.items() if name != f"data/{VALIDATION}/{TOKENS}"}
        single = f"data/train/{TOKENS}"
        return {
            "training_data": self.training_data,
            "validation_data": self.validation_data,
            "tokenizer": self.tokenizer,
            "training_tokens": training[single] if set(training) == {single} else training,
            "validation_tokens": made.get(f"data/{VALIDATION}/{TOKENS}"),
        }


@dataclass(frozen=True)
class Splits:
    """The texts of a run.

    Attributes:
        train: the documents of each source that is tokenized before the run.
        validation: None if only the sources' own tokens are held out.
        name: of the data.
        training_data: fingerprint of all training data.
        validation_data: fingerprint of the validation documents.
        fingerprints: of the documents of each stream that is made, by its folder.
    """

    train: Mapping[str, Dataset]
    validation: Dataset | None
    name: str
    training_data: str
    validation_data: str
    fingerprints: Mapping[str, str]

    @property
    def streams(self) -> dict[str, Dataset]:
        """The documents of each stream that is made, by its folder below the data."""
        return {**self.train, **({} if self.validation is None else {VALIDATION: self.validation})}


def prepare(arguments: PretrainArguments, run: RunFolder) -> Source:
    """Makes tokenizer and token streams in `run.prepared`, unless the run already has those of the same source.

    Only one process may call this.

    Raises:
        UserError: the data or the tokenizer cannot be used, or what the run already has is damaged.
    """
    splits = _load_splits(arguments)
    given = None if arguments.tokenizer == "bpe" else tokenizer.load_tokenizer(str(arguments.tokenizer))
    if given is None and not splits.train:
        raise UserError(f"{splits.name} holds tokens already; name the tokenizer that made them")
    if given is not None:
        make_objective(arguments, given)  # refuses the tokenizer before it has worked for hours
    masks = arguments.objective == "masked_lm"
    source = Source(
        name=splits.name,
        training_data=splits.training_data,
        validation_data=splits.validation_data,
        tokenizer=_fit(given, arguments) if given else f"bpe {arguments.vocab_size}{' with masks' if masks else ''}",
        chat_template=digest_of(str(given.chat_template)) if given and arguments.chat_column else "",
    )
    stored = _read_source(run.data)
    if stored is not None and source.makes_same_as(stored):
        _check_undamaged(run, stored)
        return stored
    texts = chain.from_iterable(documents.iterate_texts(dataset) for dataset in splits.train.values())
    chosen = given or tokenizer.train_bpe(texts, arguments.vocab_size, masks=masks)
    return _write_prepared(run, chosen, splits, source, arguments)


def fingerprints(arguments: PretrainArguments) -> Fingerprints:
    """What recognizes the texts of a run, under the names that `Source` has for them.

    Raises:
        UserError: the data cannot be used.
    """
    splits = _load_splits(arguments)
    return {"training_data": splits.training_data, "validation_data": splits.validation_data}


def _fit(given: PreTrainedTokenizerBase, arguments: PretrainArguments) -> str:
    """Gives the tokenizer the chat template that the run asks for, and returns the fingerprint of both."""
    template = give_chat_template(given, arguments.chat_template) if arguments.chat_column else ""
    return f"{tokenizer.fingerprint(given)} chat {template}" if template else tokenizer.fingerprint(given)


def _load_splits(arguments: PretrainArguments) -> Splits:
    return _load_stream(arguments) if arguments.streaming else _load(arguments)


def _load(arguments: PretrainArguments) -> Splits:
    """Reads all documents once, and tells of copies."""
    _check_names(arguments)
    loaded = documents.load_documents(arguments)
    by_source = {name: digests.digest(dataset) for name, dataset in loaded.train.items()}
    held_out = None if loaded.validation is None else digests.digest(loaded.validation)
    sources = arguments.sources
    tokens = {name: IndexedTokens.open(Path(s.dataset)) for name, s in sources.items() if is_indexed(s.dataset)}
    prints = {
        name: by_source[name].fingerprint if name in by_source else tokens[name].fingerprint
        for name in arguments.sources
    }
    training = prints["train"] if set(prints) == {"train"} else json.dumps(prints)
    validation = _validation_fingerprint(arguments, held_out)
    if training == validation:
        raise UserError(f"the validation data is the training data of {loaded.name}; name other documents, or neither")
    if held_out is not None and by_source:
        digests.warn_of_copies(by_source, held_out)
    streams = {name: digest.fingerprint for name, digest in by_source.items()} | {VALIDATION: validation}
    return Splits(loaded.train, loaded.validation, loaded.name, training, validation, streams)


def _check_names(arguments: PretrainArguments) -> None:
    """Refuses a source whose tokens would lie where others do; tokens that exist already stay where they are."""
    for name, source in arguments.sources.items():
        if name in TAKEN_NAMES and not is_indexed(source.dataset):
            raise UserError(f"mixture.{name}: {' and '.join(TAKEN_NAMES)} are taken; call this source something else")


def _validation_fingerprint(arguments: PretrainArguments, held_out: digests.Digest | None) -> str:
    """Of validation documents, of validation tokens, or of the share of the training tokens that is held out."""
    if held_out is not None:
        return held_out.fingerprint
    if arguments.validation_dataset is not None:
        return IndexedTokens.open(Path(arguments.validation_dataset)).fingerprint
    return f"the last {arguments.validation_share} of the training data"


def _load_stream(arguments: PretrainArguments) -> Splits:
    """Reads the validation documents alone, and recognizes the stream by its first ones."""
    named = documents.load_validation(arguments)
    first, validation = split_stream(documents.load_stream(arguments.dataset, arguments), named)
    held_out = digests.digest(validation)
    training = f"stream {digests.digest(first).fingerprint}"
    name = documents.describe_sources(arguments)
    return Splits({}, validation, name, training, held_out.fingerprint, {VALIDATION: held_out.fingerprint})


def _write_prepared(
    run: RunFolder,
    chosen: PreTrainedTokenizerBase,
    splits: Splits,
    source: Source,
    arguments: PretrainArguments,
) -> Source:
    """Stores the tokenizer, all splits as token streams, and last the source with the checksums of these files."""
    chosen.save_pretrained(run.prepared / run.tokenizer.name)
    data = run.prepared / run.data.name
    data.mkdir(parents=True)
    encoder: Encoder = ChatEncoder(chosen) if arguments.chat_column else TextEncoder(chosen)
    cache = None if arguments.token_cache is None else Path(arguments.token_cache)
    for name, dataset in splits.streams.items():
        identity = {"documents": splits.fingerprints[name], "tokenizer": encoder.fingerprint}
        write_cached(dataset, encoder, data / name, cache=cache, workers=arguments.tokenizer_workers, identity=identity)
    made = [file for file in run.prepared.rglob("*") if file.is_file()]
    source = replace(source, files=checksums.measure_files(run.prepared, made))
    write_json(data / SOURCE_FILE, asdict(source))
    return source


def _check_undamaged(run: RunFolder, source: Source) -> None:
    """Refuses tokenizer and token streams that are not what was prepared."""
    if damage := checksums.find_damage(run.path, source.files):
        raise UserError(
            f"the prepared data in {run.path} is damaged: {damage}; delete {run.data} to have it prepared again"
        )


def _read_source(data: Path) -> Source | None:
    """What the token streams of an earlier run were made from; None if there are none, or none with checksums."""
    try:
        source = Source(**json.loads((data / SOURCE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return source if source.files else None
