"""Tensor parallelism of composed heads: each process has some groups of heads, and generates the factors of these."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    TensorParallelLayer,
    replace_layer_number_by_wildcard,
)

from ...configuration.tensor_parallel_plans import HEAD_GROUPS, HEAD_NORM, WHOLE_HEADS

# The weights of a `DynamicComposition`, each with the dimension along which its groups of heads lie.
GROUP_DIMENSIONS = {"hidden_weight": 1, "factor_weight": 0, "gate_weight": 1, "static_weight": 1}
# Transformers' style of the norms of queries and keys.
PLAIN_HEAD_NORM = "replicated_with_grad_allreduce"


class WholeHeadsParallel(TensorParallelLayer):
    """The style of attention modules whose projections are split."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Raises ValueError unless every process gets as many key heads, none of them in part; changes nothing."""
        if (heads := module.config.num_key_value_heads) % mesh.size():
            raise ValueError(
                f"tp_size={mesh.size()} must divide num_key_value_heads ({heads}), because a head is in one process; "
                "use a number of processes that does"
            )
        return module


class CopiedParallel(TensorParallelLayer):
    """A style of modules of which there may be copies: PEFT trains one of each that `modules_to_save` names.

    A copy of a module with a style of Transformers still computes with the weights of the module it was made of.
    """

    def install_forward(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """As in Transformers, with a method in place of its function, because copies bind methods to themselves."""
        forward = module.forward.__func__

        def split_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.transform_inputs_pre_forward(module, args, kwargs, mesh)
            with self.context_around_forward(module, mesh):
                output = forward(module, *args, **kwargs)
            return self.transform_output_post_forward(module, output, mesh)

        module.forward = MethodType(split_forward, module)
        return module


class HeadGroupsParallel(CopiedParallel):
    """The style of generators in the plans of Transformers' tensor parallelism.

    Heads mix only inside their group, so a process that has the queries, keys and values of whole groups composes them
    as one with all heads does. Its generator has the weights of these groups alone.
    """

    def validate_param(self, module: Any, param: str, mesh: DeviceMesh, parameter_name: str | None = None) -> None:
        """Raises ValueError unless every process gets as many groups."""
        if module.groups % mesh.size():
            raise ValueError(
                f"tp_size={mesh.size()} must divide compose_groups ({module.groups}), because heads of a group are "
                "mixed in one process; use a number of processes that does"
            )

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Makes a weight one of which this process has its own groups; they are loaded later."""
        from torch.distributed.tensor import Shard, distribute_tensor  # here, as not all builds of PyTorch have it

        weight = module._parameters[param]
        if weight is not None:
            local = distribute_tensor(weight, mesh, [Shard(GROUP_DIMENSIONS[param])], src_data_rank=None)
            module._parameters[param] = nn.Parameter(local, requires_grad=weight.requires_grad)

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """True: `forward` sees the weights of this process's groups as usual tensors."""
        return True

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Lets the gradients of the hidden states `[B, T, E]`, which all processes read, add up over the processes."""
        return (adding_gradients(args[0], mesh), *args[1:]), kwargs


class HeadNormParallel(CopiedParallel):
    """The style of the norm of queries or keys: each process has all of its weight, and normalizes its own heads.

    Transformers' style adds the gradients of all processes up after each backward pass. Where several passes are
    accumulated it adds those of earlier ones up again.
    """

    @contextmanager
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        """The gradients of the weights add up over the processes in each backward pass by itself."""
        own = {name: weight for name, weight in module._parameters.items() if weight is not None}
        parameters: dict[str, Any] = module._parameters
        parameters.update({name: adding_gradients(weight, mesh) for name, weight in own.items()})
        try:
            yield
        finally:
            parameters.update(own)


def adding_gradients(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor that all processes have, and whose gradient is the sum of those that they compute."""
    from torch.distributed.tensor import DTensor, Partial, Replicate  # here, as not all builds of PyTorch have it

    if not torch.is_grad_enabled():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return tensor.to_local(grad_placements=[Partial()])


def plan_composed_attention(plan: dict[str, str], name: str, attention: Any) -> dict[str, str]:
    """The plan of a model for tensor parallelism, changed for an attention module that now composes heads.

    If the plan splits the module's heads, the weights of its generators are split, too, and norms of heads get the
    style of this module. With one group of heads, all of which mix, attention stays whole on every device instead, and
    so does one with key heads that several groups read.

    Args:
        plan: a style for each name of modules and weights, with `*` for numbers of layers.
        name: that of the attention module.
    """
    generators = [part for part in ("composition", "key_composition") if getattr(attention, part, None) is not None]
    prefix = replace_layer_number_by_wildcard(name) + "."
    parts = {prefix + part for part, _ in (*attention.named_modules(), *attention.named_parameters())}
    rules = {rule: style for rule, style in plan.items() if rule in parts}
    if not generators or not {"colwise", "packed_colwise"} & {*rules.values()}:
        return plan
    groups = attention.composition.groups
    if groups > 1 and key_heads_of(attention) % groups == 0:
        norms = dict.fromkeys((rule for rule, style in rules.items() if style == PLAIN_HEAD_NORM), HEAD_NORM)
        return plan | norms | {prefix + generator: HEAD_GROUPS for generator in generators}
    return {rule: style for rule, style in plan.items() if rule not in rules}


def key_heads_of(attention: Any) -> int:
    """The number of key heads of an attention module; without a projection for keys alone, that of query heads."""
    size = getattr(getattr(attention, "k_proj", None), "out_features", None)
    width = getattr(attention, "head_dim", None)
    return int(attention.composition.num_heads) if size is None or width is None else int(size // width)


STYLES: dict[str, Any] = {
    WHOLE_HEADS: WholeHeadsParallel(),
    HEAD_GROUPS: HeadGroupsParallel(),
    HEAD_NORM: HeadNormParallel(),
}
for name, style in STYLES.items():
    ALL_PARALLEL_STYLES.register(name, style)
