"""What composed heads must know of attention modules that call Transformers' attention interface: their projections,
sizes, dropout, and what they attend to. All of it is read from names and attributes.
"""

import inspect
from typing import Any

from torch import nn

# Names of the submodules that project queries, keys, or both at once, in the models of Transformers.
QUERY_PROJECTIONS = ("q_proj", "query", "q_lin", "q", "linear_q", "to_q", "Wq", "q_attn", "q_a_proj")
KEY_PROJECTIONS = ("k_proj", "key", "k_lin", "k", "linear_k", "to_k", "Wk", "kv_a_proj_with_mqa")
JOINT_PROJECTIONS = ("qkv", "qkv_proj", "query_key_value", "c_attn", "Wqkv")


def calls_interface(attention: nn.Module) -> bool:
    """Whether a module attends by Transformers' attention interface, from projections that are known."""
    attends = _forward_calls_interface(type(attention))
    return attends and hasattr(attention, "config") and None not in projections_of(attention)


def _forward_calls_interface(kind: type[nn.Module]) -> bool:
    """Whether the `forward` of a class calls the interface, itself or by that of the class that it extends.

    Those that get `cu_seqlens` attend to pieces of a row one by one, and are left out.
    """
    forwards = (vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
    for code in (getattr(inspect.unwrap(forward), "__code__", None) for forward in forwards):
        if code is None or "cu_seqlens" in code.co_varnames:
            return False
        if "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            return True
        if not {"super", "forward"} <= {*code.co_names}:
            return False
    return False


def projections_of(attention: nn.Module) -> tuple[Any, Any]:
    """The submodules that project queries and keys, which may be one; None where there is none that is known."""
    return _projection(attention, QUERY_PROJECTIONS), _projection(attention, KEY_PROJECTIONS)


def _projection(attention: nn.Module, names: tuple[str, ...]) -> Any:
    """The first submodule of some names, or of those of joint projections, that is a linear layer of any kind.

    It is asked for in every forward pass, and `getattr` takes longer for a name that a module does not have.
    """
    found = (attention._modules.get(name) for name in (*names, *JOINT_PROJECTIONS))
    return next((one for one in found if one is not None and _input_size(one) is not None), None)


def refuse_foreign_parts(attention: Any) -> None:
    """Raises ValueError for a module with soft caps, which composed heads do not have."""
    if getattr(attention, "attn_logit_softcapping", None) is not None:
        raise ValueError("attention with soft caps cannot have composed heads; leave it out by names=[...]")


def interface_sizes(attention: Any) -> tuple[int, int, int]:
    """Widths of what queries and keys are projected from, and the number of query heads.

    Raises:
        ValueError: no such number is known, as where channels attend to each other (Florence-2).
    """
    query, key = (int(_input_size(projection) or 0) for projection in projections_of(attention))
    for name in ("num_heads", "num_attention_heads", "n_heads"):
        if isinstance(count := getattr(attention, name, None), int):
            return query, key, count
    output = getattr(attention, "o_proj", None)
    if output is not None and hasattr(attention, "head_dim"):
        # Values may be of another width than queries and keys, as in MiMo-V2-Flash.
        return query, key, output.in_features // getattr(attention, "v_head_dim", attention.head_dim)
    if not isinstance(count := getattr(attention.config, "num_attention_heads", None), int):
        kind = type(attention).__name__
        raise ValueError(f"{kind} has no number of heads that is known; leave it out by names=[...]")
    return query, key, count


def _input_size(projection: Any) -> int | None:
    """Width of a linear layer's input, which a `Conv1D` of Transformers calls `nx`; None for other modules."""
    return getattr(projection, "in_features", getattr(projection, "nx", None))


def interface_dropout(attention: Any) -> float:
    """Dropout of probabilities, under one of the names that modules have for it."""
    for name in ("attention_dropout", "dropout", "dropout_prob", "attn_dropout"):
        if (dropout := getattr(attention, name, None)) is not None:
            return float(getattr(dropout, "p", dropout))
    return 0.0


def dropout_error(dropout: float) -> str:
    """What to do about dropout of probabilities."""
    return f"dropout={dropout} drops probabilities, which are never all in memory at once; use dropout=0.0"


def is_cross_attention(name: str, attention: Any) -> bool:
    """Whether a module called `name` attends to another sequence, as far as names and attributes tell."""
    names = f"{name}.{type(attention).__name__}".lower()
    is_named_so = any(part in names for part in ("cross", "encoder_attn", "encdec", "encoder_decoder_attention"))
    return is_named_so or bool(getattr(attention, "is_cross_attention", False))
