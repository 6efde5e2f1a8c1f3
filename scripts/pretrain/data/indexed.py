"""Tokens in the format of Megatron and GPT-NeoX: `NAME.bin` with the tokens, `NAME.idx` with sizes and offsets.

Pythia's own data has this format: samples of 2,049 tokens in the order in which its models have read them, 1,024 in an
update (EleutherAI/pythia, "Exploring the Dataset").
"""

import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dynattn.modeling.ops.chunked_loss import IGNORED

from ...common.errors import UserError
from ..outputs import checksums
from .indexed_names import DATA, INDEX
from .sequences import Sequences, as_item, restarting_positions
from .token_stream import TokenStream
from .tokenization import decoded_bytes

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
# Magic, version, code of the data type, number of sequences, number of document boundaries.
HEADER = struct.Struct("<9sQBQQ")
# The format's codes of data types; 6 and 7 are floating point, in which tokens cannot be stored.
TOKEN_TYPES: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
# How many entries of an index are checked at once; that of the Pile has some 150 million.
BLOCK = 1 << 22
# How much of a large `.bin` is read to recognize it and to look for tokens outside the vocabulary.
PAGES, PAGE_BYTES = 256, 4096


@dataclass(frozen=True)
class IndexedTokens:
    """A pair of files; the tokens stay on disk until they are read.

    Attributes:
        path: of the `.idx` file.
        sizes: `[sequences]` tokens of each.
        begins: `[sequences]` index in `tokens` of each one's first token.
        documents: `[documents + 1]` the first sequence of each document, and the number of sequences.
        tokens: `[N]`.
    """

    path: Path
    sizes: NDArray[np.int32]
    begins: NDArray[np.int64]
    documents: NDArray[np.int64]
    tokens: NDArray[np.integer]

    @classmethod
    def open(cls, path: Path) -> "IndexedTokens":
        """Opens `NAME.idx` and `NAME.bin`, whichever of them is named.

        Raises:
            UserError: a file is missing, of another format or version, or shorter than it says, or the index does not
                place one sequence after the other.
        """
        index, data = path.with_suffix(INDEX), path.with_suffix(DATA)
        for file in (index, data):
            if not file.is_file():
                raise UserError(f"there is no file {file}; {index.name} and {data.name} must lie side by side")
        dtype, count, boundaries = _read_header(index)
        raw = np.memmap(index, dtype=np.uint8, mode="r")
        needed = HEADER.size + 12 * count + 8 * boundaries
        if len(raw) != needed:
            raise UserError(f"{index} has {len(raw)} bytes, and its {count} sequences need {needed}; copy it again")
        sizes = np.frombuffer(raw, np.int32, count, HEADER.size)
        pointers = np.frombuffer(raw, np.int64, count, HEADER.size + 4 * count)
        documents = np.frombuffer(raw, np.int64, boundaries, HEADER.size + 12 * count)
        width = np.dtype(dtype).itemsize
        end = int(pointers[-1]) + int(sizes[-1]) * width if count else 0
        if count == 0 or data.stat().st_size < end:
            raise UserError(f"{data} has {data.stat().st_size} bytes, and {index.name} describes {end}; copy it again")
        _check_places(index, sizes, pointers, documents, width)
        # Torch warns of arrays that are read-only. Mode "c" (copy on write) makes this one writable, not its file.
        tokens: NDArray[np.integer] = np.memmap(data, dtype=dtype, mode="c", shape=(end // width,))
        return cls(index, sizes, pointers // width, documents, tokens)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the data by its index and a sample of its tokens, as reading all of the Pile would take hours."""
        size, checksum = checksums.measure(self.path)
        sample = zlib.crc32(self.sample().tobytes())
        return f"index {size} bytes {checksum:08x}, {len(self.tokens)} tokens {sample:08x}"

    def sample(self) -> NDArray[np.integer]:
        """The tokens of `PAGES` pages that are spread evenly over the file, or all tokens of a small file."""
        page = PAGE_BYTES // self.tokens.itemsize
        if len(self.tokens) <= PAGES * page:
            return np.asarray(self.tokens)
        begins = np.linspace(0, len(self.tokens) - page, PAGES).astype(np.int64)
        return np.concatenate([self.tokens[begin : begin + page] for begin in begins])

    def is_cut_for(self, length: int) -> bool:
        """Whether every sequence is a sample for models that read `length` tokens and predict as many."""
        return bool((self.sizes == length + 1).all())

    def as_stream(self, span: range) -> TokenStream:
        """The documents with the numbers `span` as a stream that can be packed; their text is not measured.

        Documents without tokens, which Megatron's tools write for empty texts, are left out: nothing starts there.
        """
        edges = np.append(self.begins, len(self.tokens))[self.documents[span.start : span.stop + 1]]
        begin, end = int(edges[0]), int(edges[-1])
        starts = edges[:-1][np.diff(edges) > 0] - begin
        return TokenStream(self.tokens[begin:end], starts, text_bytes=0)

    def check_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuses tokens that the tokenizer does not have.

        Raises:
            UserError: there is one in `sample`.
        """
        sample = self.sample()
        for token in (int(sample.max()), int(sample.min())):
            if not 0 <= token < len(tokenizer):
                raise UserError(
                    f"{self.path.with_suffix(DATA)} holds the token {token}, and the tokenizer has {len(tokenizer)}; "
                    "give the tokenizer that the data was made with"
                )


def _read_header(index: Path) -> tuple[type[np.integer], int, int]:
    """The data type of tokens, and the numbers of sequences and of document boundaries."""
    with index.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise UserError(
            f"{index} begins with {header[: len(MAGIC)]!r} and not with {MAGIC!r}; give the .idx file of a Megatron "
            "data set of the memory-mapped kind"
        )
    _, version, code, count, boundaries = HEADER.unpack(header)
    if version != VERSION:
        raise UserError(f"{index} has version {version} of the format, and only version {VERSION} is known")
    if code not in TOKEN_TYPES:
        raise UserError(f"{index} has the data type {code}, which tokens cannot have; known are {sorted(TOKEN_TYPES)}")
    return TOKEN_TYPES[code], count, boundaries


def _check_places(
    index: Path,
    sizes: NDArray[np.int32],
    pointers: NDArray[np.int64],
    documents: NDArray[np.int64],
    width: int,
) -> None:
    """Raises UserError unless sequences follow each other without gaps, and documents are ranges of them.

    Args:
        sizes: `[sequences]` tokens of each.
        pointers: `[sequences]` the byte at which each begins.
        documents: `[documents + 1]`, see `IndexedTokens`.
        width: bytes of a token.
    """
    fix = f"{index} is damaged: {{}}; copy it again, or make it anew"
    if pointers[0] != 0:
        raise UserError(fix.format(f"its first sequence begins at byte {pointers[0]}, not at 0"))
    for begin in range(0, len(sizes), BLOCK):
        block, following = sizes[begin : begin + BLOCK], pointers[begin + 1 : begin + 1 + BLOCK]
        ends = pointers[begin : begin + BLOCK] + block.astype(np.int64) * width
        if (block < 0).any() or (ends[: len(following)] != following).any():
            span = f"{begin} to {begin + len(block) - 1}"
            raise UserError(fix.format(f"among its sequences {span} one does not end where the next begins"))
    if len(documents) and (documents[0] < 0 or documents[-1] > len(sizes) or (np.diff(documents) < 0).any()):
        raise UserError(fix.format(f"its documents are not ranges of its {len(sizes)} sequences"))


class IndexedSamples(Sequences):
    """Samples of `length + 1` tokens in the order of the file: the first `length` are read, the last are predicted.

    Each item holds `input_ids` `[T]`, and the next tokens `[T]` as `labels` and as `shift_labels`, which the model does
    not shift. With `mask_documents` attention stays inside each document, and a document's first token is no target;
    otherwise all tokens are targets, as for Pythia.
    """

    def __init__(
        self, data: IndexedTokens, span: range, tokenizer: PreTrainedTokenizerBase, *, mask_documents: bool
    ) -> None:
        """Takes the samples with the numbers `span`."""
        self.data, self.span, self.tokenizer, self.mask_documents = data, span, tokenizer, mask_documents
        self.length = int(data.sizes[0]) - 1

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sample `index`: `input_ids`, `labels`, `shift_labels` and perhaps `position_ids`, each `[T]`."""
        input_ids, targets = self._read(index)
        item = {"input_ids": input_ids, "labels": targets, "shift_labels": targets}
        if self.mask_documents:
            starts = self._ends(input_ids) + 1
            item["position_ids"] = restarting_positions(starts[starts < self.length], self.length)
        return as_item(item)

    def documents(self, index: int) -> list[str]:
        return [f"sample {self.span[index]} of {self.data.path.name}"]

    def describe(self) -> str:
        return f"{len(self):,} samples of {self.length + 1} tokens from {self.data.path.name}"

    @cached_property
    def text_bytes(self) -> int:  # type: ignore[override]  # nothing sets it
        """Length in UTF-8 of the targets of all samples, which are decoded once."""
        targets = (self._read(index)[1] for index in range(len(self)))
        return sum(decoded_bytes(self.tokenizer, one[one != IGNORED]) for one in targets)

    def _read(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The inputs of sample `index` and the tokens that are predicted from them, each `[T]`."""
        begin = int(self.data.begins[self.span[index]])
        sample = np.asarray(self.data.tokens[begin : begin + self.length + 1], dtype=np.int64)
        input_ids, targets = sample[:-1], sample[1:].copy()
        if self.mask_documents:
            targets[self._ends(input_ids)] = IGNORED
        return input_ids, targets

    def _ends(self, input_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where documents end among `input_ids` `[T]`; what is predicted from there is of the next document."""
        return np.flatnonzero(input_ids == self.tokenizer.eos_token_id)
