"""Links the ops to Transformers: attention functions, the choice between them, and new ones of users."""

from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ..ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS, IMPLEMENTATIONS, Attention, resolve_implementation
from ..ops.dcmha.composition import Composition
from ..ops.dcmha.key_source import KeySource
from ..ops.dcmha.validation import check_composed_call
from ..ops.distance_tables import NO_TABLES, DistanceTables, refusing_tables, takes_tables
from .attention_masks import compact_mask, mask_arguments

logger = logging.get_logger(__name__)

# What some models of Transformers (Gemma 2, GPT-OSS, T5, DeepSeek-V3.2, MiniMax-M3) pass to attention functions, and
# the ops do not have. Indices name the few keys that a query sees; the mask hides the others only where Transformers'
# own `eager` or `sdpa` attends.
FOREIGN_TERMS = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
# The implementations of this package. Of these only `eager` makes attention maps; those that users register may, too.
BUILT_IN = tuple(COMPOSING_IMPLEMENTATIONS)


def attention_function(attend: Attention) -> Attention:
    """Returns the op `attend` as a function of Transformers' attention interface.

    The function takes `query` `[B, H, T, D]`, `key` and `value` `[B, H_kv, S, D]`, and a mask from `compact_mask`. It
    returns the output `[B, T, H, D]` and the attention maps `[B, H, T, S]`, or None if `attend` returns none.
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        sliding_window: int | None = None,
        pre: Composition | None = None,
        post: Composition | None = None,
        first_keys: Tensor | None = None,
        key_source: KeySource | None = None,
        dropout: float = 0.0,
        tables: DistanceTables = NO_TABLES,
        is_causal: bool | None = None,
        **unread: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Shapes as in `attention_function`: output `[B, T, H, D]`, attention maps `[B, H, T, S]`.

        A `key_source` attends instead, and calls `attend` with keys that are not in the call. Models of Transformers
        may pass `is_causal`, which comes before the attribute of the module.

        Raises:
            ValueError: the arguments do not fit each other, `dropout` is not 0, there are `FOREIGN_TERMS`, or without a
                mask nothing says whether the module is causal.
        """
        _refuse_dropout(dropout)
        _refuse_foreign_terms(unread)
        if key_source is not None:
            layer: Any = module.layer_idx
            given = (query, key, value, pre, post, scaling, sliding_window, attend, tables)
            return key_source.attend(layer, *given), None
        masking = mask_arguments(attention_mask, sliding_window, _is_causal(module, is_causal, query, attention_mask))
        mask = masking["attention_mask"]
        others: Any = {"pre": pre, "post": post, "scaling": scaling, "first_keys": first_keys, "tables": tables}
        # `masking` has no window where the mask includes it, so the caller's window is checked here.
        check_composed_call(query, key, value, **others, attention_mask=mask, sliding_window=sliding_window)
        output, maps = attend(query, key, value, **others, **masking)
        return output.contiguous(), maps  # as those of Transformers: some models, such as AFMoE, take a view of it

    return forward


def _is_causal(module: nn.Module, given: bool | None, query: Tensor, attention_mask: Tensor | None) -> bool:
    """Whether queries `[B, H, T, D]` see no later keys, from the call or else the module's attribute.

    Modules that lack the attribute are of models that know only `eager`, and leave out masks that hide nothing.
    """
    causal = getattr(module, "is_causal", None) if given is None else given
    if causal is None and attention_mask is None and query.shape[2] > 1:
        raise ValueError(
            f"{type(module).__name__} does not say whether it is causal, and there is no mask; use "
            "attn_implementation='eager'"
        )
    return bool(causal)


def _refuse_dropout(dropout: float) -> None:
    """Raises ValueError unless `dropout`, the share of probabilities to drop, is 0."""
    if dropout:
        raise ValueError(
            f"attention_dropout ({dropout}) is not supported by this implementation of attention; use "
            "attn_implementation='sdpa', or attention_dropout=0"
        )


def _refuse_foreign_terms(options: dict[str, Any]) -> None:
    """Raises ValueError if any of `FOREIGN_TERMS` is among the keywords of an attention function."""
    given = [name for name in FOREIGN_TERMS if options.get(name) is not None]
    if given:
        raise ValueError(
            f"this implementation of attention would ignore {given} of the model; use attn_implementation='eager'"
        )


def check_implementation(config: Any, name: str) -> None:
    """Raises ValueError if an implementation would ignore the composition, or the tables by distance, of a model."""
    if getattr(config, "has_distance_tables", False):
        usable = sorted(own for own, attend in COMPOSING_IMPLEMENTATIONS.items() if takes_tables(attend))
        if name not in usable:
            raise ValueError(
                f"attn_implementation={name!r} would ignore the tables of position_scheme={config.position_scheme!r} "
                f"and position_gain={config.position_gain!r}; use one of {usable}"
            )
    if getattr(config, "composes", False):
        resolve_implementation(name, composed=True)


