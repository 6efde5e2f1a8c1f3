"""Makes a tokenizer and token streams on disk from documents; all processes read them there."""

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
from ...common.special_tokens import warn_of_unknown
from ..arguments import PretrainArguments
from ..outputs import checksums
from ..outputs.run_folder import RunFolder
from . import digests, documents, tokenizer
from .chat_encoder import ChatEncoder
from .chat_template import digest_of, give_chat_template
from .duplicates import warn_of_copies
from .indexed import IndexedTokens
from .indexed_names import is_indexed
from .objectives import make_objective
from .streaming import split_stream
from .text_encoder import TextEncoder
from .token_cache import write_cached
from .token_stream import TOKENS, TokenStream

SOURCE_FILE = "source.json"
VALIDATION = "validation"
# The data folder has a folder for each source, named as the source is. Sources cannot have these names.
TAKEN_NAMES = (SOURCE_FILE, VALIDATION)
# Hashes of the texts of a run, by the field of `Source` that holds them.
Fingerprints = Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """What the tokenizer and the token streams were made from, and the files that were made.

    Two sources are equal if both give the same tokens; `files` is not compared.

    Attributes:
        name: what records call the data.
        training_data, validation_data: fingerprints of the texts.
        tokenizer: a fingerprint of a given tokenizer, or how it is trained.
        chat_template: a digest of the template that renders conversations; empty for texts. Only this field tells
            templates apart that tokenizers have of their own.
        files: size and checksum of every file that was made, by its path relative to the folder of the run.
    """

    name: str
    training_data: str
    validation_data: str
    tokenizer: str
    chat_template: str = ""
    files: Mapping[str, Sequence[int]] = field(default_factory=dict, compare=False)

    def fingerprint(self) -> dict[str, Any]:
        """What must not have changed when a run is resumed: its texts, its tokenizer and its tokens."""
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
        streams: the documents of each stream that is made and their fingerprint, by its folder below the data: a source
            that is tokenized before the run, or the validation data unless it reads tokens that exist already.
        training_data, validation_data: fingerprints of all training data, and of the validation data.
    """

    streams: Mapping[str, tuple[Dataset, str]]
    training_data: str
    validation_data: str

    @property
    def train(self) -> list[Dataset]:
        """The documents to train on."""
        return [documents for name, (documents, _) in self.streams.items() if name != VALIDATION]


def prepare(arguments: PretrainArguments, run: RunFolder) -> Source:
    """Makes tokenizer and token streams in `run.prepared`, unless the run has them already from the same source.

    Only one process may call this.

    Raises:
        UserError: the data or the tokenizer cannot be used, or what the run already has is damaged.
    """
    splits, name = _load_splits(arguments), documents.describe_sources(arguments)
    given = None if arguments.tokenizer == "bpe" else tokenizer.load_tokenizer(str(arguments.tokenizer))
    if given is None and not splits.train:
        raise UserError(f"{name} holds tokens already; name the tokenizer that made them")
    masks = arguments.objective == "masked_lm"
    identity, template = f"bpe {arguments.vocab_size}{' with masks' if masks else ''}", ""
    if given is not None:
        make_objective(arguments, given)  # refuses an unsuitable tokenizer before hours of tokenizing
        identity = tokenizer.fingerprint(given)
        if arguments.chat_column:
            # The digest is empty if the tokenizer keeps its own template, which the identity does not tell then.
            digest = give_chat_template(given, arguments.chat_template)
            identity += f" chat {digest}" if digest else ""
            template = digest_of(str(given.chat_template))
    source = Source(
        name=name,
        training_data=splits.training_data,
        validation_data=splits.validation_data,
        tokenizer=identity,
        chat_template=template,
    )
    stored = _read_source(run.data)
    if stored is not None and source == stored:
        _check_undamaged(run, stored)
        return stored
    texts = chain.from_iterable(documents.iterate_texts(dataset) for dataset in splits.train)
    chosen = tokenizer.train_bpe(texts, arguments.vocab_size, masks=masks) if given is None else given
    return _write_prepared(run, chosen, splits, source, arguments)


def fingerprints(arguments: PretrainArguments) -> Fingerprints:
    """The fingerprints of a run's texts, under the names of the fields of `Source`.

    Raises:
        UserError: the data cannot be used.
    """
    splits = _load_splits(arguments)
    return {"training_data": splits.training_data, "validation_data": splits.validation_data}


def _load_splits(arguments: PretrainArguments) -> Splits:
    documents.check_splits(arguments)
    return _load_stream(arguments) if arguments.streaming else _load(arguments)


def _load(arguments: PretrainArguments) -> Splits:
    """Loads the data, hashes all documents, and warns of those that occur twice."""
    _check_names(arguments)
    loaded = documents.load_documents(arguments)
    by_source = {name: digests.digest(dataset) for name, dataset in loaded.train.items()}
    held_out = None if loaded.validation is None else digests.digest(loaded.validation)
    prints = {
        name: (by_source[name] if name in by_source else IndexedTokens.open(Path(source.dataset))).fingerprint
        for name, source in arguments.sources.items()
    }
    training = prints["train"] if set(prints) == {"train"} else json.dumps(prints)
    validation = _validation_fingerprint(arguments, held_out)
    if training == validation:
        raise UserError(
            f"the validation data is the training data of {documents.describe_sources(arguments)}; name other "
            "validation data, or none to have some of the training data held out"
        )
    if held_out is not None and by_source:
        warn_of_copies(by_source, held_out)
    streams = {name: (dataset, by_source[name].fingerprint) for name, dataset in loaded.train.items()}
    if loaded.validation is not None:
        streams[VALIDATION] = loaded.validation, validation
    return Splits(streams, training, validation)


def _check_names(arguments: PretrainArguments) -> None:
    """Refuses a source whose folder would have a taken name; tokens that exist already are not copied into a folder."""
    for name, source in arguments.sources.items():
        if name in TAKEN_NAMES and not is_indexed(source.dataset):
            raise UserError(f"mixture.{name}: {' and '.join(TAKEN_NAMES)} are taken; call this source something else")


def _validation_fingerprint(arguments: PretrainArguments, held_out: digests.Digest | None) -> str:
    """A fingerprint of the validation documents, or of validation tokens, or the share of training tokens held out."""
    if held_out is not None:
        return held_out.fingerprint
    if arguments.validation_dataset is not None:
        return IndexedTokens.open(Path(arguments.validation_dataset)).fingerprint
    return f"the last {arguments.validation_share} of the training data"


def _load_stream(arguments: PretrainArguments) -> Splits:
    """Loads the validation documents alone. Fingerprint and copies of the stream are those of its first documents."""
    named = documents.load_validation(arguments)
    first, validation = split_stream(documents.load_stream(arguments.dataset, arguments), named)
    beginning, held_out = digests.digest(first), digests.digest(validation)
    if named is not None:
        warn_of_copies({"train": beginning}, held_out)
    of_validation = held_out.fingerprint
    return Splits({VALIDATION: (validation, of_validation)}, f"stream {beginning.fingerprint}", of_validation)


def _write_prepared(
    run: RunFolder,
    chosen: PreTrainedTokenizerBase,
    splits: Splits,
    source: Source,
    arguments: PretrainArguments,
) -> Source:
    """Stores the tokenizer and all splits as token streams, and at the end the source with checksums of these files."""
    chosen.save_pretrained(run.prepared / run.tokenizer.name)
    data = run.prepared / run.data.name
    data.mkdir(parents=True)
    encoder = ChatEncoder(chosen) if arguments.chat_column else TextEncoder(chosen)
    cache = None if arguments.token_cache is None else Path(arguments.token_cache)
    for name, (dataset, fingerprint) in splits.streams.items():
        identity = {"documents": fingerprint, "tokenizer": encoder.fingerprint}
        write_cached(dataset, encoder, data / name, cache=cache, workers=arguments.tokenizer_workers, identity=identity)
    if VALIDATION in splits.streams and arguments.objective == "causal_lm":
        warn_of_unknown(chosen, TokenStream.open(data / VALIDATION).scored())
    made = [file for file in run.prepared.rglob("*") if file.is_file()]
    source = replace(source, files=checksums.measure_files(run.prepared, made))
    write_json(data / SOURCE_FILE, asdict(source))
    return source


def _check_undamaged(run: RunFolder, source: Source) -> None:
    """Refuses files of the tokenizer and the token streams that have changed since they were written."""
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
