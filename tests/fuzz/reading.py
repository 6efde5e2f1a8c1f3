"""How fast one process reads each kind of training data, beside what a GPU would use up at every named size.

python -m tests.fuzz.reading --record FILE.json

Rates are tokens a second of processor time, so that other work on the machine does not count.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from dynattn.scripts.common.atomic_file import write_json
from dynattn.scripts.common.builtin_corpus import builtin_documents
from dynattn.scripts.common.environment import hardware, versions
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.batch_order import ProcessBatches
from dynattn.scripts.pretrain.data.objectives import CausalLM, Examples
from dynattn.scripts.pretrain.data.opening import open_data
from dynattn.scripts.pretrain.data.preparation import prepare
from dynattn.scripts.pretrain.data.streaming import BlockWriter
from dynattn.scripts.pretrain.data.tokenizer import load_tokenizer, train_bpe
from dynattn.scripts.pretrain.dry_run.estimates import RECORDED_MFU, RECORDED_RATIO, composes, plain_flops
from dynattn.scripts.pretrain.dry_run.hardware import GPUS
from dynattn.scripts.pretrain.model_config import plan_config
from dynattn.scripts.pretrain.options.model import ModelOptions
from dynattn.scripts.pretrain.outputs.run_folder import RunFolder
from tests.cases.indexed import write_indexed

LENGTH, BATCH, UPDATES, ROUNDS = 2048, 8, 40, 3
SIZES = {"dcformer": ("405m", "2.8b", "6.9b"), "dcpythia": ("160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")}
GPU = GPUS["h100"]


def main(argv: Sequence[str] | None = None) -> int:
    """Reads, prints the rates, and returns 0 if every reader is ahead of every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="dynattn-reading-") as folder:
        readers = {name: measure(Path(folder) / name, options) for name, options in kinds(Path(folder)).items()}
    needed = {f"{family} {size}": needs(family, size) for family, sizes in SIZES.items() for size in sizes}
    record = {
        "command": "python -m tests.fuzz.reading",
        "what": f"tokens/s of processor time, {BATCH} sequences of {LENGTH}, the fastest of {ROUNDS} rounds",
        "readers": readers,
        "needed": needed,
        "needed_is": f"an estimate for one {GPU.name}: {RECORDED_MFU:.0%} of its matrix products for the plain model, "
        f"composition at {RECORDED_RATIO} times its time",
        "hardware": hardware(torch.device("cpu")),
        "versions": versions(),
    }
    print(json.dumps(record, indent=1))
    if given.record:
        write_json(given.record, record, indent=1)
    return 0 if min(readers.values()) > max(needed.values()) else 1


def kinds(folder: Path) -> dict[str, dict[str, Any]]:
    """Options of a run for each kind of data, all made of the built-in corpus."""
    texts = builtin_documents("train") * 20
    tokenizer = train_bpe([texts[:100]], vocab_size=8192)
    tokenizer.save_pretrained(folder / "tokenizer")
    turns = [
        [{"role": "user", "content": text[:80]}, {"role": "assistant", "content": text[80:4000]}] for text in texts
    ]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    samples = np.random.default_rng(0).integers(8000, size=(700, LENGTH + 1)).tolist()
    indexed = write_indexed(folder / "samples", samples)
    text = str(folder / "text.jsonl")
    sources = {name: {"dataset": text, "weight": weight} for name, weight in (("one", 0.8), ("two", 0.2))}
    return {
        "prepared": {"dataset": text},
        "prepared, best fit": {"dataset": text, "packing": "best_fit"},
        "mixture": {"mixture": sources},
        "Megatron": {"dataset": str(indexed), "mask_documents": False},
        "chat, best fit": {"dataset": str(folder / "chat.jsonl"), "chat_column": "messages", "packing": "best_fit"},
        "streaming": {"dataset": text, "streaming": True, "validation_dataset": text, "shuffle_buffer": 64},
    }


def measure(output: Path, options: dict[str, Any]) -> float:
    """The rate of the fastest round."""
    tokenizer = str(output.parent / "tokenizer")
    arguments = PretrainArguments(
        output=str(output), tokenizer=tokenizer, sequence_length=LENGTH, batch_size=BATCH, max_steps=UPDATES, **options
    )
    run = RunFolder(output)
    if arguments.streaming:
        return max(drain(stream_blocks(arguments, run)) for _ in range(ROUNDS))
    prepare(arguments, run)
    sequences, _, order = open_data(run, arguments, load_tokenizer(run.prepared / run.tokenizer.name), BATCH)
    examples, sampler = Examples(sequences, CausalLM()), ProcessBatches(order, range(UPDATES), BATCH, 0, 1)
    return max(
        drain(batch["input_ids"].numel() for batch in DataLoader(examples, batch_sampler=sampler))
        for _ in range(ROUNDS)
    )


def stream_blocks(arguments: PretrainArguments, run: RunFolder) -> Iterator[int]:
    """The tokens of each block that the process of a stream tokenizes and writes."""
    run.data.mkdir(parents=True, exist_ok=True)
    writer = BlockWriter(arguments, run, load_tokenizer(Path(str(arguments.tokenizer))), BATCH)
    for _, block in zip(range(4), writer._blocks(None), strict=False):
        block.save(run.data / "block.safetensors")
        yield block.tokens.size


def drain(counts: Iterator[int]) -> float:
    """Tokens a second of this process's processor time."""
    begun = time.process_time()
    tokens = sum(counts)
    return round(tokens / (time.process_time() - begun))


def needs(family: str, size: str) -> float:
    """Tokens a second that one GPU would train on."""
    config = plan_config(PretrainArguments(output="x", **vars(ModelOptions(model_type=family, model_size=size))))
    ratio = RECORDED_RATIO if composes(config) else 1.0
    return round(GPU.bfloat16_rate * RECORDED_MFU / plain_flops(config, LENGTH) / ratio)


if __name__ == "__main__":
    sys.exit(main())
