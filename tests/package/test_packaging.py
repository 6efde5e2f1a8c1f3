"""The package as users get it: wheel, sdist and sources hold every module, and type checkers see its hints."""

import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import dynattn
from dynattn.remote_code import flat_name

ROOT = Path(__file__).parents[2]
SOURCES = ("package", "configuration", "modeling", "scripts")


def package_of(folder: Path) -> str:
    parts = folder.relative_to(ROOT).parts
    return ".".join(["dynattn", *(parts[1:] if parts[0] == "package" else parts)])


def shipped_files() -> list[Path]:
    """Code and data of the package."""
    suffixes = {".py", ".yaml", ".jinja", ".json", ".typed", ".c", ".h"}
    files = [path for top in SOURCES for path in (ROOT / top).rglob("*") if path.suffix in suffixes]
    return [path for path in files if "__pycache__" not in path.parts]


def test_every_folder_of_the_sources_is_listed() -> None:
    """A folder of data that is missing fills the first screen of an installation with warnings."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(settings["packages"]) == sorted({package_of(path.parent) for path in shipped_files()})


def test_pins_leave_to_torch_what_its_builds_for_cuda_pin_themselves() -> None:
    """Two pins of one package are a conflict, with which `make` would end in its first minute."""
    pinned = [line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert "torch" in pinned
    assert not [name for name in pinned if name.startswith(("triton", "nvidia-", "cuda-"))]


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == dynattn.__version__
    assert f"## {dynattn.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_flat_names_of_remote_code_are_unique() -> None:
    files = [path for top in ("configuration", "modeling") for path in (ROOT / top).rglob("*.py")]
    modules = [f"{package_of(path.parent)}.{path.stem}" for path in files if path.name != "__init__.py"]
    assert len({flat_name(module) for module in modules}) == len(modules)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of what git would ship."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "would be ignored" not in built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_wheel_and_sdist_hold_every_file(distributions: Path) -> None:
    shipped = shipped_files()
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        in_wheel = set(wheel.namelist())
    expected = {"/".join((*package_of(path.parent).split("."), path.name)) for path in shipped}
    assert expected <= in_wheel
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as sdist:
        in_sdist = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert {str(path.relative_to(ROOT)) for path in shipped} <= in_sdist
    for path in ("tests/conftest.py", "model_cards/dcformer.md", "LICENSE", "README.md", "constraints.txt", "Makefile"):
        assert path in in_sdist


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wheel", "source", "editable"])
def test_installed_in_every_way_it_imports_and_runs(distributions: Path, tmp_path: Path, way: str) -> None:
    venv.create(tmp_path / "env", system_site_packages=False, with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    # The dependencies are those of the running environment; only the package itself is installed anew.
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    (site / "dependencies.pth").write_text(f"{dependencies_only(tmp_path)}\n")
    target = {
        "wheel": [str(next(distributions.glob("*.whl")))],
        "source": [str(ROOT)],
        "editable": ["--editable", str(ROOT)],
    }[way]
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", *target]
    subprocess.run(install, check=True)
    program = (
        "import dynattn; from transformers import AutoConfig;"
        "print(dynattn.__file__, AutoConfig.for_model('dcformer').model_type)"
    )
    shown = subprocess.run([str(python), "-c", program], check=True, cwd=tmp_path, capture_output=True, text=True)
    origin, model_type = shown.stdout.split()
    assert model_type == "dcformer"
    assert (ROOT in Path(origin).parents) == (way == "editable")
    jobs = subprocess.run([tmp_path / "env" / "bin" / "dynattn", "--help"], check=True, capture_output=True, text=True)
    assert "pretrain" in jobs.stdout


def dependencies_only(folder: Path) -> Path:
    """A folder of links to the running environment's packages, without `dynattn` and its import hook."""
    links = folder / "dependencies"
    links.mkdir()
    (here,) = {Path(path) for path in sys.path if path.endswith("site-packages")} & {
        Path(__import__("torch").__file__).parent.parent
    }
    for entry in here.iterdir():
        if "dynattn" not in entry.name and entry.suffix != ".pth":
            (links / entry.name).symlink_to(entry)
    return links


@pytest.mark.slow
def test_type_checkers_read_the_installed_hints(distributions: Path, tmp_path: Path) -> None:
    wheel = next(distributions.glob("*.whl"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*install, str(wheel)], check=True)
    (tmp_path / "user.py").write_text(
        "from dynattn import DCFormerConfig\nreveal_type(DCFormerConfig.from_size('tiny').hidden_size)\n"
    )
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "user.py"],
        check=False,
        cwd=tmp_path,
        env={"MYPYPATH": str(tmp_path / "site"), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert 'Revealed type is "int"' in checked.stdout.replace("builtins.", ""), checked.stdout
