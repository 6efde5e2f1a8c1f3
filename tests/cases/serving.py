"""Checkpoints with a tokenizer and a chat template, and a server that runs during a test."""

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

# A server that imports and compiles much takes minutes to start on a busy machine; one that ends is noticed at once.
START_SECONDS = 600
# It refuses the role `nobody`, as many templates do with roles that they do not know.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'nobody' %}{{ raise_exception('nobody speaks') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }} {% endfor %}assistant: "
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, in a vocabulary of 97."""
    words = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 126))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    made.chat_template = TEMPLATE
    return made


def save_with_tokenizer(model: PreTrainedModel, folder: Path) -> str:
    """Saves a model that answers greedily, and returns the folder."""
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@contextmanager
def running_server(
    command: Sequence[str], port: int, folder: Path, stderr: TextIO | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command in a folder until the end of the block, which begins when its server answers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=stderr) as server:
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server)
            yield server
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                raise


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail("the server does not answer")
