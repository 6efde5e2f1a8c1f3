"""Opens the sequences of a run and their order, from tokens that `prepare` wrote or that existed before."""

from dataclasses import dataclass
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
    data = DataOpener(run.current(run.data), arguments, tokenizer)
    if arguments.streaming:
        streamed = StreamedSequences(run.stream, arguments)
        return streamed, data.validation(), StreamOrder(arguments, run, tokenizer, global_batch)
    if arguments.carry_memory:
        return data.memory_streams(global_batch)
    parts = {name: data.source(name) for name in arguments.sources}
    train = parts["train"] if set(parts) == {"train"} else MixedSequences(parts)
    return train, data.validation(), _order(parts, arguments, global_batch)


@dataclass(frozen=True)
class DataOpener:
    """Opens the data of a run in `folder`, and tokens that existed before."""

    folder: Path
    arguments: PretrainArguments
    tokenizer: PreTrainedTokenizerBase

    def source(self, name: str) -> Sequences:
        """The training sequences of one source."""
        dataset = self.arguments.sources[name].dataset
        if is_indexed(dataset):
            data = self._open_indexed(dataset)
            is_apart = (self.folder / VALIDATION).exists() or self.arguments.validation_dataset is not None
            span = self._units(data) if is_apart else self._divide(data, dataset)[0]
            return self.as_sequences(data, span, score_all=False)
        return self._pack(TokenStream.open(self.folder / name), dataset, score_all=False)

    def validation(self) -> Sequences:
        """The validation sequences: of tokens that are named, of documents, or of the end of the training tokens."""
        named, sources = self.arguments.validation_dataset, self.arguments.sources
        if (self.folder / VALIDATION).exists():
            return self._pack(TokenStream.open(self.folder / VALIDATION), "the validation data", score_all=True)
        if named is not None:
            data = self._open_indexed(named)
            return self.as_sequences(data, self._units(data), score_all=True)
        if len(sources) > 1:
            raise UserError("a mixture of tokens that exist already holds nothing out; name validation_dataset")
        (source,) = sources.values()
        data = self._open_indexed(source.dataset)
        return self.as_sequences(data, self._divide(data, source.dataset)[1], score_all=True)

    def memory_streams(self, streams: int) -> tuple[Sequences, Sequences, TrainingOrder]:
        """The training text as `streams` streams, the validation text as one, and the order of reading."""
        train, validation = (TokenStream.open(self.folder / split) for split in ("train", VALIDATION))
        length, pad = self.arguments.sequence_length, int(self.tokenizer.pad_token_id)
        if len(train.tokens) <= streams * length:
            raise UserError(
                f"{self.arguments.dataset} has {len(train.tokens)} tokens for training, too few for {streams} streams "
                f"of sequence_length={length} or more; lower it or the global batch, or give more data"
            )
        segments = StreamSegments(train, length, parts=streams, pad=pad)
        held_out = StreamSegments(validation, length, parts=1, pad=pad)
        return segments, held_out, TrainingOrder(len(segments), streams, seed=None)

    def _open_indexed(self, dataset: str) -> IndexedTokens:
        """Opens tokens that exist already, and checks that the tokenizer has them."""
        data = IndexedTokens.open(Path(dataset))
        data.check_vocabulary(self.tokenizer)
        return data

    def _units(self, data: IndexedTokens) -> range:
        """The numbers of what can be held out: samples if the file has some of the right length, else documents."""
        return range(len(data.sizes) if data.is_cut_for(self.arguments.sequence_length) else len(data.documents) - 1)

    def _divide(self, data: IndexedTokens, dataset: str) -> tuple[range, range]:
        """The units to train on, and those at the end that are held out."""
        units = self._units(data)
        if len(units) < 2:
            raise UserError(
                f"{dataset} has {len(units)} samples or documents, and one must be held out; name validation_dataset"
            )
        begin = len(units) - min(max(1, round(self.arguments.validation_share * len(units))), len(units) - 1)
        return units[:begin], units[begin:]

    def as_sequences(self, data: IndexedTokens, span: range, *, score_all: bool) -> Sequences:
        """Sequences of the units `span` (see `_units`) of tokens that exist already.

        Raises:
            UserError: the samples of the file are not of `sequence_length`, or cannot be packed as the arguments say.
        """
        length = self.arguments.sequence_length
        if data.is_cut_for(length):
            if self.arguments.packing == "anchor":
                raise UserError(f"{data.path} holds samples of one length; packing=anchor needs documents")
            return IndexedSamples(data, span, self.tokenizer, mask_documents=self.arguments.mask_documents)
        if len(set(data.sizes[:1000].tolist())) == 1 and len(data.sizes) > 1:
            raise UserError(
                f"{data.path} holds samples of {data.sizes[0]} tokens, one more than sequence_length should be, which "
                f"is {length}; set it to {data.sizes[0] - 1}"
            )
        stream = data.as_stream(span)
        if score_all:
            # The first token of a document is no target.
            parts = np.split(stream.tokens, stream.starts[1:])
            text_bytes = sum(decoded_bytes(self.tokenizer, part[1:]) for part in parts)
            stream = TokenStream(stream.tokens, stream.starts, text_bytes)
        return self._pack(stream, str(data.path), score_all=score_all)

    def _pack(self, stream: TokenStream, name: str, *, score_all: bool) -> Sequences:
        """Sequences that are read independently of each other; with `score_all` no target is left out.

        Raises:
            UserError: the stream, which is called `name`, is shorter than one sequence, or nothing in it is a target.
        """
        arguments, length, pad = self.arguments, self.arguments.sequence_length, int(self.tokenizer.pad_token_id)
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
            anchor = start_token_id(self.tokenizer)
            return AnchoredSequences(stream, name, length, anchor=anchor, pad=pad, score_all=score_all)
        return PackedSequences(stream, length, pad=pad, mask_documents=arguments.mask_documents, score_all=score_all)


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
