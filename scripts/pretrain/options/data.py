"""Options of a run about its data: what is read, and how it is packed into sequences."""

from dataclasses import dataclass, field
from typing import Any, Literal

Packing = Literal["concatenate", "best_fit", "anchor"]
PositionSampling = Literal["jitter", "subset"]


@dataclass(kw_only=True)
class DataOptions:
    """What is read, and how it is packed into sequences."""

    dataset: str = field(
        default="builtin",
        metadata={
            "help": "builtin, a .txt/.jsonl/.parquet file, glob or folder, a Hub dataset name, or a Megatron .idx file"
        },
    )
    mixture: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "several sources instead of dataset: for each name its dataset, its weight or its epochs, and "
            "optionally max_epochs; a mapping in YAML, JSON on the command line"
        },
    )
    streaming: bool = field(
        default=False, metadata={"help": "read and tokenize the dataset while the run trains, instead of before"}
    )
    shuffle_buffer: int = field(
        default=4096, metadata={"help": "with streaming: sequences in a block, in which they are shuffled"}
    )
    skip_sequences: int = field(
        default=0, metadata={"help": "sequences to pass over at the start, such as those that init_from has read"}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "configuration name of a Hub dataset"})
    train_split: str = field(default="train", metadata={"help": "split of a Hub dataset to train on"})
    validation_split: str | None = field(default=None, metadata={"help": "split of a Hub dataset to validate on"})
    validation_dataset: str | None = field(
        default=None, metadata={"help": "file, glob, folder or Hub dataset to validate on"}
    )
    validation_share: float = field(
        default=0.05, metadata={"help": "share of the documents to hold out when no validation data is named"}
    )
    text_column: str = field(default="text", metadata={"help": "column that holds the text"})

    chat_column: str | None = field(
        default=None,
        metadata={"help": "column of conversations to train on; only what the assistant says is then predicted"},
    )
    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "file with the chat template (Jinja), which is saved with the model; by default the tokenizer's "
            "own, or the one of this package"
        },
    )

    tokenizer: str | None = field(
        default=None,
        metadata={"help": "bpe (train one on the data), a folder or a Hub name; by default that of init_from, or bpe"},
    )
    vocab_size: int = field(default=8192, metadata={"help": "vocabulary size of a tokenizer that bpe trains"})

    tokenizer_workers: int = field(
        default=0, metadata={"help": "processes that tokenize; 0 tokenizes in the main process"}
    )
    token_cache: str | None = field(
        default=None,
        metadata={"help": "folder where runs share tokenized data, and where interrupted tokenizing continues"},
    )

    sequence_length: int = field(default=256, metadata={"help": "tokens in each packed sequence"})
    mask_documents: bool = field(
        default=True, metadata={"help": "keep attention inside each document of a packed sequence"}
    )

    packing: Packing = field(
        default="concatenate",
        metadata={
            "help": "how documents fill sequences: concatenate (end to end, cut anywhere), best_fit (few documents are "
            "cut, with some padding) or anchor (as concatenate, but documents of a sequence share their first token)"
        },
    )

    position_sampling: PositionSampling | None = field(
        default=None,
        metadata={
            "help": "train with random ascending positions: jitter (random steps of mean 1) or subset (a random choice "
            "of the positions below position_limit); validation has ordinary positions"
        },
    )
    position_limit: int | None = field(
        default=None,
        metadata={"help": "sampled positions are below this; sequence_length by default, which is too few for subset"},
    )

    carry_memory: bool = field(
        default=False,
        metadata={
            "help": "read the data as parallel streams, one for each sequence of an update, and carry the model's "
            "memory from update to update; for models that have a memory (rcmha)"
        },
    )
