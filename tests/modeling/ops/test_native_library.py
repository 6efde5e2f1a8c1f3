"""The cache of compiled libraries: only what this user wrote, and wrote completely, is loaded."""

import hashlib
import os
import pwd
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dynattn import Composition, dcmha_attention
from dynattn.modeling.ops import c_compiler, code_cache, native_library

pytestmark = [
    pytest.mark.skipif(c_compiler.find_compiler() is None, reason="there is no C compiler"),
    pytest.mark.usefixtures("libraries"),
]
SOURCE = "int answer(void) { return ANSWER; }"
MACROS = (("ANSWER", 42),)
HOSTILE = "int answer(void) { return 66; }"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which libraries are kept; temporary files have a place of their own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "home" / "dynattn"


def answer() -> int:
    """What the library says that is compiled or found, in a process of its own: no process loads a path twice."""
    process = os.fork()
    if not process:
        try:
            os._exit(native_library.load_library.__wrapped__(SOURCE, MACROS).answer())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def libraries_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.so"))


def replace_by_hostile_code(library: Path) -> None:
    """The same file name, owner and mode, and other code."""
    command = [*(c_compiler.find_compiler() or ()), "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    library.unlink()
    subprocess.run(command, input=HOSTILE, text=True, check=True)
    library.chmod(0o700)


def truncate(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def test_what_is_compiled_once_is_only_loaded_later(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:  # several processes may compile the same at the same time
        list(pool.map(lambda _: native_library.load_library.__wrapped__(SOURCE, MACROS), range(4)))
    (library,) = libraries_in(cache)
    written = library.stat().st_mtime_ns
    assert answer() == 42
    assert library.stat().st_mtime_ns == written


@pytest.mark.parametrize("damage", [replace_by_hostile_code, truncate, lambda library: library.write_bytes(b"")])
def test_a_library_with_other_contents_is_compiled_anew(cache: Path, damage: Callable[[Path], object]) -> None:
    answer()
    (library,) = libraries_in(cache)
    intact = library.read_bytes()
    damage(library)
    assert answer() == 42
    assert [path.read_bytes() for path in libraries_in(cache)] == [intact]


def test_a_library_that_does_not_load_here_is_compiled_anew(cache: Path) -> None:
    """As one of another processor, in a home that machines share; its checksum is right."""
    assert answer() == 42
    [library] = libraries_in(cache)
    content = b"\x7fELF of another processor"
    foreign = library.with_name(library.name.replace(library.stem[-64:], hashlib.sha256(content).hexdigest()))
    library.unlink()
    foreign.write_bytes(content)
    foreign.chmod(0o700)
    assert answer() == 42
    assert len(libraries_in(cache)) == 2


def test_a_library_that_others_can_write_is_compiled_anew(cache: Path) -> None:
    answer()
    (library,) = libraries_in(cache)
    before = library.stat().st_mtime_ns
    library.chmod(0o722)
    assert answer() == 42
    (library,) = libraries_in(cache)
    assert library.stat().st_mtime_ns != before and library.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_gone_around(cache: Path, mode: int) -> None:
    answer()
    cache.chmod(mode)
    assert answer() == 42
    assert len(libraries_in(cache)) == 1
    (elsewhere,) = libraries_in(Path(tempfile.gettempdir()))
    assert elsewhere.parent.name == f"dynattn-{os.geteuid()}" and elsewhere.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_below_one_that_others_may_rename_is_gone_around(cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    cache.parent.chmod(0o777)
    assert answer() == 42 and not libraries_in(cache)
    cache.parent.chmod(0o1777)  # as the folder of temporary files is
    assert answer() == 42 and libraries_in(cache)


def test_what_killed_compilations_have_left_is_removed(cache: Path) -> None:
    for name in ("tmp-abandoned", "tmp-in-use"):
        (cache / name).mkdir(parents=True, mode=0o700)
        (cache / name / "code.o").touch()
    os.utime(cache / "tmp-abandoned", (0, 0))
    cache.chmod(0o700)
    assert answer() == 42
    assert [path.name for path in cache.iterdir() if path.suffix != ".so"] == ["tmp-in-use"]


@pytest.mark.skipif(not hasattr(os, "ST_NOEXEC"), reason="this system does not tell which folders forbid code")
def test_a_folder_from_which_no_code_can_be_loaded_is_gone_around(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mount(NamedTuple):
        f_flag: int

    monkeypatch.setattr(os, "statvfs", lambda folder: Mount(os.ST_NOEXEC if folder == cache else 0))
    assert answer() == 42 and not libraries_in(cache)
    (elsewhere,) = libraries_in(Path(tempfile.gettempdir()))
    assert elsewhere.parent.name == f"dynattn-{os.geteuid()}"


def test_folders_and_links_of_somebody_else_are_gone_around(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer()
    temporary = Path(tempfile.gettempdir())
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)  # no folder here is that user's
    assert code_cache.code_folder().parent == temporary
    assert code_cache.code_folder().name != f"dynattn-{os.geteuid()}"
    monkeypatch.undo()
    link = temporary / "link"
    link.symlink_to(cache)
    assert not code_cache._is_private(link)


def test_what_was_compiled_serves_without_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer()
    monkeypatch.setattr(native_library, "find_compiler", lambda: None)
    assert answer() == 42
    with pytest.raises(OSError, match="no C compiler"):
        native_library.load_library.__wrapped__(SOURCE, (("ANSWER", 43),))


def test_a_user_without_a_home_has_a_cache_among_the_temporary_files(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a number without a name
    assert answer() == 42
    (library,) = libraries_in(Path(tempfile.gettempdir()))
    assert library.parent.name == f"dynattn-{os.geteuid()}"


@pytest.mark.usefixtures("cache")
def test_a_cache_in_the_working_directory_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The XDG specification calls relative paths invalid."""
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert code_cache.code_folder() == tmp_path / ".cache" / "dynattn"
    assert not Path("here").exists()


def test_processes_without_a_cache_share_what_one_compiles(cache: Path) -> None:
    cache.parent.write_text("a file, so that nothing can be kept here")
    assert answer() == 42
    (library,) = libraries_in(Path(tempfile.gettempdir()))
    before = library.stat().st_mtime_ns
    assert answer() == 42
    assert library.stat().st_mtime_ns == before


def test_temporary_folders_end_with_their_process(cache: Path) -> None:
    temporary = Path(tempfile.gettempdir())
    for taken in (cache.parent, temporary / f"dynattn-{os.geteuid()}"):
        taken.write_text("a file, so that nothing can be kept here")
    code = f"""
import os
from dynattn.modeling.ops import code_cache, native_library
library = native_library.load_library({SOURCE!r}, {MACROS!r})
if os.fork() == 0:
    raise SystemExit(0)  # must not remove what the parent still needs
os.wait()
folder = code_cache.code_folder()
print(library.answer(), folder.is_dir(), folder.parent)
"""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == f"42 True {temporary}\n"
    assert [path.name for path in temporary.iterdir()] == [f"dynattn-{os.geteuid()}"]


def compiler(path: Path, *lines: str) -> str:
    """A script that stands in for the C compiler."""
    path.write_text("\n".join(("#!/bin/sh", *lines)))
    path.chmod(0o700)
    return str(path)


def test_a_compiler_may_come_with_arguments(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `ccache gcc`; compiling and linking get them."""
    real = c_compiler.find_compiler() or ()
    stand_in = compiler(tmp_path / "ccache", f'echo "$*" >> "{tmp_path / "calls"}"', 'exec "$@"')
    monkeypatch.setenv("CC", shlex.join((stand_in, *real)))
    assert c_compiler.find_compiler() == (stand_in, *real) and answer() == 42
    assert [call.startswith(shlex.join(real)) for call in (tmp_path / "calls").read_text().splitlines()] == [True] * 2


@pytest.mark.parametrize("named", ["/no/such/gcc -m64", "no-such-compiler", "'gcc"])
def test_a_named_compiler_that_does_not_exist_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.delenv("CC", raising=False)
    other = c_compiler.find_compiler() or ()
    monkeypatch.setenv("CC", named)
    with pytest.warns(UserWarning, match=f"CC=.*{named}.* names no program; {other[0]} is used instead"):
        assert c_compiler.find_compiler() == other


def attend(heads: int, queries: int) -> torch.Tensor:
    """The op in float32, which C code serves where it can."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, n, 8, generator=generator) for n in (queries, 40, 40))
    stage = Composition(key_gate=torch.randn(2, 40, heads, generator=generator))
    output = dcmha_attention(query, key, value, pre=stage, implementation="chunked")
    torch.testing.assert_close(output, dcmha_attention(query, key, value, pre=stage, implementation="eager"))
    return output


@pytest.mark.parametrize("queries", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_source_that_fails_after_others_leaves_other_ways(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queries: int
) -> None:
    lines = (
        'case "$*" in *-DHEADS=6*) echo "no such luck" >&2; exit 3;; esac',
        f'exec {shlex.join(c_compiler.find_compiler() or ())} "$@"',
    )
    monkeypatch.setenv("CC", shlex.quote(compiler(tmp_path / "cc", *lines)))
    attend(4, queries)
    with pytest.warns(UserWarning, match="several times slower than it could be: .* code 3: no such luck") as caught:
        for heads in (6, 6, 3, 4):
            attend(heads, queries)
    assert len(caught) == 1


def test_a_compiler_that_is_older_than_a_flag_does_without_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library, "newer_flags", lambda: ("-mnewer",))
    lines = (
        f'echo "$*" >> "{tmp_path / "calls"}"',
        'case "$*" in *-mnewer*) echo "what is -mnewer?" >&2; exit 1;; esac',
        f'exec {shlex.join(c_compiler.find_compiler() or ())} "$@"',
    )
    monkeypatch.setenv("CC", shlex.quote(compiler(tmp_path / "cc", *lines)))
    assert answer() == answer() == 42
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ["-mnewer" in call for call in calls] == [True, False, False, True]  # compiled and linked once


@pytest.mark.parametrize("queries", [1, 5])
def test_a_compiler_that_hangs_is_stopped_with_its_processes(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queries: int
) -> None:
    monkeypatch.setattr(c_compiler, "COMPILER_SECONDS", 0.3)
    hanging = compiler(tmp_path / "cc", f'sleep 1234 & echo $! > "{tmp_path / "child"}"', "wait")
    monkeypatch.setenv("CC", shlex.quote(hanging))
    with pytest.warns(UserWarning, match="cc has not ended after 0.3 seconds") as caught:
        attend(4, queries)
        attend(6, queries)
    assert len(caught) == 1 and not libraries_in(cache)
    child, end = int((tmp_path / "child").read_text()), time.monotonic() + 10
    while is_running(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(child)


def is_running(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    "line", ["exit 0", 'for last; do :; done; echo broken > "$last"', 'printf "\\377\\376" >&2; exit 1']
)
def test_whatever_a_compiler_does_there_is_an_answer(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setenv("CC", shlex.quote(compiler(tmp_path / "cc", line)))
    monkeypatch.chdir(tmp_path)  # the last argument of a link is `-lm`
    with pytest.warns(UserWarning, match="several times slower"):
        attend(4, 5)
    assert not list(cache.iterdir())


def test_a_library_without_its_functions_is_not_used(cache: Path) -> None:
    with pytest.warns(UserWarning, match="missing"):
        assert native_library.load_or_warn(SOURCE, MACROS, dict.fromkeys(("answer", "missing"), ((), None))) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_library.load_or_warn(SOURCE, MACROS, {"answer": ((), None)}) is None
