"""The guide on serving: its Python blocks run in their order, and its commands serve a client."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from cases.models import make_model
from cases.processes import free_port
from cases.serving import running_server, save_with_tokenizer
from cases.text import fenced_blocks
from cases.versions import needs_transformers

GUIDE = (Path(__file__).parents[2] / "docs/guides/serving.md").read_text(encoding="utf-8")
TRANSFORMERS = GUIDE.partition("## Transformers")[2].partition("## An HTTP server")[0]
SERVER = GUIDE.partition("## An HTTP server")[2].partition("\n## ")[0]


@needs_transformers("5.23")
def test_python_blocks_run_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in fenced_blocks(TRANSFORMERS, "python"):
        exec(block, names)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[5, 17, 42] [") and lines[1].startswith("[7, 8, 9, 10, 11] [")
    assert len(lines) == 2 + 8
    whole = lines[0].removeprefix("[5, 17, 42] ")
    assert lines[-1] == whole and all(whole.startswith(part.rstrip("]")) for part in lines[2:])


@pytest.mark.slow
def test_commands_serve_a_client(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="pip install 'dynattn[serving]'")
    save_with_tokenizer(
        make_model(max_position_embeddings=2048, eos_token_id=1, pad_token_id=0), tmp_path / "my-dcformer"
    )
    start, ask = fenced_blocks(SERVER, "bash")
    (words,) = re.findall(r"^dynattn (.*--port) 8000$", start, re.MULTILINE)
    port = free_port()
    with running_server([sys.executable, "-m", "dynattn.scripts.cli", *words.split(), str(port)], port, tmp_path):
        asked = ask.replace(":8000/", f":{port}/")
        answer = subprocess.run(["bash", "-c", asked], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as models:
            assert [model["id"] for model in json.loads(models.read())["data"]] == ["my-dcformer"]
    assert answer.count('"content":') == 10 and '"finish_reason":"length"' in answer
