"""Patches for ExecuTorch that composed heads need, beside those that Transformers' exporter has.

They hold while that exporter runs.
"""

from collections.abc import Callable
from typing import Any

from transformers.exporters import exporter_executorch  # noqa: F401 (ours are to come after Transformers' patches)
from transformers.exporters.utils import register_patch

# What XNNPACK computes: products with weights, whose shapes follow from those of their inputs.
DELEGATED = ("linear.default", "addmm.default", "mm.default")


@register_patch(
    "executorch", "executorch.exir.passes.prune_empty_tensors_pass.PruneEmptyTensorsPass.remove_empty_tensors_from_cat"
)
def keep_joined_empty_tensors(original: Callable[..., None]) -> Callable[..., None]:
    """Leaves a join of tensors without channels, as are the values beside cached factors, as it is.

    ExecuTorch would make a tensor of a constant shape in its place, which fails if the number of tokens varies.
    """

    def prune(self: Any, graph_module: Any, node: Any) -> None:
        if node.meta["val"].shape[-1] != 0:
            original(self, graph_module, node)

    return prune


@register_patch(
    "executorch.xnnpack",
    "executorch.backends.xnnpack.partition.config.xnnpack_config.XNNPartitionerConfig.check_common_constraints",
)
def delegate_products_with_weights(original: Callable[..., bool]) -> Callable[..., bool]:
    """Leaves all else to ExecuTorch's own operators: in XNNPACK composition has too many dimensions that vary."""

    def check(self: Any, node: Any, program: Any) -> bool:
        return self.target_name in DELEGATED and original(self, node, program)

    return check
