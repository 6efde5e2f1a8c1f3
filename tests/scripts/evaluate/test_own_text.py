"""`dynattn evaluate --dataset`: bits per byte of texts of one's own, by document and by position, and comparisons."""

import errno
import json
import math
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.tokenizers import that_adds_bos, that_knows
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.scripts import cli
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.evaluate import long_suite, own_text, result_files, results
from dynattn.scripts.evaluate.loading import check_dtype
from dynattn.scripts.evaluate.long_context import score_windows
from dynattn.scripts.evaluate.own_text import Scores, score_texts, summarize
from dynattn.scripts.evaluate.result_files import write_files
from dynattn.scripts.evaluate.text_files import FileDocuments, read_documents
from dynattn.scripts.pretrain.data.tokenizer import train_bpe

DOCUMENTS = ["The first text, with a café.", "A second one, which is a little longer than the first text is.", "Third."]
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, and few more."""
    return train_bpe([DOCUMENTS], vocab_size=270)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """A Llama and a DCFormer with random weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    common = {"vocab_size": 300, "max_position_embeddings": 16, **SIZES}
    for name, model in {
        "llama": LlamaForCausalLM(LlamaConfig(**common)),
        "dcformer": DCFormerForCausalLM(DCFormerConfig(**common)),
    }.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return [str(folder / "llama"), str(folder / "dcformer")]


def test_every_token_is_scored_once_from_what_stands_before_it(
    checkpoints: list[str], tokenizer: PreTrainedTokenizerFast
):
    """The first window by one forward pass; later tokens each by a pass of their own over the tokens they may see."""
    model = LlamaForCausalLM.from_pretrained(checkpoints[0]).eval()
    scores = score_texts(model, tokenizer, DOCUMENTS, max_length=16)
    for document, nats, depths in zip(DOCUMENTS, scores.nats, scores.depths, strict=True):
        tokens = torch.tensor([tokenizer.eos_token_id, *tokenizer.encode(document)])
        assert len(nats) == len(depths) == len(tokens) - 1
        expected = []
        for target, depth in enumerate(depths.tolist(), start=1):
            with torch.no_grad():
                logits = model(tokens[None, target - depth : target]).logits[0, -1]
            expected.append(cross_entropy(logits, tokens[target]).item())
        np.testing.assert_allclose(nats, expected, rtol=1e-4, atol=1e-4)
        assert depths[:16].tolist() == list(range(1, len(depths) + 1))[:16]
        assert all(depths[16:] > 8)


def test_scores_that_are_not_numbers_are_refused(checkpoints: list[str], tokenizer: PreTrainedTokenizerFast):
    model = LlamaForCausalLM.from_pretrained(checkpoints[0])
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="the model's logits are NaN"):
        score_texts(model, tokenizer, DOCUMENTS, max_length=16)
    with pytest.raises(UserError, match="the model's logits are NaN"):
        score_windows(model, [[1, 2, 3]])


def test_a_dtype_that_quantized_weights_do_not_get_is_refused(checkpoints: list[str]):
    """Transformers loads what bitsandbytes has quantized in the dtype in which it was saved."""
    model = LlamaForCausalLM.from_pretrained(checkpoints[0])
    check_dtype("here", model, "bfloat16")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    for asked in ("auto", "float32"):
        check_dtype("here", model, asked)
    with pytest.raises(UserError, match="here has quantized weights, with which Transformers computes in float32"):
        check_dtype("here", model, "bfloat16")


