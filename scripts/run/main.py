"""Runs a command of another package, such as LLaMA-Factory, mergekit or TRL, with this package's models.

Run: `dynattn run llamafactory-cli train sft.yaml`

Such a command never imports dynattn, so it would refuse a DCFormer. Here every Python process of the command imports it
first, and then the modules of `--import`.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..common.commands import imported_modules
from ..common.errors import UserError

STARTUP = Path(__file__).parent / "startup"


def main(argv: Sequence[str]) -> int:
    """Runs the command in place of this process, so that its signals and its exit status are the command's.

    Raises:
        UserError: there is no such command.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: dynattn run COMMAND [words]\n\n{__doc__}")
        return 0 if argv else 2
    own = str(Path(sys.executable).parent)  # which is not on the PATH where no environment is activated
    found = shutil.which(argv[0], path=os.pathsep.join([own, os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise UserError(f"there is no command {argv[0]!r} in {own} or on the PATH; install the package that has it")
    here = [str(Path.cwd())] if imported_modules() else []  # where modules of `--import` may be
    path = os.pathsep.join([str(STARTUP), *here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.execve(found, [found, *argv[1:]], {**os.environ, "PYTHONPATH": path})  # it never returns
