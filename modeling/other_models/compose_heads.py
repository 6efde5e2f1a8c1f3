"""Adds composed heads to the attention of other models: of PyTorch, Transformers and timm."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..layers.head_composition import init_composition
from .adapters import ADAPTERS, adapter_of, plan_composition
from .multihead_attention import ComposedMultiheadAttention
from .side_generators import SideGenerators

# Options that would change a module's projections, or with which its composition would not start as the identity.
# Differential attention is never the identity, because it normalizes the outputs of its pairs.
FIXED_OPTIONS = (
    "num_key_value_heads",
    "q_norm",
    "k_norm",
    "compose_init_scale",
    "device",
    "dtype",
    "differential_heads",
    "layer_idx",
)
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def compose_heads_of(model: nn.Module, *, names: Iterable[str] | None = None, **options: Any) -> list[str]:
    """Replaces every `torch.nn.MultiheadAttention` of `model`, in place, by a `ComposedMultiheadAttention`.

    Attention of Transformers gets composed heads, too, if it calls a function of the attention interface, as in most
    of its models; and that of timm's vision transformers. Such a module stays the same object; generators of factors
    are added to it. Its factors are generated from what its queries and keys are projected from, and those of keys are
    kept in the model's cache.

    The composition starts as the identity: outputs do not change. Up factors, gates and static matrices start at zero
    and get gradients from the first step on; down factors do not start at zero, and get gradients as soon as the up
    factors are not zero. Parameters stay the same objects, so that an optimizer or tied weights keep them; device,
    dtype, training mode and `requires_grad` stay too. Add the new parameters to the optimizer. Sub-classes of
    `torch.nn.MultiheadAttention` are left alone. If any module cannot be replaced, none is.

    PyTorch's fused inference path of encoders would ignore the composition, so it is switched off where modules are
    replaced. That path gives zeros at padded positions, where the usual path gives the same values as in training.

    To load a checkpoint of the result, apply this function with the same options to a new model first, or use
    `with_composed_heads`.

    Args:
        names: the modules to replace, by their names in `model.named_modules()`; by default all.
        options: keywords of `ComposedMultiheadAttention`: `compose_*`, or those of `mixer_fields(...)`,
            `cross_attention` (a generator for each side, the default where an attention of Transformers is seen to be
            cross-attention), `implementation`, and `dropout=0.0` to switch off the dropout of probabilities, which
            composed heads cannot have. `compose_init_scale` is always 0, and may be given as that.

    Returns:
        The names of the replaced modules.

    Raises:
        TypeError: an option does not exist.
        ValueError: there is nothing to replace, or a module cannot be replaced.

    ```python
    >>> model = torch.nn.Transformer(512, 8, dropout=0.0)
    >>> names = dynattn.compose_heads_of(model, compose_rank=2)
    >>> new = [p for name in names for p in model.get_submodule(name).composition.parameters()]
    ```
    """
    if options.get("compose_init_scale") == 0:  # as the fields of most mixers have it
        del options["compose_init_scale"]
    chosen = _find_attention(model, names)
    composed: dict[nn.Module, nn.Module] = {}
    changes: dict[nn.Module, Callable[[], None]] = {}
    for name, attention in chosen.items():
        if isinstance(attention, nn.MultiheadAttention):
            composed.setdefault(attention, _composed_from(name, attention, options))
        else:
            changes.setdefault(attention, _plan_from(name, attention, options))
    for name, attention in chosen.items():
        if attention in composed:
            model.set_submodule(name, composed[attention])
    for change in changes.values():
        change()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and set(module.modules()) & set(composed.values()):
            # Otherwise the encoder would pass padded batches to its layers as nested tensors in inference.
            module.use_nested_tensor = False
    return list(chosen)


def _find_attention(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Module]:
    """The modules to replace, by name; a module that the model holds under several names is listed under each.

    Raises:
        ValueError: there are none, the model is itself one, or `names` has others, has none or is no list of strings.
    """
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.MultiheadAttention or adapter_of(module) is not None
    }
    if "" in found:
        raise ValueError(
            f"the model is a {type(model).__name__} itself; give a module that contains it, or make a "
            "ComposedMultiheadAttention instead"
        )
    if not found and (
        composed := [name for name, module in model.named_modules() if isinstance(module, SideGenerators)]
    ):
        raise ValueError(
            f"{type(model).__name__} has composed heads already, in {composed[0]}; make them of a plain model"
        )
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no torch.nn.MultiheadAttention (sub-classes are left alone), no attention "
            "whose `forward` names ALL_ATTENTION_FUNCTIONS of Transformers and whose projections have names of "
            f"Transformers (q_proj and k_proj, query and key, qkv, ...), and none of {', '.join(sorted(ADAPTERS))}"
        )
    wanted = list(found) if names is None else listed_names(names)
    if not wanted:
        raise ValueError(f"names is empty; leave it out for every attention, or choose from {list(found)}")
    if unknown := sorted(set(wanted) - found.keys()):
        raise ValueError(f"names has {unknown}, which are no attention that can be replaced; choose from {list(found)}")
    return {name: found[name] for name in wanted}


def listed_names(names: Any) -> list[str]:
    """The list of some names of modules, which may be readable only once.

    Raises:
        ValueError: it is one string, or has something else than strings.
    """
    if isinstance(names, str):
        raise ValueError(f"names is the string {names!r}; give a list of names, [{names!r}]")
    listed = list(names) if isinstance(names, Iterable) else names
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"names={listed!r} must be a list of strings, such as ['encoder.layers.0.self_attn']")
    return listed


def _plan_from(name: str, attention: nn.Module, options: dict[str, Any]) -> Callable[[], None]:
    """Returns a function that adds composed heads to `attention`, whose class has an adapter."""
    adapter = adapter_of(attention)
    assert adapter is not None
    _check_options(options, ())
    if any("forward" in vars(part) or hasattr(part, "_hf_hook") for part in attention.modules()):
        raise ValueError(
            f"{name} or a part of it has a `forward` of its own, such as Accelerate and tensor parallelism place; "
            "compose heads before that"
        )
    try:
        return plan_composition(adapter, name, attention, options)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_options(options: dict[str, Any], given: Iterable[str]) -> None:
    """Raises ValueError for options that would change the plain attention of a module.

    These are `FIXED_OPTIONS`, and the constructor arguments `given`, which are copied from the module; `dropout` is
    allowed.
    """
    if fixed := sorted(options.keys() & ({*given, *FIXED_OPTIONS} - {"dropout"})):
        raise ValueError(f"options {fixed} would change what the modules compute; leave them out")


def _refuse_hooks(name: str, attention: nn.MultiheadAttention) -> None:
    """Raises ValueError if `attention` has hooks or a `forward` of its own, which the module in its place lacks."""
    hooks = [kind for kind in HOOKS if getattr(attention, kind)]
    if hooks or "forward" in vars(attention):
        what = f"hooks ({', '.join(hooks)})" if hooks else "a `forward` of its own"
        raise ValueError(f"{name} has {what}, which would be lost; remove them first, or leave it out by `names`")


def _composed_from(name: str, attention: nn.MultiheadAttention, options: dict[str, Any]) -> ComposedMultiheadAttention:
    """Returns a new module with the parameters of `attention` and composed heads that start as the identity."""
    _refuse_hooks(name, attention)
    weight = attention.in_proj_weight if attention.in_proj_weight is not None else attention.q_proj_weight
    given = {
        "dropout": attention.dropout,
        "bias": attention.in_proj_bias is not None,
        "add_bias_kv": attention.bias_k is not None,
        "add_zero_attn": attention.add_zero_attn,
        "kdim": None if attention.kdim == attention.embed_dim else attention.kdim,
        "vdim": attention.vdim,
        "batch_first": attention.batch_first,
    }
    _check_options(options, given)
    try:
        composed = ComposedMultiheadAttention(
            attention.embed_dim,
            attention.num_heads,
            **{**given, **options},
            device="meta",
            dtype=weight.dtype,
            compose_init_scale=0.0,
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    for generator in composed.generators():
        generator.to_empty(device=weight.device)
        init_composition(generator, scale=0.0)
    composed.train(attention.training)
    composed.out_proj = attention.out_proj
    for kind, parameter in attention.named_parameters(recurse=False, remove_duplicate=False):
        setattr(composed, kind, parameter)
    return composed
