"""Pushing, against a small server on loopback that speaks the endpoints of the Hub which `huggingface_hub` uses."""

import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cases.checkpoints import contents
from huggingface_hub import constants

import dynattn
from dynattn.scripts.cli import main
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.publish import publish
from dynattn.scripts.publish.arguments import PublishArguments
from dynattn.scripts.publish.hub import push

TOKEN = "hf_loopback"


class Hub(ThreadingHTTPServer):
    """Repositories in memory: `files[repo][branch][path]` is the content."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.large: dict[str, bytes] = {}
        self.status: int | None = None  # answer everything with this status

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.handle_request(self.get)

    def do_POST(self) -> None:
        self.handle_request(self.post)

    def do_PUT(self) -> None:
        self.handle_request(self.put)

    def handle_request(self, answer: Any) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        stored = self.path.startswith("/storage/")  # signed addresses carry no token
        if self.server.status is not None:
            self.reply({"error": "stub says no"}, self.server.status)
        elif not stored and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.reply({"error": "Invalid credentials in Authorization header"}, 401)
        else:
            answer()

    def reply(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def get(self) -> None:
        if match := re.fullmatch(r"/api/models/(.+)/tree/([^?]+).*", self.path):
            files = self.server.files[match[1]][match[2]]
            self.reply(
                [{"type": "file", "path": path, "size": len(body), "oid": "0" * 40} for path, body in files.items()]
            )
        elif match := re.fullmatch(r"/api/models/(.+?)(/revision/.+)?(\?.*)?", self.path):
            self.reply({"id": match[1], "_id": "1", "sha": "0" * 40, "siblings": [], "private": False, "tags": []})
        else:
            self.reply({"error": f"unknown address {self.path}"}, 404)

    def post(self) -> None:
        hub = self.server
        if self.path == "/api/repos/create":
            self.create(json.loads(self.body))
        elif self.path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/(.+)/branch/(.+)", self.path):
            exists = match[2] in hub.files[match[1]]
            hub.files[match[1]].setdefault(match[2], dict(hub.files[match[1]]["main"]))
            self.reply({}, 409 if exists else 200)
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(self.body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in files}
            self.reply({"files": [{"path": p, "uploadMode": modes[p], "shouldIgnore": False} for p in files]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            oids = [(file["oid"], file["size"]) for file in json.loads(self.body)["objects"]]
            actions = {oid: {"upload": {"href": f"{hub.url}/storage/{oid}"}} for oid, _ in oids}
            self.reply({"objects": [{"oid": oid, "size": size, "actions": actions[oid]} for oid, size in oids]})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/([^?]+)", self.path):
            self.commit(match[1], match[2])
        else:
            self.reply({"error": f"unknown address {self.path}"}, 404)

    def put(self) -> None:
        oid = self.path.removeprefix("/storage/")
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.server.large[oid] = self.body
        self.reply({})

    def create(self, wanted: dict[str, Any]) -> None:
        repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        exists = repo in self.server.files
        self.server.files.setdefault(repo, {"main": {}})
        self.server.private.setdefault(repo, bool(wanted.get("private") or wanted.get("visibility") == "private"))
        self.reply({"url": f"{self.server.url}/{repo}", "name": repo, "id": "1"}, 409 if exists else 200)

    def commit(self, repo: str, branch: str) -> None:
        files = self.server.files[repo][branch]
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                self.server.messages.append(value["summary"])
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        self.reply({"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.server.url}/{repo}/commit/{'1' * 40}"})

    def log_message(self, *args: Any) -> None:
        """Keeps the test output clean."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running server that this process takes for the Hub, and a token that it accepts."""
    server = Hub()
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-hub"
    path.mkdir()
    for name in ("config.json", "modeling_dcformer.py", "model.safetensors"):
        (path / name).write_bytes(name.encode() * 50)
    (path / "README.md").write_text("---\nlibrary_name: transformers\n---\n# tiny\n")
    return path


def test_everything_arrives_in_one_commit(hub: Hub, folder: Path) -> None:
    url = push(folder, "me/tiny", private=True, commit_message="First")
    assert hub.files["me/tiny"]["main"] == contents(folder)
    assert hub.private["me/tiny"]
    assert hub.messages == ["First"]
    assert url.startswith(f"{hub.url}/me/tiny/commit/")


