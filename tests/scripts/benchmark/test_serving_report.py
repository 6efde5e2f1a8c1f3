"""The report on serving: its numbers are those of the answers, and all servers give the same tokens."""

import json
from pathlib import Path

import pytest

from dynattn.scripts.benchmark.serving_engines import Answer
from dynattn.scripts.benchmark.serving_report import as_markdown, main, summarize

RECORDS = Path(__file__).parents[3] / "model_cards" / "records"


@pytest.mark.parametrize("name", ["serving", "serving-vllm"])
def test_the_table_is_the_one_of_the_record(name: str) -> None:
    record = json.loads((RECORDS / name / "record.json").read_text())
    assert (RECORDS / name / "table.md").read_text() == as_markdown(record)
    assert all(run["same"] == run["requests"] for run in record["runs"])


def test_a_summary_counts_from_when_clients_send() -> None:
    answers = [Answer(10.0, [11.0, 11.5, 12.0], [1, 2, 3]), Answer(11.0, [14.0, 14.1, 15.0], [1, 2, 3])]
    found = summarize(answers)
    assert found["requests_per_second"] == 2 / 5
    assert found["first_token"] == 2.0 and found["first_token_p95"] == 2.9
    assert found["between_tokens"] == 0.5 and 0.5 < found["between_tokens_p95"] < 0.9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--new", "1"], "--new=1 must be at least 2"),  # a single token has no time between tokens
        (["--rounds", "0"], "--rounds=0 must be at least 1"),
        (["--heads", "1"], "--heads=1 must be at least 2"),
        (["--vocabulary", "1"], "--vocabulary=1 must be at least 2"),
        (["--clients", "4", "0"], "--clients 0 must be at least 1"),
        (["--shortest", "300"], "--shortest=300 must be at most --longest=256"),
    ],
)
def test_numbers_that_leave_nothing_to_measure_are_told(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "report"), *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"command": ', "{}"], ids=["half", "of something else"])
def test_a_record_that_is_none_of_this_report_is_told(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "remove it, or give another folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_run_writes_a_record_and_a_table_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"layers": 2, "heads": 2, "width": 8, "vocabulary": 64, "longest": 20, "new": 4, "rounds": 1, "requests": 1}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    main([str(tmp_path), "--clients", "1", "3", *words])
    record = json.loads((tmp_path / "record.json").read_text())
    assert [run["clients"] for run in record["runs"]] == [1] * 4 + [3] * 4
    assert all(run["same"] == run["requests"] == 4 for run in record["runs"])
    table = (tmp_path / "table.md").read_text()
    assert "| 3 | plain batching | " in table and "`generate`:\n32 of 32" in table
    (row,) = [line.split(" | ") for line in table.splitlines() if line.startswith("| 3 | generate | ")]
    assert row[3:5] == ["1.00", "1.00"]
    record["runs"] = record["runs"][:4]
    (tmp_path / "record.json").write_text(json.dumps(record))
    capsys.readouterr()
    main([str(tmp_path), "--clients", "1", "3", *words])
    assert [json.loads(line)["clients"] for line in capsys.readouterr().out.splitlines()] == [3] * 4
    assert json.loads((tmp_path / "record.json").read_text())["runs"][:4] == record["runs"]
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--clients", "2", *words])
    assert "remove it, or give another folder" in capsys.readouterr().err
