"""What the commands in guides need: programs under their names, and checkpoints that stand for larger ones."""

import json
import os
import shlex
import sys
from pathlib import Path

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, MarianConfig, MarianMTModel

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.scripts.common.builtin_corpus import builtin_documents
from dynattn.scripts.pretrain.data.tokenizer import train_bpe

# The programs that guides call, whether or not they are on the PATH of the tests, with what Python runs in their place.
# For `python` itself a link would not do: it would not find the packages of a virtual environment.
PROGRAMS = {
    "python": "",
    "dynattn": "-m cases.short_commands",
    "torchrun": "-m torch.distributed.run",
    "accelerate": "-m accelerate.commands.accelerate_cli",
}
HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}  # of a translator
TESTS = Path(__file__).parents[1]


def environment_of_guides(folder: Path) -> dict[str, str]:
    """An environment in which the programs of the guides are found; `dynattn` trains and evaluates briefly."""
    programs = folder / ".programs"
    programs.mkdir()
    for name, arguments in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }


def write_starting_points(folder: Path) -> None:
    """Everything that one guide takes from another or from the Hub, under the names that guides use.

    A folder takes precedence over a repository of the Hub with its name: `EleutherAI/pythia-160m` is a small GPT-NeoX.
    """
    tokenizer = train_bpe([builtin_documents("validation")], vocab_size=512)
    tokenizer.model_max_length = 2048
    tokens = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    composed = DCFormerForCausalLM(DCFormerConfig.from_size("tiny", **tokens))
    plain = DCFormerForCausalLM(DCFormerConfig.from_size("tiny", compose_pre=False, compose_post=False, **tokens))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    parent = GPTNeoXForCausalLM(GPTNeoXConfig(max_position_embeddings=2048, **sizes, **tokens))
    halves = {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in HALF.items()}
    translator = MarianMTModel(MarianConfig(d_model=64, decoder_start_token_id=0, **halves, **tokens))
    models = {
        "runs/first/model": composed,
        "runs/base/model": composed,
        "runs/quickstart/dcformer/model": composed,
        "runs/quickstart/transformer/model": plain,
        "EleutherAI/pythia-160m": parent,
        "Helsinki-NLP/opus-mt-en-de": translator,
    }
    for name, model in models.items():
        model.to(torch.float32).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [{"text": text} for text in builtin_documents("validation")]
    (folder / "my_text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    turns = [{"role": "user", "content": "How many legs has a spider?"}, {"role": "assistant", "content": "Eight."}]
    lasts = [{"role": "user", "content": f"And {n} spiders?"} for n in range(40)]  # they make conversations differ
    (folder / "conversations.jsonl").write_text("\n".join(json.dumps({"messages": [*turns, last]}) for last in lasts))
