"""`dynattn kernel`: the repository that Hugging Face's `kernels` loads, where the package cannot be imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases.composed_op import Case, in_dtype, random_inputs
from safetensors.torch import load_file, save_file

from dynattn import Composition, dcmha_attention
from dynattn.scripts.cli import main

PROGRAM = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dynattn":
            raise ModuleNotFoundError("this process has no dynattn")

sys.meta_path.insert(0, Block())
from kernels import get_kernel
from safetensors.torch import load_file, save_file
import torch

kernel = get_kernel("someone/dynattn", version=1)
given = load_file("inputs.safetensors")
stages = {
    stage: kernel.Composition(**{k.removeprefix(stage + "."): v for k, v in given.items() if k.startswith(stage)})
    for stage in ("pre", "post")
}

def attend(attention, step):
    query = given["query"][:, :, -1:] if step else given["query"]
    now = {name: stage.narrow(queries=slice(-1, None)) if step else stage for name, stage in stages.items()}
    return attention(query, given["key"], given["value"], **now)

answers = {"whole": attend(kernel.dcmha_attention, False), "step": attend(kernel.dcmha_attention, True)}
sys.meta_path.pop(0)
import dynattn  # its operators have other names

answers["whole again"] = attend(kernel.dcmha_attention, False)
answers["package"] = attend(dynattn.dcmha_attention, False)
assert kernel.dcmha_attention is not dynattn.dcmha_attention
save_file(answers, "answers.safetensors")
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernel") / "dynattn-kernel"
    assert main(["kernel", str(folder)]) == 0
    return folder


def test_kernels_loads_it_without_the_package(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("kernels")
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(40, 40)))
    given = dict(zip(("query", "key", "value"), tensors, strict=False))
    for stage in ("pre", "post"):
        given |= {f"{stage}.{name}": factor for name, factor in keywords[stage].tensors().items()}
    save_file({name: tensor.detach().contiguous() for name, tensor in given.items()}, tmp_path / "inputs.safetensors")
    environment = {**os.environ, "LOCAL_KERNELS": f"someone/dynattn={repository}", "HF_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, check=True)
    answers = load_file(tmp_path / "answers.safetensors")
    with torch.no_grad():
        expected = dcmha_attention(*tensors[:3], pre=keywords["pre"], post=keywords["post"])
    for name in ("whole", "whole again", "package"):
        torch.testing.assert_close(answers[name], expected)
    torch.testing.assert_close(answers["step"], expected[:, -1:])


def test_its_files_are_those_that_its_metadata_promises(repository: Path) -> None:
    """By the reader of `kernels`, which refuses metadata that lack something."""
    rust = pytest.importorskip("kernels._rust")
    for backend in ("cpu", "cuda"):
        folder = repository / "build" / f"torch-{backend}"
        metadata = rust.Metadata.read_from_file(folder / "metadata.json")
        assert metadata.name.python_name == "dynattn"
        assert metadata.backend.backend_type == rust.Backend.from_str(backend)
        metadata.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, folder))


def test_nothing_in_it_names_the_package(repository: Path) -> None:
    """Operators have names of their own, so that they do not replace those of the package."""
    for folder in (repository / "build").iterdir():
        sources = [path.read_text() for path in folder.glob("*.py")]
        operators = [name for source in sources for name in re.findall(r'custom_op\(\s*f"(.+?)"', source)]
        assert operators and sum(source.count("custom_op(") for source in sources) == len(operators)
        assert all(name.startswith("{NAMESPACE}::") for name in operators)  # which is that of the copy
        assert not any(
            line.startswith(("import dynattn", "from dynattn")) for text in sources for line in text.split("\n")
        )


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("text")
    assert main(["kernel", str(tmp_path)]) == 2
    assert "exists; give another folder to write" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_what_it_offers_is_the_package_own(repository: Path) -> None:
    text = (repository / "build" / "torch-cpu" / "__init__.py").read_text()
    assert f"import {Composition.__name__}\n" in text
    assert "__all__ = ['AttentionMaps', 'Composition', 'dcmha_attention'," in text