def test_a_tokenizer_that_adds_bos_gives_the_same_scores(checkpoints: list[str], tokenizer: PreTrainedTokenizerFast):
    model = LlamaForCausalLM.from_pretrained(checkpoints[0]).eval()
    plain, adding = (score_texts(model, one, DOCUMENTS, max_length=16) for one in (tokenizer, that_adds_bos(tokenizer)))
    for ours, theirs in zip(adding.nats, plain.nats, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_texts_that_a_tokenizer_cannot_express_are_told(checkpoints: list[str], caplog: pytest.LogCaptureFixture):
    tokenizer = that_knows("known")
    model = LlamaForCausalLM.from_pretrained(checkpoints[0]).eval()
    score_texts(model, tokenizer, ["known", "known"], max_length=16)
    assert not caplog.messages
    score_texts(model, tokenizer, ["known word", "other"], max_length=16)
    assert caplog.messages == [
        "2 of 3 tokens are <unk>: what they stand for is not scored, and bits per byte are too low"
    ]
    with pytest.raises(UserError, match=r"no tokens in the document ' \\n'; remove it"):
        score_texts(model, tokenizer, ["known", " \n"], max_length=16)


def test_the_summary_adds_up():
    scores = Scores([np.array([1.0, 3.0]), np.array([2.0])], [np.array([1, 2]), np.array([1])])
    summary = summarize(scores, [4, 1])
    assert summary["bits_per_byte"] == pytest.approx(6 / math.log(2) / 5)
    assert summary["bits_per_byte_of_documents"] == pytest.approx([1 / math.log(2), 2 / math.log(2)])
    assert summary["by_position"] == [
        {"from": 1, "to": 1, "tokens": 2, "loss": 1.5},
        {"from": 2, "to": 3, "tokens": 1, "loss": 3.0},
    ]


def test_checkpoints_are_compared_document_by_document(
    checkpoints: list[str], tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = tmp_path / "texts.jsonl"
    text.write_text("\n".join(json.dumps({"words": document}) for document in [None, *DOCUMENTS]))
    command = ["evaluate", checkpoints[0], "--dataset", str(text), "--text_column", "words"]
    others = [checkpoints[1], checkpoints[1], checkpoints[0]]
    command += ["--others", *others, "--output", str(tmp_path / "results"), "--device", "cpu"]
    command += ["--max_length", "8"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "3 documents of 97 bytes in texts.jsonl" in printed
    assert "| bits per byte | loss per token | difference, documents | p |" in printed
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert results["rows"] == [1, 2, 3] and results["rows_without_text"] == 1
    first, second, _, again = (np.array(one["bits_per_byte_of_documents"]) for one in results["checkpoints"])
    assert results["comparison"][0]["mean"] == pytest.approx((second - first).mean())
    assert 0 < results["comparison"][0]["p"] < 1
    assert results["comparison"][0]["p_holm"] == min(1, 2 * results["comparison"][1]["p"])
    assert results["comparison"][2] == {"mean": 0.0, "sd": 0.0, "interval_95": None, "p": None, "p_holm": None}
    assert first.tolist() == again.tolist()
    scores = score_texts(LlamaForCausalLM.from_pretrained(checkpoints[0]), tokenizer, DOCUMENTS, max_length=8)
    bits = [nats.sum() / math.log(2) / len(one.encode()) for nats, one in zip(scores.nats, DOCUMENTS, strict=True)]
    assert first.tolist() == pytest.approx(bits)
    assert cli.main(command) == 2
    assert "results.json exists; choose another --output or pass --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "measure", "options"),
    [
        (own_text, "score_texts", []),
        (long_suite, "score_windows", ["--suite", "long", "--max_length", "64", "--limit", "1"]),
    ],
)
def test_results_name_the_commit_of_the_code_that_began(
    module: Any,
    measure: str,
    options: list[str],
    checkpoints: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Somebody may commit something else before it has ended."""
    commits, original = ["began"], getattr(module, measure)

    def measure_meanwhile(*arguments: Any, **options: Any) -> Any:
        commits.append("committed meanwhile")
        return original(*arguments, **options)

    monkeypatch.setattr(module, measure, measure_meanwhile)
    monkeypatch.setattr(results, "source_commit", lambda: commits[-1])
    (tmp_path / "text.txt").write_text(9 * DOCUMENTS[1])
    command = ["evaluate", checkpoints[0], "--dataset", str(tmp_path / "text.txt"), *options, "--device", "cpu"]
    assert cli.main([*command, "--output", str(tmp_path / "results")]) == 0
    (scored,) = json.loads((tmp_path / "results" / "results.json").read_text())["checkpoints"]
    assert scored["commit"] == "began"


def test_files_of_the_user_are_not_replaced(checkpoints: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "samples.jsonl").write_text("mine")
    command = ["evaluate", checkpoints[0], "--dataset", "texts.jsonl", "--output", str(tmp_path), "--device", "cpu"]
    assert cli.main(command) == 2
    assert "samples.jsonl exists; choose another --output or pass --overwrite" in capsys.readouterr().err
    assert (tmp_path / "samples.jsonl").read_text() == "mine"


def test_a_folder_of_the_user_named_lm_eval_is_not_deleted(
    checkpoints: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "lm-eval" / "model").mkdir(parents=True)
    (tmp_path / "lm-eval" / "model" / "main.py").write_text("mine")
    (tmp_path / "text.txt").write_text(DOCUMENTS[0], encoding="utf-8")
    command = ["evaluate", checkpoints[0], "--dataset", str(tmp_path / "text.txt"), "--output", str(tmp_path)]
    assert cli.main([*command, "--device", "cpu", "--overwrite"]) == 2
    assert "also holds model/main.py, which would be lost" in capsys.readouterr().err
    assert (tmp_path / "lm-eval" / "model" / "main.py").read_text() == "mine"


def test_an_evaluation_that_ended_meanwhile_is_not_replaced(tmp_path: Path):
    write_files(tmp_path, {"of": "one"}, "table", overwrite=False)
    with pytest.raises(UserError, match=r"results.json exists; choose another --output"):
        write_files(tmp_path, {"of": "another"}, "table", overwrite=False)
    assert json.loads((tmp_path / "results.json").read_text()) == {"of": "one"}


def test_of_two_evaluations_that_end_at_once_the_later_is_not_written(tmp_path: Path):
    with ThreadPoolExecutor() as pool:
        later: list[Future[None]] = []

        def end_meanwhile(_: Path) -> None:
            later.append(pool.submit(write_files, tmp_path, {"of": "another"}, "its table", overwrite=False))
            time.sleep(0.1)

        write_files(tmp_path, {"of": "one"}, "table", end_meanwhile, overwrite=False)
        with pytest.raises(UserError, match=r"results.json exists; choose another --output"):
            later[0].result()
    assert {path.name: path.read_text().strip() for path in tmp_path.glob("*.md")} == {"results.md": "table"}
    assert json.loads((tmp_path / "results.json").read_text()) == {"of": "one"}


def test_a_full_disk_costs_neither_the_earlier_evaluation_nor_the_new_table(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fill_disk(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    write_files(tmp_path / "results", {"of": "one"}, "table", overwrite=False)
    before = {path.name: path.read_text() for path in (tmp_path / "results").iterdir()}
    (tmp_path / "text.txt").write_text(DOCUMENTS[0], encoding="utf-8")
    monkeypatch.setattr(result_files, "write_json", fill_disk)
    command = ["evaluate", checkpoints[0], "--dataset", str(tmp_path / "text.txt"), "--device", "cpu"]
    assert cli.main([*command, "--output", str(tmp_path / "results"), "--overwrite"]) == 2
    printed = capsys.readouterr()
    assert "No space left on device; make room" in printed.err and "1 documents of" in printed.out
    assert {path.name: path.read_text() for path in (tmp_path / "results").iterdir()} == before


def test_an_overwritten_evaluation_of_another_kind_leaves_nothing(checkpoints: list[str], tmp_path: Path):
    (tmp_path / "text.txt").write_text(DOCUMENTS[0], encoding="utf-8")
    output = tmp_path / "results"
    (output / "lm-eval" / "model").mkdir(parents=True)
    for name in ("lm-eval/model/results_1.json", "samples.jsonl", "long.png", "results.json", "notes.txt"):
        (output / name).write_text("{}")
    command = ["evaluate", checkpoints[0], "--dataset", str(tmp_path / "text.txt"), "--output", str(output)]
    assert cli.main([*command, "--device", "cpu", "--overwrite"]) == 0
    assert sorted(path.name for path in output.iterdir()) == ["notes.txt", "results.json", "results.md"]


@pytest.mark.parametrize(
    ("index", "words", "message"),
    [
        (1, ["--carry_memory"], "carry_memory is for models whose cache is a memory, like rcmha, and dcformer is none"),
        (0, ["--max_length", "17"], "max_length 17 exceeds the model's context of 16 tokens (max_position_emb"),
    ],
)
def test_what_a_model_cannot_read_is_refused(
    index: int, words: list[str], message: str, checkpoints: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "text.txt").write_text(DOCUMENTS[0], encoding="utf-8")
    assert cli.main(["evaluate", checkpoints[index], "--dataset", str(tmp_path / "text.txt"), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_text_file_is_one_document_and_parquet_has_one_a_row(tmp_path: Path):
    from datasets import Dataset

    (tmp_path / "text [v2].txt").write_text("one\n\ntwo\n", encoding="utf-8")
    assert read_documents(str(tmp_path / "text [v2].txt"), "text") == FileDocuments(["one\n\ntwo\n"], [0], 0)
    (tmp_path / "crlf.txt").write_bytes(b"one\r\ntwo\r\n")
    assert read_documents(str(tmp_path / "crlf.txt"), "text").texts == ["one\r\ntwo\r\n"]
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfone")  # a byte order mark is no text
    assert read_documents(str(tmp_path / "marked.txt"), "text").texts == ["one"]
    Dataset.from_dict({"text": ["a", "", None, "b"]}).to_parquet(str(tmp_path / "text.parquet"))
    assert read_documents(str(tmp_path / "text.parquet"), "text") == FileDocuments(["a", "b"], [0, 3], 2)
    with pytest.raises(UserError, match=r"has no column 'words' but \['text'\]"):
        read_documents(str(tmp_path / "text.parquet"), "words")


def test_rows_without_text_are_told_and_others_keep_their_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The name looks like an address, and the texts like dates."""
    values = ["2020-01-01", None, "", 3, "2021-01-01\u2028b"]
    rows = [{"other": 0}, *({"text": value} for value in values)]
    lines = tmp_path / "we::ird.jsonl"
    lines.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    for name, first in (("we::ird.jsonl", "line 1"), ("array.json", "row 0")):
        assert read_documents(str(tmp_path / name), "text") == FileDocuments([values[0], values[-1]], [1, 5], 4)
        assert f"{name} have no text in their column 'text' and are left out, the first is {first}" in caplog.text
        assert caplog.messages[-1].startswith("4 of 6 rows of ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("lines.jsonl", b'{"text": "a"}\n\n{"text": \n', "line 3 is no JSON: Expecting value"),
        ("lines.jsonl", b'{"text": "a"}\n[1]\n', "line 2 is no object with fields"),
        ("lines.jsonl", b'{"text": "a"}\n{"text": "a \\ud800"}', r"line 2 has \ud800, half of a surrogate pair"),
        ("array.json", b'[{"text": "a"},\n{"text": }]', "line 2 is no JSON: Expecting value"),
        ("array.json", b'[{"text": "a"}, "b"]', "row 1 is no object with fields"),
        ("latin.jsonl", '{"text": "é"}'.encode("latin-1"), "'utf-8' codec can't decode byte 0xe9"),
        ("latin.txt", "é".encode("latin-1"), "'utf-8' codec can't decode byte 0xe9"),
        ("broken.parquet", b"PAR1", "Parquet"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(name: str, content: bytes, message: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"cannot read .*{name}: .*{re.escape(message)}"):
        read_documents(str(tmp_path / name), "text")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset", "missing.jsonl"], "dataset='missing.jsonl' is no file; check its name"),
        (["--dataset", "texts.csv"], "must be a file that ends in .txt"),
        (["--dataset", "texts.jsonl", "--tasks", "x"], "exclude each other"),
        (["--dataset", "texts.jsonl", "--suite", "pythia"], "exclude each other"),
        (["--suite", "pythia", "--tasks", "x"], "tasks=['x'] and suite=pythia exclude each other; give one"),
        (["--others", "x"], "are compared on --dataset FILE"),
        (["--dataset", "texts.jsonl"], "has no column 'text' but ['words']"),
        (["--dataset", "broken.jsonl"], "cannot read broken.jsonl"),
        (["--dataset", "empty.jsonl"], "holds no text in its column 'text'"),
        (["--dataset", "x.txt", "--num_fewshot", "0", "--truncate"], "--dataset has no num_fewshot, truncate"),
        (["--dataset", "x.txt", "--seed", "1", "--batch_size", "1"], "--dataset has no batch_size, seed"),
        (["--dataset", "x.txt", "--log_samples", "--output", "x"], "--dataset has no log_samples"),
        (["--text_column", "words"], "text_column=words is of --dataset FILE"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("texts.csv").write_text("text\nx\n")
    Path("texts.jsonl").write_text('{"words": "x"}\n')
    Path("broken.jsonl").write_text('{"text": \n')
    Path("empty.jsonl").write_text('{"text": ""}\n')
    assert cli.main(["evaluate", "nowhere", *words]) == 2
    assert message in capsys.readouterr().err
