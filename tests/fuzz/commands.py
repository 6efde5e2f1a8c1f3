"""Running the command line in a forked process, and checkpoints for it to work on."""

import atexit
import contextlib
import dataclasses
import functools
import io
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import dynattn
from dynattn.scripts import cli

from .harness import expect, in_child, one_line

SMALL = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "sliding_window": 9,
    "mem_len": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
# What a command may take up, so that an absurd size in a file ends it and not the machine.
MEMORY = 12 << 30
PRETRAIN = {
    "model_type": "llama",
    "model_config": json.dumps({name: SMALL[name] for name in list(SMALL)[1:5]}),
    "vocab_size": "300",
    "sequence_length": "32",
    "batch_size": "2",
    "max_steps": "6",
    "warmup_steps": "1",
    "eval_every": "3",
    "save_every": "2",
    "log_every": "1",
    "validation_share": "0.1",
}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: Any
    output: str
    errors: str
    exception: str | None = None


def run_command(argv: Sequence[str], seconds: float, prepare: Callable[[], object] = lambda: None) -> Ended:
    """Runs `dynattn ARGV` in a process of its own, in which `prepare` is called first.

    Raises:
        TimeoutError: it hangs.
        EOFError: it crashes.
    """
    with in_child(lambda tell: tell(run_here(argv, prepare))) as child:
        return child.hear(seconds)


def run_here(argv: Sequence[str], prepare: Callable[[], object]) -> Ended:
    """Runs `dynattn ARGV` in this process, whose memory is limited from then on, after `prepare`."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    output, errors = io.StringIO(), io.StringIO()
    status, exception = None, None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        prepare()
        try:
            status = cli.main(list(argv))
        except SystemExit as ended:
            status = ended.code
        except BaseException as error:  # what would have been a traceback
            exception = one_line(error)
    return Ended(status, output.getvalue()[-4000:], errors.getvalue()[-4000:], exception)


def expect_one_line(ended: Ended, allowed: Sequence[int] = (0, 2)) -> None:
    """Finds tracebacks, other exit statuses, and refusals that are not one line of the command or of argparse."""
    expect(ended.exception is None, f"traceback: {ended.exception}")
    expect(ended.status in allowed, f"exit status {ended.status!r}")
    if ended.status == 2:
        lines = [line for line in ended.errors.splitlines() if "error: " in line and line.startswith("dynattn")]
        expect(len(lines) == 1, f"status 2 with {len(lines)} lines of errors | {ended.errors[-300:]!r}")
        expect("Traceback" not in ended.errors, f"a traceback in the error | {ended.errors[-300:]!r}")


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file with its content, every folder and link."""
    found: dict[str, bytes | None] = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            is_readable = path.is_file() and not path.is_symlink() and os.access(path, os.R_OK)
            found[str(path.relative_to(folder))] = path.read_bytes() if is_readable else None
    return found


@functools.cache
def checkpoints() -> Path:
    """A folder with small checkpoints of all formats, and a text; made once for all cases."""
    folder = Path(tempfile.mkdtemp(prefix="dynattn-fuzz-base-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for module, _ in cli.JOBS.commands.values():
        import_module(module)  # once here, instead of in every forked process
    torch.manual_seed(1)
    for family in ("DCFormer", "RCMHA"):
        _save_ours(folder / family.lower(), family)
    wide = {**SMALL, "hidden_size": 32, "head_dim": 8, "tie_word_embeddings": False}
    wide = {name: value for name, value in wide.items() if name not in ("sliding_window", "mem_len")}
    LlamaForCausalLM(LlamaConfig(**wide)).save_pretrained(folder / "llama")
    GPTNeoXForCausalLM(GPTNeoXConfig(**wide)).save_pretrained(folder / "neox")
    for name in ("llama", "dcformer"):
        _save_tokenizer(folder / name)
    lines = [json.dumps({"text": f"The number {n} is followed by {n + 1}. " * (1 + n % 3)}) for n in range(20)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    for kind, source in (("official", "dcformer"), ("rcmha", "rcmha")):
        argv = ["convert", kind, str(folder / source), str(folder / f"official-{source}"), "--reverse", "--no-verify"]
        argv += ["--official_positions", "64", "--from_streaming"] if kind == "rcmha" else []
        ended = run_command(argv, 120)
        assert ended.status == 0, ended
    return folder


def _save_ours(folder: Path, family: str) -> None:
    config_class = getattr(dynattn, f"{family}Config")
    known = {field.name for field in dataclasses.fields(config_class)}
    config = config_class(**{name: value for name, value in SMALL.items() if name in known})
    getattr(dynattn, f"{family}ForCausalLM")(config).save_pretrained(folder)


def _save_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(["<e>", *alphabet])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>").save_pretrained(folder)


def as_options(values: dict[str, str]) -> list[str]:
    return [text for name, value in values.items() for text in (f"--{name}", value)]
