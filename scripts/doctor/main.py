"""Shows what is installed, which attention implementation is the default here, what is missing, and how to get it.

Run: `dynattn doctor`

The exit status is 1 if something that every user needs is missing or too old.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.arguments import parse_arguments


@dataclass
class DoctorArguments:
    """`dynattn doctor` has no options."""


def main(argv: Sequence[str]) -> int:
    """Prints one line for each finding and returns 1 if one of them keeps the package from working."""
    parse_arguments(DoctorArguments, argv, prog="dynattn doctor", description=__doc__)
    # These import torch, which help and a mistyped option need not wait for.
    from .findings import examine

    findings = examine()
    print("\n".join(map(str, findings)))
    return int(any(finding.state == "fails" for finding in findings))
