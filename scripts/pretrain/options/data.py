"""Options of a run that say what is read, and how it is packed into sequences."""

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
            "help": "several sources in place of dataset: a name for each with its dataset, its weight or epochs, and "
            "perhaps max_epochs; a mapping in YAML, JSON on the command line"
        },
    )
    streaming: bool = field(
        default=False, metadata={"help": "read and tokenize the dataset while the run trains, instead of before"}
    )
    shuffle_buffer: int = field(
        default=4096, metadata={"help": "sequences of a stream that are shuffled among each other"}
    )
    skip_sequences: int = field(
        default=0, metadata={"help": "sequences to pass over first, such as those that the parent has read"}
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
        metadata={"help": "column of conversations to train on; only what the assistant says is then a target"},
    )
    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "file with the chat template, in Jinja, saved with the model; if not given: the tokenizer's own, "
            "or one that ships"
        },
    )

    tokenizer: str | None = field(
        default=None,
        metadata={"help": "bpe (train one on the data), a folder or a Hub name; if not given: init_from, or bpe"},
    )
    vocab_size: int = field(default=8192, metadata={"help": "vocabulary of the tokenizer that bpe trains"})

    tokenizer_workers: int = field(
        default=0, metadata={"help": "processes that tokenize; 0 leaves it to the tokenizer"}
    )
    token_cache: str | None = field(
        default=None,
        metadata={"help": "folder of tokenized data that runs share, and from which interrupted tokenizing goes on"},
    )

    sequence_length: int = field(default=256, metadata={"help": "tokens in each packed sequence"})
    mask_documents: bool = field(
        default=True, metadata={"help": "keep attention inside each document of a packed sequence"}
    )

    packing: Packing = field(
        default="concatenate",
        metadata={
            "help": "concatenate documents and cut; best_fit: few documents are cut, and there is padding; or anchor: "
            "as concatenate, and all documents of a sequence share their first token"
        },
    )

    position_sampling: PositionSampling | None = field(
        default=None,
        metadata={
            "help": "train on random positions that rise: jitter (steps of random width, 1 in the mean) or subset "
            "(some of the position_limit positions); validation has ordinary ones"
        },
    )
    position_limit: int | None = field(
        default=None, metadata={"help": "what sampled positions stay below; sequence_length if not given"}
    )

    carry_memory: bool = field(
        default=False,
        metadata={
            "help": "read the corpus as streams, one for each sequence of an update, and carry the model's memory from "
            "update to update; for models that have one (rcmha)"
        },
    )