def check_composing(name: str) -> None:
    """Raises ValueError if an implementation would ignore the composition of a layer.

    A layer asks for itself, because its weights compose whatever has become of the configuration since it was made.
    """
    if not _may_compose(name):
        resolve_implementation(name, composed=True)


def _may_compose(name: str) -> bool:
    """Whether an implementation composes heads, or is a function that others registered, which may."""
    if name in COMPOSING_IMPLEMENTATIONS:
        return True
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return function is not None and not function.__module__.startswith("transformers.")


def implementation_for(config: Any, options: dict[str, Any]) -> str:
    """The attention implementation of a call: the configuration's, or `eager` if that one cannot return attention maps.

    Args:
        options: the keywords of the call, of which `output_attentions` asks for maps; the configuration may ask, too.

    Raises:
        ValueError: as `check_implementation`, for one of Transformers or an unknown one that was set in the
            configuration of a finished model.
    """
    name = config._attn_implementation
    if not _may_compose(name):
        check_implementation(config, name)
    may_make_maps = name == "eager" or (name in COMPOSING_IMPLEMENTATIONS and name not in BUILT_IN)
    if may_make_maps or not options.get("output_attentions", config.output_attentions):
        return name
    logger.warning_once(f"attn_implementation={name!r} has no attention maps; 'eager' makes them")
    return "eager"


# Not registered: models of Transformers, each of which has an `eager` of its own, would then run this one instead.
eager_attention_forward = attention_function(COMPOSING_IMPLEMENTATIONS["eager"])


def registered_implementations() -> tuple[str, ...]:
    """The implementations that Transformers' attention interface knows by name: all but `eager`."""
    return tuple(name for name in COMPOSING_IMPLEMENTATIONS if name != "eager")


def register_implementation(name: str, attend: Attention) -> None:
    """Makes `attend` an implementation of `dcmha_attention`, and `attn_implementation=name` of every composed model.

    Args:
        name: a new name, or one that this function registered before, whose implementation is then replaced.
        attend: takes the arguments of `dcmha_eager` except `hook`. Returns the output `[B, T, H, D]` and the composed
            probabilities `[B, H, T, S]`, or None instead of these.

    Raises:
        ValueError: the name is that of an implementation of this package or of Transformers, or one that Transformers
            would read as more than a name.
        TypeError: `attend` cannot be called.
    """
    if not callable(attend):
        raise TypeError(f"the implementation {name!r} is a {type(attend).__name__}; give a function")
    if name in (*BUILT_IN, "sdpa"):
        raise ValueError(f"{name!r} is an implementation of dynattn; register yours under another name")
    if not isinstance(name, str) or not name or set(name) & set("|/:"):
        raise ValueError(f"{name!r} is no name of an implementation; give one without '|', '/' and ':'")
    if name in ALL_ATTENTION_FUNCTIONS and name not in _OWN_FUNCTIONS:  # those registered here are in both
        raise ValueError(f"{name!r} is an implementation of Transformers; register yours under another name")
    COMPOSING_IMPLEMENTATIONS[name] = IMPLEMENTATIONS[name] = checking_results(name, refusing_tables(name, attend))
    _register_with_transformers(name)


def checking_results(name: str, attend: Attention) -> Attention:
    """The implementation `attend`, called `name`, with a ValueError if it returns no output `[B, T, H, D]` and maps."""

    @wraps(attend)
    def checking(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        results = attend(query, key, value, *args, **kwargs)
        if not isinstance(results, tuple) or len(results) != 2:
            raise ValueError(f"implementation={name!r} must return a pair, of the output and of maps or None")
        batch, heads, queries, _ = query.shape
        expected, found = (batch, queries, heads, value.shape[3]), tuple(results[0].shape)
        if found != expected:
            raise ValueError(f"implementation={name!r} must return an output [B, T, H, D] of {expected}, not {found}")
        return results

    return checking


def _register_with_transformers(name: str) -> None:
    _OWN_FUNCTIONS[name] = attention_function(COMPOSING_IMPLEMENTATIONS[name])
    AttentionInterface.register(name, _OWN_FUNCTIONS[name])
    AttentionMaskInterface.register(name, compact_mask)


# Another copy of this code, which came with a model, may have registered functions under the same names.
_OWN_FUNCTIONS: dict[str, Attention] = {}


def attention_function_of(name: str) -> Attention:
    """The attention function of an implementation: ours, one that others registered, or that of `eager`."""
    return _OWN_FUNCTIONS.get(name) or ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)


def own_attention_function(name: str) -> Attention:
    """The attention function of one of `IMPLEMENTATIONS`, all of which put the last query at the last key.

    Raises:
        ValueError: `name` is none of them. SDPA, as Transformers calls it, puts the first query at the first key.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation={name!r} cannot attend to keys that are not in the call; use one of "
            f"{sorted(IMPLEMENTATIONS)}"
        )
    return attention_function(IMPLEMENTATIONS[name])


# RCMHA has attention of its own, and Transformers looks up only its masks by these names.
for _name in registered_implementations():
    _register_with_transformers(_name)
