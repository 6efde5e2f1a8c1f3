"""All kinds of fuzzing by name."""

from . import commands, composed_op, configurations, models, op_refusals, relative_op

KINDS = {kind.name: kind for kind in (composed_op.KIND, relative_op.KIND, op_refusals.KIND, models.KIND, configurations.KIND, commands.KIND)}
