"""Patches for ExecuTorch that composed heads need, beside those of Transformers' exporter.

Transformers applies registered patches while its exporter runs, and removes them afterwards.
"""

from collections.abc import Callable
from typing import Any

from transformers.exporters import exporter_executorch  # noqa: F401 (registers Transformers' patches before these)
from transformers.exporters.utils import register_patch

# The operators that XNNPACK computes: products with weights.
DELEGATED = ("linear.default", "addmm.default", "mm.default")


@register_patch(
    "executorch", "executorch.exir.passes.prune_empty_tensors_pass.PruneEmptyTensorsPass.remove_empty_tensors_from_cat"
)
def keep_joined_empty_tensors(original: Callable[..., None]) -> Callable[..., None]:
    """Keeps concatenations of tensors whose last dimension is 0, such as the empty values beside cached factors.

    ExecuTorch would replace them by a tensor of constant shape, which fails if the number of tokens varies.
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
    """Lets XNNPACK compute only products with weights, and ExecuTorch's own operators everything else.

    The tensors of composition have more varying dimensions than XNNPACK can handle.
    """

    def check(self: Any, node: Any, program: Any) -> bool:
        return self.target_name in DELEGATED and original(self, node, program)

    return check