def test_a_second_push_removes_stale_weights_and_code_and_keeps_the_rest(hub: Hub, folder: Path) -> None:
    push(folder, "me/tiny")
    settings = ("generation_config.json", "preprocessor_config.json", "adapter_config.json")
    kept = dict.fromkeys(("notes.md", "training/main.py", "step-1/model.safetensors"), b"theirs")
    hub.files["me/tiny"]["main"].update(dict.fromkeys(settings, b"theirs") | kept)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "modeling_dcformer.py").rename(folder / "modeling_other.py")
    push(folder, "me/tiny")
    assert hub.files["me/tiny"]["main"] == contents(folder) | kept
    assert len(hub.messages) == 2
    assert not hub.private["me/tiny"]


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_chat_template_of_another_tokenizer_does_not_stay(hub: Hub, folder: Path, has_tokenizer: bool) -> None:
    template = {"chat_template.jinja": b"theirs", "additional_chat_templates/tools.jinja": b"theirs"}
    push(folder, "me/tiny")
    hub.files["me/tiny"]["main"].update(template)
    if has_tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    push(folder, "me/tiny")
    assert hub.files["me/tiny"]["main"] == contents(folder) | ({} if has_tokenizer else template)


def test_a_revision_is_a_branch_of_its_own(hub: Hub, folder: Path) -> None:
    push(folder, "me/tiny", revision="step-1000")
    push(folder, "me/tiny", revision="step-1000")
    assert hub.files["me/tiny"]["main"] == {}
    assert hub.files["me/tiny"]["step-1000"] == contents(folder)


@pytest.mark.parametrize(
    ("status", "advice"),
    [(401, "hf auth login"), (403, "write permission"), (404, "name of the repository"), (400, "stub says no")],
)
def test_refusals_are_one_line_that_says_what_to_do(hub: Hub, folder: Path, status: int, advice: str) -> None:
    hub.status = status
    before = contents(folder)
    with pytest.raises(UserError, match=advice) as error:
        push(folder, "me/tiny")
    assert "\n" not in str(error.value)
    # `hf upload --delete PATTERN` would delete in sub-folders of the repository, too.
    assert str(error.value).endswith("push it later with the same command and --overwrite")
    assert contents(folder) == before


def test_a_wrong_token_is_refused(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match=r"401 \(Invalid credentials.*\); log in"):
        push(folder, "me/tiny")
    assert hub.files == {}


def test_no_server_is_one_line(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(UserError, match=r"cannot push to me/tiny at http://127\.0\.0\.1.*refused"):
            push(folder, "me/tiny")


@pytest.mark.parametrize("repo", ["a/b/c", "me/ti ny", "-me", "", "me/x.git"])
def test_impossible_names_are_refused_before_any_work(repo: str) -> None:
    with pytest.raises(UserError, match="no name for a repository"):
        PublishArguments("unused", repo=repo)


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(UserError, match="private, revision only matter for a push"):
        PublishArguments("unused", private=True, revision="x")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    config = dynattn.DCFormerConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    dynattn.DCFormerForCausalLM(config).save_pretrained(path)
    return path


def test_dry_run_lists_sizes_and_asks_nobody(
    hub: Hub, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    options = ["--output", str(output), "--repo", "me/tiny", "--no_verify", "--dry-run"]
    assert main(["publish", str(checkpoint), *options]) == 0
    printed = capsys.readouterr().out
    size = sum(path.stat().st_size for path in output.iterdir())
    assert f"would upload these {len(list(output.iterdir()))} files, {size:,} bytes, to me/tiny" in printed
    assert f"{(output / 'model.safetensors').stat().st_size:,}  model.safetensors" in printed
    assert hub.files == {}


@pytest.mark.parametrize(
    ("setting", "message"), [("offline", "HF_HUB_OFFLINE is set"), ("no token", "there is no token for the Hub")]
)
def test_a_push_that_cannot_work_is_refused_before_anything_is_written(
    hub: Hub, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, message: str
) -> None:
    if setting == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with pytest.raises(UserError, match=message):
        publish(PublishArguments(str(checkpoint), output=str(tmp_path / "out"), repo="me/tiny"))
    assert not (tmp_path / "out").exists()


def test_the_command_pushes(hub: Hub, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert main(["publish", str(checkpoint), "--no_verify", "--output", str(output), "--repo", "me/tiny"]) == 0
    assert hub.files["me/tiny"]["main"] == contents(output)
    assert f"pushed      {hub.url}/me/tiny/commit/" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_pushes_to_hf_endpoint(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "dynattn.scripts.cli", "publish", str(checkpoint), "--no_verify"]
    finished = subprocess.run(
        [*command, "--output", str(tmp_path / "out"), "--repo", "me/tiny"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert hub.files["me/tiny"]["main"] == contents(tmp_path / "out")
    assert f"pushed      {hub.url}/me/tiny/commit/" in finished.stdout
