"""Opens the sequences of a run and their order, from tokens that `prepare` wrote or that existed before."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...common.errors import UserError
from ...common.special_tokens import start_token_id
from ..arguments import PretrainArguments
from ..outputs.run_folder import RunFolder
from .anchored import AnchoredSequences
from .batch_order import MixtureOrder, TrainingOrder, block_within
from .indexed import IndexedSamples, IndexedTokens
from .indexed_names import is_indexed
from .packing import BestFitSequences, PackedSequences, StreamSegments
from .preparation import VALIDATION
from .sequences import MixedSequences, Sequences
from .streaming import StreamedSequences, StreamOrder
from .token_stream import TokenStream
from .tokenization import decoded_bytes


def open_data(
    run: RunFolder, arguments: PretrainArguments, tokenizer: PreTrainedTokenizerBase, global_batch: int
) -> tuple[Sequences, Sequences, TrainingOrder]:
    """The training sequences, the validation sequences, and the order in which updates read the former.

    Raises:
        UserError: a source is shorter than one sequence, or does not fit the arguments.
    """
    folder = run.current(run.data)
    if arguments.streaming:
        validation = _open_validation(folder, arguments, tokenizer)
        streamed = StreamedSequences(run.stream, arguments)
        return streamed, validation, StreamOrder(arguments, run, tokenizer, global_batch)
    if arguments.carry_memory:
        return _open_memory_streams(folder, arguments, tokenizer, global_batch)
    parts = {name: _open_source(folder, name, arguments, tokenizer) for name in arguments.sources}
    order = _order(parts, arguments, global_batch)
    train = parts["train"] if set(parts) == {"train"} else MixedSequences(parts)
    return train, _open_validation(folder, arguments, tokenizer), order


def _open_source(
    folder: Path, name: str, arguments: PretrainArguments, tokenizer: PreTrainedTokenizerBase
) -> Sequences:
    """The training sequences of one source."""
    dataset = arguments.sources[name].dataset
    if is_indexed(dataset):
        data = _open_indexed(dataset, tokenizer)
        is_apart = (folder / VALIDATION).exists() or arguments.validation_dataset is not None
        span = _units(data, arguments) if is_apart else _divide(data, arguments, dataset)[0]
        return _as_sequences(data, span, arguments, tokenizer, score_all=False)
    return _pack(TokenStream.open(folder / name), dataset, arguments, tokenizer, score_all=False)


def _open_validation(folder: Path, arguments: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Sequences:
    """The validation sequences: of tokens that the user named, of documents, or of the end of the training tokens."""
    named = arguments.validation_dataset
    if (folder / VALIDATION).exists():
        stream = TokenStream.open(folder / VALIDATION)
        return _pack(stream, "the validation data", arguments, tokenizer, score_all=True)
    if named is not None:
        data = _open_indexed(named, tokenizer)
        return _as_sequences(data, _units(data, arguments), arguments, tokenizer, score_all=True)
    if len(arguments.sources) > 1:
        raise UserError("a mixture of tokens that exist already holds nothing out; name validation_dataset")
    (source,) = arguments.sources.values()
    data = _open_indexed(source.dataset, tokenizer)
    _, held_out = _divide(data, arguments, source.dataset)
    return _as_sequences(data, held_out, arguments, tokenizer, score_all=True)


def _open_indexed(dataset: str, tokenizer: PreTrainedTokenizerBase) -> IndexedTokens:
    """Opens tokens that exist already, and checks that the tokenizer has them."""
    data = IndexedTokens.open(Path(dataset))
    data.check_vocabulary(tokenizer)
    return data


def _units(data: IndexedTokens, arguments: PretrainArguments) -> range:
    """The numbers of what can be held out: samples if the file has samples of the right length, else documents."""
    return range(len(data.sizes) if data.is_cut_for(arguments.sequence_length) else len(data.documents) - 1)


def _divide(data: IndexedTokens, arguments: PretrainArguments, dataset: str) -> tuple[range, range]:
    """The units to train on, and those at the end that are held out."""
    units = _units(data, arguments)
    if len(units) < 2:
        raise UserError(
            f"{dataset} has {len(units)} samples or documents, and one must be held out; name validation_dataset"
        )
    begin = len(units) - min(max(1, round(arguments.validation_share * len(units))), len(units) - 1)
    return units[:begin], units[begin:]


def _as_sequences(
    data: IndexedTokens,
    span: range,
    arguments: PretrainArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    score_all: bool,
) -> Sequences:
    """Sequences of the units `span` (see `_units`) of tokens that exist already.

    Raises:
        UserError: the samples of the file are not of `sequence_length`, or cannot be packed as the arguments say.
    """
    if data.is_cut_for(arguments.sequence_length):
        if arguments.packing == "anchor":
            raise UserError(f"{data.path} holds samples of one length; packing=anchor needs documents")
        return IndexedSamples(data, span, tokenizer, mask_documents=arguments.mask_documents)
    if len(set(data.sizes[:1000].tolist())) == 1 and len(data.sizes) > 1:
        raise UserError(
            f"{data.path} holds samples of {data.sizes[0]} tokens, one more than sequence_length should be, which is "
            f"{arguments.sequence_length}; set it to {data.sizes[0] - 1}"
        )
    stream = data.as_stream(span)
    if score_all:
        # The first token of a document is no target.
        text_bytes = sum(decoded_bytes(tokenizer, part[1:]) for part in np.split(stream.tokens, stream.starts[1:]))
        stream = TokenStream(stream.tokens, stream.starts, text_bytes)
    return _pack(stream, str(data.path), arguments, tokenizer, score_all=score_all)


def _pack(
    stream: TokenStream,
    name: str,
    arguments: PretrainArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    score_all: bool,
) -> Sequences:
    """Sequences that are read independently of each other; with `score_all` no target is left out.

    Raises:
        UserError: the stream, which is called `name`, is shorter than one sequence, or nothing in it is a target.
    """
    length, pad = arguments.sequence_length, int(tokenizer.pad_token_id)
    if len(stream.tokens) == len(stream.starts):
        raise UserError(
            f"{name} holds no token to predict, because no document has a second token; give longer documents"
        )
    if arguments.packing == "best_fit" and not score_all:
        return BestFitSequences(stream, length, pad=pad, mask_documents=arguments.mask_documents)
    if len(stream.tokens) < length and not score_all:
        raise UserError(
            f"{name} has {len(stream.tokens)} tokens for training, fewer than one sequence of "
            f"sequence_length={length}; lower it or give more data"
        )
    if arguments.packing == "anchor":
        anchor = start_token_id(tokenizer)
        return AnchoredSequences(stream, name, length, anchor=anchor, pad=pad, score_all=score_all)
    return PackedSequences(stream, length, pad=pad, mask_documents=arguments.mask_documents, score_all=score_all)


def _open_memory_streams(
    folder: Path, arguments: PretrainArguments, tokenizer: PreTrainedTokenizerBase, streams: int
) -> tuple[Sequences, Sequences, TrainingOrder]:
    """The training text as `streams` streams, and the validation text as one."""
    train, validation = (TokenStream.open(folder / split) for split in ("train", VALIDATION))
    length, pad = arguments.sequence_length, int(tokenizer.pad_token_id)
    if len(train.tokens) <= streams * length:
        raise UserError(
            f"{arguments.dataset} has {len(train.tokens)} tokens for training, too few for {streams} streams of "
            f"sequence_length={length} or more; lower it or the global batch, or give more data"
        )
    segments = StreamSegments(train, length, parts=streams, pad=pad)
    held_out = StreamSegments(validation, length, parts=1, pad=pad)
    return segments, held_out, TrainingOrder(len(segments), streams, seed=None)


def _order(parts: dict[str, Sequences], arguments: PretrainArguments, global_batch: int) -> TrainingOrder:
    """The order of reading: a single source of samples in the order of its file, everything else shuffled."""
    sizes, options, skip = [len(part) for part in parts.values()], arguments.sources, arguments.skip_sequences
    weights = [options[name].weight or (options[name].epochs or 0) * len(part) for name, part in parts.items()]
    if len(parts) == 1:
        (part,) = parts.values()
        seed = None if isinstance(part, IndexedSamples) else arguments.seed
        order = TrainingOrder(len(part), global_batch, seed, skip)
    else:
        order = MixtureOrder(list(parts), sizes, weights, global_batch, arguments.seed, skip)
        if arguments.has_source_epochs:
            order.divide(block_within(sum(weights), len(parts)))
    if arguments.has_source_epochs:
        order.pass_length = sum(weights)
    return order
