"""Runs `transformers serve` with this package's models: an HTTP server of chat completions, with streaming.

Run: `dynattn serve CHECKPOINT --continuous-batching --port 8000`

The options are those of `transformers serve`, which `transformers serve --help` lists. With `--continuous-batching`
requests are computed together, without it one after the other.
"""

from collections.abc import Sequence
from importlib.util import find_spec

from ..common.errors import UserError
from ..common.option_values import with_home

# Packages that Transformers' server needs, and that this package does not.
PACKAGES = ("fastapi", "uvicorn", "openai")


def main(argv: Sequence[str]) -> int:
    """Serves until it is interrupted.

    Raises:
        UserError: packages of the server are missing, or this version of Transformers is not supported.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: dynattn serve CHECKPOINT [options]\n\n{__doc__}")
        return 0 if argv else 2
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(f"the server needs {', '.join(missing)}; pip install 'dynattn[serving]'")
    from .server import run

    return run([with_home(word) for word in argv])
