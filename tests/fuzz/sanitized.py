"""Runs cases of the composed op that C code serves; `test_fuzz.py` calls it under sanitizers, which report by dying."""

import sys

from .. import conftest  # noqa: F401  (one thread, poisoned memory)
from .harness import check_apart
from .kinds.composed_op import KIND


def main(count: int) -> int:
    """Checks that many cases; memory between guard pages is left out, which a sanitizer's own memory replaces."""
    cases = []
    for seed in range(100 * count):
        case = KIND.case(seed)
        if case["class"] == "C code" and case["dtype"] in ("float32", "bfloat16") and len(cases) < count:
            guards = {"before-guard": "plain", "after-guard": "plain"}
            cases.append({**case, "layouts": {name: guards.get(kind, kind) for name, kind in case["layouts"].items()}})
    deaths = [outcome for outcome in check_apart(KIND, cases) if "process ends" in (outcome.finding or "")]
    for outcome in deaths:
        print(outcome.finding, outcome.case)
    print(f"{count} cases, {len(deaths)} deaths")
    return 1 if deaths else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
