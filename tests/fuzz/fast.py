"""Runs the first cases of some kinds: `python -m tests.fuzz.fast KIND...`; exits with 1 if one finds something new.

Cases are forked from a process that has used no threads yet: a fork after OpenMP's threads were used can wait for ever.
"""

import sys
from collections.abc import Sequence

from .harness import Case, Kind, as_line, check_apart
from .kinds.every import KINDS
from .known import KNOWN, Known


def findings(kind: Kind, cases: list[Case], known: Sequence[Known] = ()) -> list[str]:
    """What the product does wrong that is not known, each with the command that repeats it."""
    return [
        f"{outcome.finding}\n    {as_line(kind.name, outcome.case)}"
        for outcome in check_apart(kind, cases)
        if outcome.finding is not None
        and not any(one.explains(kind.name, outcome.case, outcome.finding) for one in known)
    ]


if __name__ == "__main__":
    chosen = [KINDS[name] for name in sys.argv[1:]]
    new = [line for kind in chosen for line in findings(kind, [kind.case(seed) for seed in range(kind.fast)], KNOWN)]
    print("\n".join(new))
    sys.exit(bool(new))
