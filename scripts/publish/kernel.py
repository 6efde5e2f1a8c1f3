"""Writes the attention op as a repository for Hugging Face's `kernels` package; it works without this package.

Run: `dynattn kernel FOLDER`, then `kernels.get_local_kernel(Path("FOLDER"))`, or `LOCAL_KERNELS=NAME/dynattn=FOLDER` in
front of a program that calls `kernels.get_kernel("NAME/dynattn", version=1)`.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..common.arguments import parse_arguments
from ..common.atomic_file import write_json
from ..common.atomic_folder import recover, staged_folder
from ..common.errors import UserError
from ..common.folder_names import resolve_destination

NAME, VERSION = "dynattn", 1
# What the kernel offers: names of `import dynattn`, and builders of compositions. If one of them is removed or changes
# its meaning, `VERSION` must be increased.
OFFERED = ("AttentionMaps", "Composition", "dcmha_attention")
MIXERS = ("differential_heads", "head_convolution", "one_term_of_the_query", "talking_heads")
# The code is the same for all backends, but `kernels` looks for a folder for each.
BACKENDS = ("cpu", "cuda")
# The first version of `kernels` that this layout was loaded with.
KERNELS_MINVER = "0.17.2"


@dataclass
class KernelArguments:
    """Arguments of `dynattn kernel`."""

    output: str = field(metadata={"help": "folder to write, new or empty; may be given without the option's name"})


def main(argv: Sequence[str]) -> int:
    """Writes the repository and prints where it is."""
    arguments = parse_arguments(KernelArguments, argv, words=1, prog="dynattn kernel FOLDER", description=__doc__)
    folder = resolve_destination(arguments.output)
    write_kernel(folder)
    print(f"wrote {folder}: build/{', build/'.join(map(variant, BACKENDS))}")
    return 0


def variant(backend: str) -> str:
    """The name of the folder with the code for `backend`."""
    return f"torch-{backend}"


def write_kernel(folder: Path) -> None:
    """Writes the repository into `folder`.

    Raises:
        UserError: the folder is not empty, or cannot be written.
    """
    recover(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists; give another folder to write, or remove it")
    files = kernel_files()
    with staged_folder(folder) as staging:
        for backend in BACKENDS:
            _write_variant(staging / "build" / variant(backend), files, backend)


def kernel_files() -> dict[str, str]:
    """The text of each file: the modules of the op made flat, and an `__init__.py` with what the kernel offers."""
    # These import torch and Transformers.
    import dynattn
    from dynattn.modeling.ops.dcmha import mixers
    from dynattn.remote_code import flat_code, flat_name

    offered = [*(getattr(dynattn, name) for name in OFFERED), *(getattr(mixers, name) for name in MIXERS)]
    names = sorted((*OFFERED, *MIXERS))
    lines = [f"from .{flat_name(each.__module__)} import {each.__name__}" for each in offered]
    text = ['"""Multi-head attention whose heads are composed (DCMHA, arXiv 2405.08553)."""', "", *lines]
    return {**flat_code(offered), "__init__.py": "\n".join([*text, "", f"__all__ = {names}", ""])}


def _write_variant(folder: Path, files: Mapping[str, str], backend: str) -> None:
    """Writes the code for one backend, and `metadata.json`."""
    content = hashlib.sha256("".join(f"{name}{text}" for name, text in sorted(files.items())).encode())
    identifier = f"_{NAME}_{backend}_{content.hexdigest()[:7]}"
    folder.mkdir(parents=True)
    digests = {}
    for name, text in sorted(files.items()):
        encoded = text.encode()
        (folder / name).write_bytes(encoded)
        digests[name] = base64.b64encode(hashlib.sha256(encoded).digest()).decode()
    metadata = {
        "id": identifier,
        "name": NAME,
        "version": VERSION,
        "license": "MIT",
        "kernels-minver": KERNELS_MINVER,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    write_json(folder / "metadata.json", metadata)
