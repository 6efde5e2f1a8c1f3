"""Damaged and malicious checkpoint folders: a conversion or publication refuses them in one line or does all of it."""

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from ..commands import as_options, checkpoints, expect_one_line, run_command, snapshot
from ..harness import Case, FindingError, Kind, expect

SOURCES = {
    "official-dcformer": ("convert", "official"),
    "official-rcmha": ("convert", "rcmha"),
    "llama": ("convert", "llama"),
    "neox": ("convert", "pythia"),
    "dcformer": ("publish",),
}
VALUES: tuple[Any, ...] = (
    0,
    -1,
    1,
    3,
    10**9,
    10**30,
    1.5,
    None,
    True,
    "",
    "x",
    [],
    {},
    [[]],
    "../../outside",
    float("nan"),
)


def generate(random: Random) -> Case:
    source = random.choice(sorted(SOURCES))
    damage = random.choice(sorted(DAMAGES))
    destination = random.choice(
        ("out",) * 6 + ("a\u0000b", "x" * 300, "", ".", "../source", "source/inside", "link/out")
    )
    return {"class": damage, "source": source, "destination": destination, "seed": random.randrange(2**31)}


def check(case: Case) -> None:
    with tempfile.TemporaryDirectory(prefix="dynattn-fuzz-") as name:
        place = Path(name)
        (place / "outside").write_text("a secret")
        work, source = place / "work", Path(shutil.copytree(checkpoints() / case["source"], place / "work" / "source"))
        (work / "link").symlink_to("nowhere")
        DAMAGES[case["class"]](source, Random(case["seed"]), place)
        before = snapshot(place)
        job = SOURCES[case["source"]]
        named = ("checkpoint", "output") if job == ("publish",) else ("source", "destination")
        folders = dict(zip(named, (str(source), case["destination"]), strict=True))
        argv = [*job, *as_options(folders), "--no_verify"]
        label = f"{' '.join(job)}, {case['class']}"
        try:
            ended = run_command(argv, KIND.seconds - 5, lambda: os.chdir(work))
            expect_one_line(ended)
        except TimeoutError:
            raise FindingError(f"{label}: hangs") from None
        except EOFError:
            raise FindingError(f"{label}: the process is gone") from None
        except FindingError as error:
            raise FindingError(f"{label}: {error}") from error
        compare(case, before, snapshot(place), ended.status, label)


def compare(
    case: Case, before: dict[str, bytes | None], after: dict[str, bytes | None], status: int, label: str
) -> None:
    """Nothing outside the destination is touched, nothing from outside is copied, nothing is half written."""
    expect("EXECUTED" not in after, f"{label}: code of the file was run")
    changed = [path for path, content in before.items() if path not in after or after[path] != content]
    expect(not changed, f"{label}: touches what it was given | {changed}")
    new = sorted(after.keys() - before.keys())
    if status:
        expect(not new, f"{label}: leaves something after a refusal | {new} destination {case['destination']!r}")
        return
    secrets = [path for path in new if after[path] == b"a secret"]
    expect(not secrets, f"{label}: copies a file from outside of the folder | {secrets}")
    hidden = [path for path in new if ".partial" in path or ".replaced" in path]
    expect(not hidden, f"{label}: leaves its scratch folder | {hidden}")


def a_file(folder: Path, random: Random) -> Path:
    return random.choice(sorted(path for path in folder.iterdir() if path.is_file()))


def truncate(folder: Path, random: Random, place: Path) -> None:
    file = a_file(folder, random)
    os.truncate(file, random.randrange(file.stat().st_size))


def flip(folder: Path, random: Random, place: Path) -> None:
    file = a_file(folder, random)
    content = bytearray(file.read_bytes())
    for _ in range(random.choice((1, 3, 30))):
        content[random.randrange(min(len(content), random.choice((64, 4096, len(content)))))] ^= 1 << random.randrange(
            8
        )
    file.write_bytes(content)


def remove(folder: Path, random: Random, place: Path) -> None:
    a_file(folder, random).unlink()


def replace_by_link(folder: Path, random: Random, place: Path) -> None:
    file = a_file(folder, random)
    file.unlink()
    file.symlink_to(place / "outside")


def add_links(folder: Path, random: Random, place: Path) -> None:
    """Links under names that are copied along, to a file that is not of the checkpoint."""
    for name in ("LICENSE", "NOTICE", "tokenizer.json", "vocab.txt", "chat_template.jinja", "README.md"):
        if not (folder / name).exists() and random.random() < 0.5:
            (folder / name).symlink_to(place / "outside")


def replace_by_folder(folder: Path, random: Random, place: Path) -> None:
    file = a_file(folder, random)
    file.unlink()
    file.mkdir()


def replace_by_pipe(folder: Path, random: Random, place: Path) -> None:
    file = a_file(folder, random)
    file.unlink()
    os.mkfifo(file)


def make_unreadable(folder: Path, random: Random, place: Path) -> None:
    a_file(folder, random).write_bytes(b"\xff\xfe\x00\xd8")


class Runs:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def pickled(folder: Path, random: Random, place: Path) -> None:
    (folder / "model.safetensors").unlink()
    name = random.choice(("pytorch_model.bin", "model.pt", "consolidated.pth"))
    (folder / name).write_bytes(pickle.dumps({"a": Runs(place / "EXECUTED")}))


def nested(folder: Path, random: Random, place: Path) -> None:
    depth = random.choice((900, 10_000, 200_000))
    name = random.choice(
        ("config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json")
    )
    (folder / name).write_text(
        "[" * depth + "]" * depth if random.random() < 0.5 else '{"a":' * depth + "1" + "}" * depth
    )


def edit_config(folder: Path, random: Random, place: Path) -> None:
    """Absurd sizes and types in one or two entries."""
    config = json.loads((folder / "config.json").read_text())
    for _ in range(random.choice((1, 1, 2))):
        config[random.choice(sorted(config))] = random.choice(VALUES)
    (folder / "config.json").write_text(json.dumps(config))


def bad_index(folder: Path, random: Random, place: Path) -> None:
    """An index whose shards lie elsewhere, or are no names."""
    names = ("../outside", str(place / "outside"), "", "model.safetensors\u0000", 3, None, ["a"], "x" * 400)
    index = {"metadata": {}, "weight_map": {"a": random.choice(names), "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if random.random() < 0.7:
        (folder / "model.safetensors").unlink()


def bad_header(folder: Path, random: Random, place: Path) -> None:
    """A safetensors header of absurd length, offsets or shapes."""
    entry = {
        "dtype": "F32",
        "shape": [random.choice((2**60, -1, 0, 1))],
        "data_offsets": [0, random.choice((4, 2**60, -4))],
    }
    header = json.dumps({"a": entry}).encode()
    length = random.choice((len(header), 2**63, 0, len(header) + 5))
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header + bytes(4))


def nothing(folder: Path, random: Random, place: Path) -> None:
    """A sound source: the destination is what is hostile."""


DAMAGES: dict[str, Callable[[Path, Random, Path], None]] = {
    damage.__name__.replace("_", " "): damage
    for damage in (
        truncate,
        flip,
        remove,
        replace_by_link,
        add_links,
        replace_by_folder,
        replace_by_pipe,
        make_unreadable,
        pickled,
        nested,
        edit_config,
        bad_index,
        bad_header,
        nothing,
    )
}
KIND = Kind("files", generate, check, checkpoints, fast=12, seconds=60, batch=30)
