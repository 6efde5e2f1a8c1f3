"""Conversations: only what the assistant says is a target, whichever way the chat template tells."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.training import run
from transformers import PreTrainedTokenizerBase

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain.data.encoders import ChatEncoder
from dynattn.scripts.pretrain.data.tokenizer import train_bpe

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}\n{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}"
)
TURNS = [
    {"role": "user", "content": "How many legs has a spider?"},
    {"role": "assistant", "content": "Eight legs."},
    {"role": "user", "content": "And an ant?"},
    {"role": "assistant", "content": "Six."},
]

LATER = [[*TURNS, {"role": "user", "content": str(number)}] for number in range(4)]


def tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerBase:
    made = train_bpe([["How many legs has a spider? Eight legs. And an ant? Six."] * 4], vocab_size=300)
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_only_what_the_assistant_says_is_a_target(template: str):
    used = tokenizer(template)
    encoded = ChatEncoder(used)([json.dumps(TURNS), json.dumps(TURNS[:2])])
    assert encoded.targets is not None
    parts = zip(*(np.split(column, encoded.lengths[:1]) for column in (encoded.tokens, encoded.targets)), strict=True)
    end = used.eos_token
    expected = [f"Eight legs.{end}\nSix.{end}\n", f"Eight legs.{end}\n"]
    assert [used.decode(tokens[targets]) for tokens, targets in parts] == expected
    assert encoded.text_bytes == len("Eight legs.Six.Eight legs.")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    return path


def save(folder: Path, template: str | None = PLAIN) -> str:
    tokenizer(template).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_a_run_on_conversations_counts_its_targets(packing: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    rows = [[{**TURNS[0], "content": f"{n} legs?"}, *TURNS[1 : 2 + 2 * (n % 2)]] for n in range(40)]
    data = write(tmp_path / "chat.jsonl", rows)
    options = {"tokenizer": save(tmp_path / "tokenizer"), "chat_column": "messages", "packing": packing}
    result = run(tmp_path / "run", data, **options, sequence_length=64, max_steps=3, warmup_steps=1)
    assert result.steps == 3
    assert "targets" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([TURNS[:1]] * 4, PLAIN, "the assistant says nothing"),
        ([["How many?"]] * 4, PLAIN, "not messages with role and content"),
        (LATER, None, "has no chat template"),
        (LATER, "{{ messages[-1].content }}", "generation"),
        (
            LATER,
            "{{ raise_exception('no') }}",
            "no; give messages",
        ),
    ],
)
def test_conversations_that_teach_nothing_are_refused(rows: Any, template: str | None, message: str, tmp_path: Path):
    data = write(tmp_path / "chat.jsonl", rows)
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", data, tokenizer=save(tmp_path / "tokenizer", template), chat_column="messages")
    assert not (tmp_path / "run" / "model").exists()
