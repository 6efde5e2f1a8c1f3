"""From documents to a tokenizer and token streams on disk, from which every process reads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...common.atomic_file import write_json
from ...common.errors import UserError
from ..arguments import PretrainArguments
from ..outputs import checksums
from ..outputs.run_folder import RunFolder
from . import documents, tokenizer
from .packing import PackedSequences, Sequences, StreamSegments, TokenStream, write_stream

SOURCE_FILE = "source.json"


@dataclass(frozen=True)
class Source:
    """What the tokenizer and the token streams were made from, and what was made.

    Attributes:
        name: of the data, for records.
        training_data, validation_data: fingerprints of the texts.
        tokenizer: its origin.
        files: size and checksum of every file that was made, relative to the folder of the run; sources of the same
            texts and tokenizer are equal whatever was made from them.
    """

    name: str
    training_data: str
    validation_data: str
    tokenizer: str
    files: Mapping[str, Sequence[int]] = field(default_factory=dict, compare=False)

    def fingerprint(self) -> dict[str, Any]:
        """What a run resumes with: the same texts, cut into the same tokens."""
        return {
            "training_data": self.training_data,
            "validation_data": self.validation_data,
            "tokenizer": self.tokenizer,
            "training_tokens": self.files["data/train/tokens.bin"],
            "validation_tokens": self.files["data/validation/tokens.bin"],
        }


def prepare(arguments: PretrainArguments, run: RunFolder) -> Source:
    """Makes tokenizer and token streams in `run.prepared`, unless the run already has those of the same source.

    Only one process may call this.

    Raises:
        UserError: the data or the tokenizer cannot be used, or what the run already has is damaged.
    """
    loaded = documents.load_documents(arguments)
    given = None if arguments.tokenizer == "bpe" else tokenizer.load_tokenizer(str(arguments.tokenizer))
    train, validation = documents.digest(loaded.train), documents.digest(loaded.validation)
    source = Source(
        name=loaded.name,
        training_data=train.fingerprint,
        validation_data=validation.fingerprint,
        tokenizer=tokenizer.fingerprint(given) if given else f"bpe {arguments.vocab_size}",
    )
    if source.training_data == source.validation_data:
        raise UserError(f"the validation data is the training data of {loaded.name}; name other documents, or neither")
    documents.warn_of_copies(train, validation)
    stored = _read_source(run.data)
    if source == stored:
        _check_undamaged(run, stored)
        return stored
    chosen = given or tokenizer.train_bpe(documents.iterate_texts(loaded.train), arguments.vocab_size)
    return _write_prepared(run, chosen, loaded, source)


def open_sequences(
    data: Path, arguments: PretrainArguments, pad: int, global_batch: int
) -> tuple[Sequences, Sequences]:
    """The training and validation sequences: packed, or as streams, one for each sequence of an update.

    Raises:
        UserError: the training data is shorter than one sequence, or one of each stream.
    """
    train, validation = (TokenStream.open(data / split) for split in ("train", "validation"))
    if arguments.carry_memory:
        return _as_streams(train, validation, arguments, pad, global_batch)
    return _as_packed(train, validation, arguments, pad)


def _as_packed(
    train: TokenStream, validation: TokenStream, arguments: PretrainArguments, pad: int
) -> tuple[PackedSequences, PackedSequences]:
    """Sequences that are read independently of each other."""
    length = arguments.sequence_length
    if len(train.tokens) < length:
        raise UserError(
            f"{arguments.dataset} has {len(train.tokens)} tokens for training, fewer than one sequence of "
            f"sequence_length={length}; lower it or give more data"
        )
    return (
        PackedSequences(train, length, pad=pad, mask_documents=arguments.mask_documents, score_all=False),
        PackedSequences(validation, length, pad=pad, mask_documents=arguments.mask_documents, score_all=True),
    )


def _as_streams(
    train: TokenStream, validation: TokenStream, arguments: PretrainArguments, pad: int, streams: int
) -> tuple[StreamSegments, StreamSegments]:
    """The training text as `streams` streams, and the validation text as one."""
    length = arguments.sequence_length
    if len(train.tokens) <= streams * length:
        raise UserError(
            f"{arguments.dataset} has {len(train.tokens)} tokens for training, too few for {streams} streams of "
            f"sequence_length={length} or more; lower it or the global batch, or give more data"
        )
    return (
        StreamSegments(train, length, parts=streams, pad=pad),
        StreamSegments(validation, length, parts=1, pad=pad),
    )


def _write_prepared(
    run: RunFolder, chosen: PreTrainedTokenizerBase, loaded: documents.Documents, source: Source
) -> Source:
    """Stores the tokenizer, both splits as token streams, and last the source with the checksums of these files."""
    chosen.save_pretrained(run.prepared / run.tokenizer.name)
    data = run.prepared / run.data.name
    write_stream(documents.iterate_texts(loaded.train), chosen, data / "train")
    write_stream(documents.iterate_texts(loaded.validation), chosen, data / "validation")
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
