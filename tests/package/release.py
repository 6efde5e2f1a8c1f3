"""What a release must do in an empty environment: the wheel installs, the command and the README's Python run.

    python tests/package/release.py README.md

Run by `make release-check` with the Python of that environment, in a folder that is no checkout.
"""

import re
import subprocess
import sys
from pathlib import Path

QUICKSTART_MODEL = "runs/quickstart/dcformer/model"
STEPS = ("--max_steps", "2", "--warmup_steps", "1", "--attn_implementation", "chunked")


def python_of(readme: Path) -> str:
    """The blocks of Python in a page, one after the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL))


def main(readme: Path) -> None:
    """Trains for two steps instead of a quickstart, then runs the Python of the README on the result."""
    import dynattn

    assert Path(dynattn.__file__).is_relative_to(sys.prefix), f"{dynattn.__file__} is not the installed package"
    command = [sys.executable, "-m", "dynattn"]
    subprocess.run([*command, "doctor"], check=True)
    subprocess.run([*command, "pretrain", "tiny.yaml", "--output", "run", *STEPS, "--overwrite"], check=True)
    lines = python_of(readme)
    assert QUICKSTART_MODEL in lines
    exec(compile(lines.replace(QUICKSTART_MODEL, "run/model"), str(readme), "exec"), {})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
