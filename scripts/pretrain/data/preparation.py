"""From documents to a tokenizer and token streams on disk, from which every process reads."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ...common.atomic_file import write_json
from ...common.errors import UserError
from ..arguments import PretrainArguments
from ..outputs.run_folder import RunFolder, remove
from . import documents, tokenizer
from .packing import PackedSequences, Sequences, StreamSegments, TokenStream, write_stream

SOURCE_FILE = "source.json"


@dataclass(frozen=True)
class Source:
    """What the tokenizer and the token streams were made from: fingerprints of the texts and the tokenizer's origin."""

    name: str
    training_data: str
    validation_data: str
    tokenizer: str


def prepare(arguments: PretrainArguments, run: RunFolder) -> Source:
    """Makes tokenizer and token streams in `run.prepared`, unless the run already has those of the same source.

    Only one process may call this.

    Raises:
        UserError: the data or the tokenizer cannot be used.
    """
    remove(run.prepared)
    loaded = documents.load_documents(arguments)
    given = None if arguments.tokenizer == "bpe" else tokenizer.load_tokenizer(str(arguments.tokenizer))
    source = Source(
        name=loaded.name,
        training_data=documents.fingerprint(loaded.train),
        validation_data=documents.fingerprint(loaded.validation),
        tokenizer=tokenizer.fingerprint(given) if given else f"bpe {arguments.vocab_size}",
    )
    if source.training_data == source.validation_data:
        raise UserError(f"the validation data is the training data of {loaded.name}; name other documents, or neither")
    if source != _read_source(run.data):
        chosen = given or tokenizer.train_bpe(documents.iterate_texts(loaded.train), arguments.vocab_size)
        _write_prepared(run, chosen, loaded, source)
    return source


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
) -> None:
    """Stores the tokenizer, and both splits as token streams."""
    chosen.save_pretrained(run.prepared / run.tokenizer.name)
    data = run.prepared / run.data.name
    write_stream(documents.iterate_texts(loaded.train), chosen, data / "train")
    write_stream(documents.iterate_texts(loaded.validation), chosen, data / "validation")
    write_json(data / SOURCE_FILE, asdict(source))


def _read_source(data: Path) -> Source | None:
    """What the token streams of an earlier run were made from; None if there are none."""
    try:
        return Source(**json.loads((data / SOURCE_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
