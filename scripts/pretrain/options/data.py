"""Options of a run about its data: what is read, and how it is packed into sequences."""

from dataclasses import dataclass
from typing import Any, Literal

from ...common.arguments import option


@dataclass(kw_only=True)
class DataOptions:
    """What is read, and how it is packed into sequences."""

    dataset: str = option(
        "builtin", "builtin, a .txt/.jsonl/.parquet file, glob or folder, a Hub dataset name, or a Megatron .idx file"
    )
    mixture: dict[str, Any] | str | None = option(
        None,
        "several sources instead of dataset: for each name its dataset, its weight or its epochs, and "
        "optionally max_epochs; a mapping in YAML, JSON on the command line",
    )
    streaming: bool = option(False, "read and tokenize the dataset while the run trains, instead of before")
    shuffle_buffer: int = option(4096, "with streaming: sequences in a block, in which they are shuffled")
    skip_sequences: int = option(0, "sequences to pass over at the start, such as those that init_from has read")
    dataset_config: str | None = option(None, "configuration name of a Hub dataset")
    train_split: str = option("train", "split of a Hub dataset to train on")
    validation_split: str | None = option(None, "split of a Hub dataset to validate on")
    validation_dataset: str | None = option(None, "file, glob, folder or Hub dataset to validate on")
    validation_share: float = option(0.05, "share of the documents to hold out when no validation data is named")
    text_column: str = option("text", "column that holds the text")

    chat_column: str | None = option(
        None, "column of conversations to train on; only what the assistant says is then predicted"
    )
    chat_template: str | None = option(
        None,
        "file with the chat template (Jinja), which is saved with the model; by default the tokenizer's "
        "own, or the one of this package",
    )

    tokenizer: str | None = option(
        None, "bpe (train one on the data), a folder or a Hub name; by default that of init_from, or bpe"
    )
    vocab_size: int = option(8192, "vocabulary size of a tokenizer that bpe trains")

    tokenizer_workers: int = option(0, "processes that tokenize; 0 tokenizes in the main process")
    token_cache: str | None = option(
        None, "folder where runs share tokenized data, and where interrupted tokenizing continues"
    )

    sequence_length: int = option(256, "tokens in each packed sequence")
    mask_documents: bool = option(True, "keep attention inside each document of a packed sequence")

    packing: Literal["concatenate", "best_fit", "anchor"] = option(
        "concatenate",
        "how documents fill sequences: concatenate (end to end, cut anywhere), best_fit (few documents are "
        "cut, with some padding) or anchor (as concatenate, but documents of a sequence share their first token)",
    )

    position_sampling: Literal["jitter", "subset"] | None = option(
        None,
        "train with random ascending positions: jitter (random steps of mean 1) or subset (a random choice "
        "of the positions below position_limit); validation has ordinary positions",
    )
    position_limit: int | None = option(
        None, "sampled positions are below this; sequence_length by default, which is too few for subset"
    )

    carry_memory: bool = option(
        False,
        "read the data as parallel streams, one for each sequence of an update, and carry the model's "
        "memory from update to update; for models that have a memory (rcmha)",
    )
