"""The command's refusals, each of them one line."""

from pathlib import Path

import pytest

from dynattn.scripts import cli
from dynattn.scripts.benchmark import main as benchmark
from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.subjects.selection import NAMED, USUAL
from dynattn.scripts.common.errors import UserError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--subjects", "speed"],
            "unknown subject 'speed'; choose from attention, block, training, prefill, decode, step, ",
        ),
        (["--implementations", "magic"], "unknown implementation 'magic'; choose from eager, "),
        (["--subjects", ","], "--subjects names none; leave it out for the usual ones"),
        (["--implementations", ",", ","], "--implementations names none; leave it out for the usual ones"),
        (["--shapes", ","], "--shapes names none; leave it out for the usual ones"),
        (["--shapes", "16x64"], "shape '16x64' is not HEADSxWIDTH@LENGTH"),
        (["--shapes", "16x0@64"], "shape '16x0@64' is not HEADSxWIDTH@LENGTH with positive numbers"),
        (["--shapes", "2x8@8+8"], r"a shape with \+MEMORY is for --subjects relative alone"),
        (["--window", "4"], "--window is not for the subject relative; name other --subjects"),
        (["--device", "tpu"], "device 'tpu' cannot be measured; choose cpu or cuda"),
        (["--device", "cuda:77"], r"device 'cuda:77' is not there \(\d+ CUDA devices found\); use cpu"),
        (["--resume", "--overwrite"], "--resume goes on with the record that --overwrite would replace"),
        (["--preset", "gpu", "--dtype", "float16", "--window", "9"], "--preset gpu decides dtype, window by itself"),
        (
            ["--preset", "gpu", "--parts", "decode-16", "dcode-1"],
            "the preset has no part 'dcode-1'; its parts are",
        ),
        (["--preset", "gpu", "--parts", "decode-16,x"], "the preset has no part 'x'; its parts are"),
        (["--preset", "gpu", "--parts", ","], "--parts names no part; leave it out for all of them"),
        (["--parts", "decode-1"], "--parts decode-1 are parts of a preset; add --preset gpu"),
        (["--preset", "gpu", "--device", "cpu"], "--preset gpu, but --device cpu is no GPU; give cuda"),
        (["--preset", "gpu"], "--preset gpu needs a CUDA device, and none was found"),
        (["--budget", "0"], "budget=0.0 must be a positive number"),
        (["--threads", "0"], "threads=0 must be a positive number"),
        (["--rounds", "0"], "rounds=0 must be a positive number"),
        (["--redraw", "nowhere.json"], "cannot read the record nowhere.json"),
        (["--redraw", "pyproject.toml"], "cannot read the record pyproject.toml"),
    ],
)
def test_mistakes_are_told(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["benchmark", "--output", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("dynattn benchmark: error: ")
    assert len(error.splitlines()) == 1
    with pytest.raises(UserError, match=message):
        benchmark.main(["--output", str(tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()


def test_the_help_names_all_subjects_those_that_run_by_default_first() -> None:
    said = BenchmarkArguments.__dataclass_fields__["subjects"].metadata["help"]
    names = [*(one.name for one in USUAL), *sorted(one.name for one in NAMED)]
    assert said == f"what to measure: {', '.join(names)}; all but the last four if not given"
    assert len(NAMED) == 4


def test_a_record_is_not_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "record.json").write_text("{}")
    assert cli.main(["benchmark", "--output", str(tmp_path)]) == 2
    assert "record.json exists; choose another --output, or pass --resume or --overwrite" in capsys.readouterr().err
    assert cli.main(["benchmark", "--redraw", str(tmp_path / "record.json"), "--output", str(tmp_path / "o")]) == 2
    assert "is not the record.json of a benchmark" in capsys.readouterr().err
    (tmp_path / "record.json").write_text('{"cases": [7]}')
    assert cli.main(["benchmark", "--redraw", str(tmp_path / "record.json"), "--output", str(tmp_path / "o")]) == 2
    assert "is not the record.json of a benchmark" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
