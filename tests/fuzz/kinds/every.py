"""All kinds of fuzzing by name."""

from . import (
    bidirectional,
    commands,
    composed_in_place,
    composed_op,
    configurations,
    faults,
    files,
    models,
    op_refusals,
    processes,
    relative_op,
)

MODULES = (
    composed_op,
    relative_op,
    op_refusals,
    models,
    composed_in_place,
    bidirectional,
    configurations,
    commands,
    files,
    faults,
    processes,
)
KINDS = {module.KIND.name: module.KIND for module in MODULES}
