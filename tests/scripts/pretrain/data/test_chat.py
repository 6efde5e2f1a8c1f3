"""Conversations: only what the assistant says is a target, whichever way the chat template tells."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.training import arguments, killed_run, parse, run
from cases.versions import needs_transformers
from tokenizers import normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dynattn.scripts.common.builtin_corpus import builtin_conversations
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import Result, pretrain
from dynattn.scripts.pretrain.data.chat_encoder import ChatEncoder
from dynattn.scripts.pretrain.data.chat_template import SHIPPED, give_chat_template
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


@pytest.mark.parametrize("template", [PLAIN, TAGGED, SHIPPED.read_text()], ids=["plain", "tagged", "shipped"])
def test_only_what_the_assistant_says_is_a_target(template: str):
    used = tokenizer(template)
    encoded = ChatEncoder(used)([json.dumps(TURNS), json.dumps(TURNS[:2])])
    assert encoded.targets is not None
    parts = zip(*(np.split(column, encoded.lengths[:1]) for column in (encoded.tokens, encoded.targets)), strict=True)
    end = used.eos_token
    expected = [f"Eight legs.{end}Six.{end}", f"Eight legs.{end}"]
    # Line breaks behind the end of a turn are the template's affair.
    assert [used.decode(tokens[targets]).replace("\n", "") for tokens, targets in parts] == expected
    assert encoded.text_bytes == len("Eight legs.Six.Eight legs.")


# Earlier releases find no answer that begins with a space which a tokenizer leaves out of its offsets.
TAGGED_AND_TRIMMED = pytest.param(TAGGED, True, marks=needs_transformers("5.24"))


@pytest.mark.parametrize(
    ("template", "trim"),
    [(PLAIN, False), (PLAIN, True), (TAGGED, False), TAGGED_AND_TRIMMED],
    ids=["plain", "plain, trimmed", "tagged", "tagged, trimmed"],
)
def test_spaces_of_an_answer_are_targets(template: str, trim: bool):
    """Tokenizers such as Pythia's and Llama 3's leave spaces out of the offsets of tokens."""
    used, said = tokenizer(template), "   if x:\n\n    return  1 "
    used.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    encoded = ChatEncoder(used)([json.dumps([{"role": "user", "content": "Two  "}, {**TURNS[1], "content": said}])])
    assert used.decode(encoded.tokens[encoded.targets]) == f"{said}{used.eos_token}\n"


@pytest.mark.parametrize("template", [PLAIN, TAGGED], ids=["plain", "tagged"])
def test_a_conversation_longer_than_the_model_reads_is_no_reason_to_warn(template: str):
    """Packing cuts it."""
    used = tokenizer(template)
    used.model_max_length = 8
    ChatEncoder(used)([json.dumps(TURNS)])
    assert not used.deprecation_warnings  # where Transformers notes that it has warned


def test_a_turn_without_content_spells_no_text():
    used = tokenizer("{% for m in messages %}<|{{ m.role }}|>{{ m.content or m.call }}{{ eos_token }}{% endfor %}")
    turns = [TURNS[0], {"role": "assistant", "call": "count_legs"}, {"role": "assistant", "content": None, "call": "x"}]
    assert ChatEncoder(used)([json.dumps([*turns, TURNS[3]])]).text_bytes == len("Six.")


REASONING = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"


@pytest.mark.parametrize(
    ("template", "content", "said"),
    [
        (PLAIN, " Eight legs.\n", " Eight legs.\nSix."),
        (SHIPPED.read_text(), " Eight legs.\n", "Eight legs.Six."),
        # Here the line breaks of the template, which are targets, cannot be told from what is said.
        (TAGGED.replace("{{ m.content }}", REASONING, 1), "<think>Four pairs.</think>Eight.", "Eight.\nSix.\n"),
    ],
    ids=["whole", "trimmed", "without reasoning"],
)
def test_text_that_the_template_leaves_out_is_not_measured(template: str, content: str, said: str):
    """Bits per byte would be too low: nothing of it is predicted."""
    turns = [TURNS[0], {"role": "assistant", "content": content}, *TURNS[2:]]
    assert ChatEncoder(tokenizer(template))([json.dumps(turns)]).text_bytes == len(said)


@pytest.mark.parametrize("template", [PLAIN, TAGGED, SHIPPED.read_text()], ids=["plain", "tagged", "shipped"])
def test_text_is_measured_as_it_is_and_not_as_the_tokenizer_spells_it(template: str):
    used = tokenizer(template)
    used.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    turns = [TURNS[0], {"role": "assistant", "content": "\ufb01ve, or \uff16."}]  # becomes "five, or 6."
    assert ChatEncoder(used)([json.dumps(turns)]).text_bytes == len("\ufb01ve, or \uff16.".encode())


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
        ([TURNS], PLAIN, "one conversation cannot be divided .* name validation_dataset"),
        ([["How many?"]] * 4, PLAIN, "not messages with role and content"),
        (LATER, "{{ messages[-1].content }}", "generation"),
        (
            LATER,
            "{{ raise_exception('no') }}",
            "no; correct it, or give messages",
        ),
        (LATER, "{% if", "cannot render .*end of template.*; correct it, or give"),
    ],
)
def test_conversations_that_teach_nothing_are_refused(rows: Any, template: str | None, message: str, tmp_path: Path):
    data = write(tmp_path / "chat.jsonl", rows)
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", data, tokenizer=save(tmp_path / "tokenizer", template), chat_column="messages")
    assert not (tmp_path / "run" / "model").exists()


def test_the_shipped_template_prompts_as_it_trains():
    used = tokenizer(SHIPPED.read_text())
    whole, prompt = (
        used.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)
        for turns, ask in ((TURNS, False), (TURNS[:3], True))
    )
    assert whole == f"{prompt}Six.{used.eos_token}\n"
    tokens = used.apply_chat_template(TURNS)["input_ids"]
    assert tokens[: len(used(prompt)["input_ids"])] == used(prompt)["input_ids"]
    assert tokens[0] == used.bos_token_id and whole.startswith(f"{used.bos_token}<|user|>\nHow many")


def test_the_shipped_template_serves_tokenizers_without_a_start_and_refuses_other_roles():
    used = tokenizer(SHIPPED.read_text())
    used.bos_token = None
    assert used.apply_chat_template(TURNS[:1], tokenize=False).startswith("<|user|>\n")
    with pytest.raises(UserError, match="roles system, user and assistant, not tool"):
        ChatEncoder(used)([json.dumps([*TURNS, {"role": "tool", "content": "3"}])])


@pytest.mark.parametrize("silent", [{"content": None}, {}])
def test_a_turn_without_content_is_empty_in_the_shipped_template(silent: dict[str, Any]):
    """Jinja writes the word None for a missing content, and the model would learn to say it."""
    turns = [*TURNS[:3], {"role": "assistant", **silent}]
    used = tokenizer(SHIPPED.read_text())
    encoded = ChatEncoder(used)([json.dumps(turns)])
    assert used.decode(encoded.tokens[encoded.targets]) == f"Eight legs.{used.eos_token}{used.eos_token}"


def test_the_shipped_template_refuses_content_that_is_no_text():
    turns = [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}, TURNS[1]]
    with pytest.raises(UserError, match="needs text as the content of a message"):
        ChatEncoder(tokenizer(SHIPPED.read_text()))([json.dumps(turns)])


def test_the_shipped_template_refuses_calls_of_tools_instead_of_leaving_them_out():
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "count"}}]}]
    with pytest.raises(UserError, match="writes no tool_calls"):
        ChatEncoder(tokenizer(SHIPPED.read_text()))([json.dumps(turns)])
    without = [TURNS[0], {**TURNS[1], "tool_calls": None}]  # as a column has it that other rows fill
    assert ChatEncoder(tokenizer(SHIPPED.read_text()))([json.dumps(without)]).text_bytes == len("Eight legs.")


def test_a_tokenizer_keeps_its_template_unless_a_file_is_named(tmp_path: Path):
    own, bare = tokenizer(TAGGED), tokenizer(None)
    assert give_chat_template(own, None) == "" and own.chat_template == TAGGED
    (tmp_path / "mine.jinja").write_text(PLAIN)
    assert give_chat_template(own, str(tmp_path / "mine.jinja")) and own.chat_template == PLAIN
    assert give_chat_template(bare, None) and bare.chat_template == SHIPPED.read_text()
    with pytest.raises(UserError, match=r"cannot read the chat template 'missing\.jinja'"):
        give_chat_template(bare, "missing.jinja")


def test_another_template_of_the_same_tokenizer_makes_other_tokens(tmp_path: Path):
    data = write(tmp_path / "chat.jsonl", [[{**TURNS[0], "content": f"{n}?"}, TURNS[1]] for n in range(40)])
    options = {"chat_column": "messages", "sequence_length": 16, "max_steps": 3, "warmup_steps": 0}
    made = []
    for template in (PLAIN, PLAIN, PLAIN.replace("\n", "")):
        killed_run(tmp_path / "run", data, 2, **options, tokenizer=save(tmp_path / "tokenizer", template))
        made.append((tmp_path / "run" / "data" / "train" / "tokens.bin").stat())
    assert made[0].st_mtime_ns == made[1].st_mtime_ns
    assert made[2].st_size < made[1].st_size


def fine_tune(output: Path, **options: Any) -> Result:
    """Two updates with the shipped recipe."""
    options = {"output": output, "max_steps": 2, "warmup_steps": 1, **options}
    return pretrain(parse("sft.yaml", *(str(word) for name, value in options.items() for word in (f"--{name}", value))))


def test_the_recipe_saves_its_template_with_the_model(tmp_path: Path):
    base = run(tmp_path / "base", Path("builtin"), vocab_size=400, max_steps=1, warmup_steps=0, sequence_length=256)
    result = fine_tune(tmp_path / "chat", init_from=base.model)
    assert AutoTokenizer.from_pretrained(result.model).chat_template == SHIPPED.read_text()
    (other := tmp_path / "other.jinja").write_text(TAGGED)
    with pytest.raises(UserError, match=r"tokenizer .*; the run's chat template is (.*\.jinja)") as refusal:
        fine_tune(tmp_path / "chat", init_from=base.model, chat_template=other, max_steps=3)
    kept = str(refusal.value).split("template is ")[1].split(" (")[0]
    assert fine_tune(tmp_path / "chat", init_from=base.model, chat_template=kept, max_steps=3).steps == 3


def test_built_in_conversations_hold_out_a_tenth():
    train, validation = builtin_conversations("train"), builtin_conversations("validation")
    assert 8 < len(train) / len(validation) < 10 and not [turns for turns in validation if turns in train]
    assert all(turn["content"].strip() for turns in train for turn in turns)
    with pytest.raises(ValueError, match="not 'test'"):
        builtin_conversations("test")  # type: ignore[arg-type]


def test_a_template_without_conversations_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="name their chat_column"):
        arguments(tmp_path / "run", Path("builtin"), chat_template="mine.jinja")
