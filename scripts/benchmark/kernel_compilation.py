"""Compiles the Triton kernels for a GPU that need not be there.

Arguments are described by kinds: the type of a tensor's elements or of a number as Triton writes it (`"*bf16"`,
`"i32"`), or a key of `CONSTANTS` for an argument that Triton compiles in. Tuples of kinds describe the named tuples of
`dynattn.modeling.ops.dcmha.triton.arguments`.
"""

from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from dynattn.modeling.ops.dcmha.triton.arguments import (
    ColumnTables,
    Factors,
    Mixing,
    Sizes,
    Statics,
    TermGradients,
    Visibility,
)
from dynattn.modeling.ops.dcmha.triton.decode import (
    CacheSizes,
    DecodeMask,
    DecodePages,
    DecodeSide,
    DecodeStage,
    DecodeTables,
    tile_sides,
)
from dynattn.modeling.ops.dcmha.triton.kernels.registry import load_kernels
from dynattn.modeling.ops.dcmha.triton.tuning import (
    block_of,
    blocks_of_decoding,
    loading_of_decoding,
    matrix_tiles_for,
    tile_of_distance_sums,
    tile_of_matrices,
    tile_of_merge,
    tile_of_window,
    tiles_for,
    turns_of_rows,
)

from .kernel_configurations import (
    Configuration,
    DecodeConfiguration,
    HeadByHeadConfiguration,
    TensorCoreConfiguration,
    WindowConfiguration,
)
from .kernel_traffic import TERMS, Traffic, tensor_core_traffic

# Bytes of shared memory that a program may have, by compute capability.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
# Arguments that Triton treats as constants of a kernel: absent ones, and integers that are one.
CONSTANTS = {"none": None, "one": 1}
SIZES = Sizes._make(("i32",) * 4)
STRIDES = ("i32", "i32", "i32")
# Strides of a mask whose keys are contiguous.
MASK_STRIDES = ("i32", "i32", "one")
# Kinds of the arguments before those that all kernels of a family take: scores, other maps, float32.
HEAD_BY_HEAD = {
    "dcmha_statistics": ("scores", "fp32"),
    "dcmha_probs": ("scores", "map", "fp32"),
    "dcmha_backward_post": ("scores", "map", "scores", "map", "map", *("fp32",) * 5),
    "dcmha_backward_pre": ("scores", "map", "map", "fp32", "fp32", "fp32", "fp32"),
}
TENSOR_CORES = {
    "dcmha_matrix_statistics": ("fp16", "fp32"),
    "dcmha_matrix_probs": ("fp16", "map", "fp32"),
    "dcmha_matrix_backward_post": ("fp16", "map", "map", "fp32", "partial", "terms", "fp32"),
    "dcmha_matrix_backward_pre": ("fp16", "map", "map", "fp32", "partial", "terms", "fp32"),
}


class Compiled(NamedTuple):
    """A compiled kernel and, if it loops over heads or turns, what one of its programs works on."""

    kernel: Any
    entries: float = 0  # of a thread in each turn of the loop
    turns: int = 1
    traffic: Traffic | None = None


@triton.jit
def axpy(x, y, factor, stride, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """`y += factor * x` for `rows` rows of `block` elements: a loop whose instructions are known."""
    for row in range(rows):
        places = row * stride + tl.arange(0, block)
        tl.store(y + places, tl.load(x + places) * factor + tl.load(y + places))


def compile_axpy(capability: int) -> dict[str, Compiled]:
    """Compiles `axpy`, which tests the counting of instructions."""
    source = triton.compiler.ASTSource(
        axpy,
        {"x": "*fp32", "y": "*fp32", "factor": "fp32", "stride": "i32", "rows": "constexpr", "block": "constexpr"},
        {(4,): 1024, (5,): 512},
        {(index,): [["tt.divisibility", 16]] for index in (0, 1, 3)},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    return {"axpy": Compiled(kernel, entries=4, turns=1024)}


def compile_configuration(configuration: Configuration, capability: int) -> dict[str, Compiled]:
    """Compiles a configuration's kernels with the specializations that Triton would choose for aligned tensors."""
    match configuration:
        case HeadByHeadConfiguration():
            return _compile_head_by_head(configuration, capability)
        case TensorCoreConfiguration():
            return _compile_tensor_cores(configuration, capability)
        case WindowConfiguration():
            return _compile_window(configuration, capability)
        case DecodeConfiguration():
            return _compile_decode(configuration, capability)


def _compile_head_by_head(configuration: HeadByHeadConfiguration, capability: int) -> dict[str, Compiled]:
    heads, dtype, term_counts, has_static, *_ = configuration
    common, element = _head_by_head_arguments(configuration), {"scores": _dtype_of_scores(dtype), "map": dtype}
    compiled = {}
    for name, own in HEAD_BY_HEAD.items():
        wide_static = has_static and (dtype == "fp32" or configuration.composes_bias)
        tiles = tiles_for(term_counts, wide_static=wide_static, has_gain=configuration.has_gain)
        block_t, block_s, warps = tiles[name]
        kinds = (*(f"*{element.get(kind, kind)}" for kind in own), *common)
        constants = {"heads": heads, "term_counts": term_counts, "block_t": block_t, "block_s": block_s}
        # Lengths of maps are multiples of 16; what is visible starts and ends anywhere, as the columns of tables do.
        unaligned = {(len(own) + 2,), *_parts(len(own) + 4, ColumnTables, "columns", "first")}
        kernel = compile_kernel(name, kinds, constants, capability, unaligned, num_warps=warps)
        compiled[name] = Compiled(kernel, block_t * block_s / (32 * warps), heads)
    block_t, warps = tile_of_merge()
    kinds = ("*fp32", "*fp32", "i32", "i32", "i32")
    merge = compile_kernel("dcmha_merge", kinds, {"block_t": block_t}, capability, {(2,)}, num_warps=warps)
    compiled["dcmha_merge"] = Compiled(merge)
    sums = configuration.has_bias or configuration.has_gain
    return compiled | (_compile_sums(configuration, capability) if sums else {})


def _compile_sums(configuration: HeadByHeadConfiguration, capability: int) -> dict[str, Compiled]:
    """Compiles what sums the maps of a head for the gradients of tables."""
    name, (block_t, block_x, _, warps) = "dcmha_distance_sums", tile_of_distance_sums()
    kinds = f"*{configuration.dtype}", "*fp32", SIZES, _visibility(is_window=configuration.is_window), "i32"
    tile = {"block_t": block_t, "block_x": block_x}
    return {name: Compiled(compile_kernel(name, kinds, tile, capability, {(3,)}, num_warps=warps))}


def _head_by_head_arguments(configuration: HeadByHeadConfiguration) -> tuple[Any, ...]:
    """Kinds of the arguments that all of these kernels take."""
    _, dtype, term_counts, has_static, is_additive, has_documents, is_window, *_ = configuration
    factors = Factors._make(_if_given(count > 0, "*fp32") for count in term_counts)
    where = _visibility("*u8", _if_given(is_additive, "*fp32"), _if_given(has_documents, "*i32"), is_window=is_window)
    statics = Statics._make(_if_given(has_static, f"*{kind}") for kind in (_dtype_of_scores(dtype), dtype, dtype))
    tables = _tables(configuration, configuration.composes_bias, has_static=has_static)
    return factors, SIZES, where, statics, tables


def _tables(
    configuration: HeadByHeadConfiguration | TensorCoreConfiguration, composes_bias: bool = False, *, has_static: bool
) -> ColumnTables:
    """Kinds of `ColumnTables`, with a map for gradients."""
    has_bias, has_gain = configuration.has_bias, configuration.has_gain
    if not (has_bias or has_gain):
        return ColumnTables._make(("none",) * len(ColumnTables._fields))
    given = (composes_bias, composes_bias and has_static, has_bias and not composes_bias, has_gain)
    tables = (_if_given(is_given, "*fp32") for is_given in given)
    return ColumnTables._make((*tables, "i32", "i32", f"*{configuration.dtype}"))


def _compile_tensor_cores(configuration: TensorCoreConfiguration, capability: int) -> dict[str, Compiled]:
    heads, padded, turns = configuration.heads, configuration.padded, turns_of_rows()
    masks = (_if_given(configuration.has_mask, kind) for kind in ("*u8", "*fp32", "*i32"))
    where = _visibility(*masks, is_window=configuration.is_window)
    mixing = Mixing._make(map(_if_given, configuration.sides, ("*fp16", f"*{configuration.dtype_of_terms}") * 2))
    common = (mixing, SIZES, where, _tables(configuration, has_static=False))
    key_counts = tuple(TERMS if side else 0 for side in configuration.sides[1::2])
    constants = {"heads": heads, "padded": padded, "turns": turns, "count": TERMS, "key_counts": key_counts}
    tiles = matrix_tiles_for(padded)
    compiled = {}
    for name, own in TENSOR_CORES.items():
        block_t, block_s, warps, stages = tiles[name]
        has_query, has_key = configuration.sides[2:] if name.endswith("post") else configuration.sides[:2]
        given = _stage_arguments(configuration, has_query=has_query, has_key=has_key)
        kinds = (*(given.get(kind, f"*{kind}") for kind in own), *common)
        tile = constants | {"block_t": block_t, "block_s": block_s, "query_count": TERMS if has_query else 0}
        unaligned = {(len(own) + 2,), *_parts(len(own) + 3, ColumnTables, "columns", "first")}
        kernel = compile_kernel(name, kinds, tile, capability, unaligned, num_warps=warps, num_stages=stages)
        traffic = tensor_core_traffic(configuration, name, block_t, block_s, turns)
        compiled[name] = Compiled(kernel, padded * block_t * block_s / (32 * warps), turns, traffic)
    block, warps = tile_of_matrices()
    static = _if_given(configuration.has_static, f"*{configuration.dtype_of_terms}")
    name, kinds = "dcmha_matrices", ("*fp16", f"*{configuration.dtype_of_terms}", static, "i32")
    kernel = compile_kernel(name, kinds, constants | {"block": block}, capability, set(), num_warps=warps)
    return compiled | {name: Compiled(kernel)}


def _stage_arguments(configuration: TensorCoreConfiguration, *, has_query: bool, has_key: bool) -> dict[str, Any]:
    """Kinds of the arguments that depend on which sides of a stage there are."""
    dtype = configuration.dtype
    partial = ("*bf16" if dtype == "bf16" else "*fp32", "*fp32", "*fp32", "i32")
    gradients = TermGradients._make(map(_if_given, (has_query, has_key, configuration.has_static, True), partial))
    terms = _if_given(has_query, f"*{configuration.dtype_of_terms}")
    return {"partial": gradients, "terms": terms, "map": f"*{dtype}"}


def _compile_window(configuration: WindowConfiguration, capability: int) -> dict[str, Compiled]:
    width, dtype, share, is_added, window = configuration
    block_t, block_s, warps = tile_of_window(torch.float32 if dtype == "fp32" else torch.bfloat16)
    step = block_of(window)
    constants = {"heads": 16, "share": share, "width": width, "step": step, "reach": window + step}
    constants |= {"is_added": is_added, "block_t": block_t, "block_s": block_s}
    where = _visibility(is_window=True, strides=STRIDES)
    common = (STRIDES, STRIDES, SIZES, where, "fp32")
    tensors = {
        "dcmha_window_maps": (*(f"*{dtype}",) * 2, f"*{_dtype_of_scores(dtype)}"),
        "dcmha_window_queries": (f"*{dtype}",) * 3,
        "dcmha_window_keys": (*(f"*{dtype}",) * 2, "*fp32" if is_added else f"*{dtype}"),
    }
    return {
        name: Compiled(compile_kernel(name, (*own, *common), constants, capability, {(6,)}, num_warps=warps))
        for name, own in tensors.items()
    }


def _compile_decode(configuration: DecodeConfiguration, capability: int) -> dict[str, Compiled]:
    heads, kv_heads, width, dtype, rank, groups, _, is_short, is_paged, _ = configuration
    sides = tile_sides(heads, kv_heads, width)
    blocks = blocks_of_decoding(sides["block_h"], sides["block_d"] * (4 if dtype == "fp32" else 2), paged=is_paged)
    constants = {"heads": heads, "kv_heads": kv_heads, "width": width, "block_s": blocks[-1 if is_short else 0]}
    constants |= {**sides, "query_rank": rank, "key_rank": rank, "groups": groups}
    kinds = _decode_arguments(configuration)
    # Neither the number of keys nor that of splits is divisible by 16.
    unaligned: dict[str, set[tuple[int, ...]]] = {
        "dcmha_decode_scores": {(7,), *_parts(10, DecodeTables, "bias_rows", "gain_rows")},
        "dcmha_decode_outputs": {(6,), *_parts(8, DecodeTables, "bias_rows", "gain_rows")},
        "dcmha_decode_sum": {(2,)},
    }
    options = loading_of_decoding()
    return {
        name: Compiled(compile_kernel(name, kinds[name], constants, capability, unaligned[name], **options))
        for name in kinds
    }


def _decode_arguments(configuration: DecodeConfiguration) -> dict[str, tuple[Any, ...]]:
    """Kinds of each kernel's arguments."""
    element = f"*{configuration.dtype}"
    side = DecodeSide._make((element,) * 3 + ("i32",) * 3)
    stage = DecodeStage._make((side, side, _if_given(configuration.has_static, element)))
    where = DecodeMask._make(("*u8", ("i32", "one"), "none", ("i32", "i32"), "none"))
    pages = DecodePages._make(("*i64", "*i64")) if configuration.is_paged else "none"
    given = ("none", "*fp32", "*fp32", "i32", "i32", "none") if configuration.has_tables else ("none",) * 6
    tables = DecodeTables._make(given)
    # The last two are the number of a split's blocks and that of splits.
    sizes = CacheSizes._make(("i32", "i32", *("one" if configuration.is_short else "i32",) * 2))
    scores = (element, element, "*fp32", "*fp32", stage, where, pages, sizes, STRIDES, STRIDES, tables, "fp32")
    return {
        "dcmha_decode_scores": scores,
        "dcmha_decode_outputs": ("*fp32", "*fp32", element, "*fp32", stage, pages, sizes, STRIDES, tables),
        "dcmha_decode_sum": ("*fp32", element, "i32"),
    }


def _dtype_of_scores(dtype: str) -> str:
    return "fp32" if dtype == "fp32" else "fp16"


def _if_given(is_given: bool, kind: str) -> str:
    """The kind of an argument that may be absent."""
    return kind if is_given else "none"


def _visibility(
    mask: str = "none",
    bias: str = "none",
    first_keys: str = "none",
    *,
    is_window: bool,
    strides: tuple[str, ...] = MASK_STRIDES,
) -> Visibility:
    """Kinds of `Visibility` with masks of these kinds."""
    window = _if_given(is_window, "i32")
    masks = (mask, *strides, bias, *strides)
    return Visibility._make((*("i32",) * 4, window, "i32", "i32", window, "one", *masks, first_keys, "i32"))


def _parts(argument: int, kind: type[ColumnTables | DecodeTables], *names: str) -> set[tuple[int, ...]]:
    """The indices that lead to fields of a kernel's argument, which is a named tuple of this kind."""
    return {(argument, kind._fields.index(name)) for name in names}


def compile_kernel(
    name: str,
    kinds: tuple[Any, ...],
    constants: dict[str, Any],
    capability: int,
    unaligned: Set[tuple[int, ...]],
    **options: int,
) -> Any:
    """Compiles a kernel for arguments of these kinds, all of them divisible by 16 but those that are `unaligned`.

    Args:
        unaligned: indices that lead to an argument, or to a part of one.
        constants: values of `tl.constexpr` parameters; those that the kernel does not have are ignored.
        options: Triton's `num_warps` and `num_stages`.
    """
    kernel = load_kernels(torch.device("cuda"))[name]
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    named = dict(zip(kernel.arg_names, [*_signature(kinds), *("constexpr" for _ in constants)], strict=True))
    values: dict[tuple[int, ...], Any] = {
        (kernel.arg_names.index(constant),): value for constant, value in constants.items()
    }
    values |= {path: CONSTANTS[kind] for path, kind in _leaves(kinds) if kind in CONSTANTS}
    aligned = [path for path, kind in _leaves(kinds) if kind[0] in "*i" and unaligned.isdisjoint({path[:1], path[:2]})]
    source = triton.compiler.ASTSource(kernel, named, values, {path: [["tt.divisibility", 16]] for path in aligned})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _signature(kinds: Any) -> Any:
    """The same kinds as Triton names them, in the same tuples."""
    if isinstance(kinds, str):
        return "constexpr" if kinds in CONSTANTS else kinds
    parts = map(_signature, kinds)
    return type(kinds)(*parts) if hasattr(kinds, "_fields") else tuple(parts)


def _leaves(kinds: tuple[Any, ...], path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yields each kind in nested tuples and the indices that lead to it."""
    for index, kind in enumerate(kinds):
        if isinstance(kind, tuple):
            yield from _leaves(kind, (*path, index))
        else:
            yield (*path, index), kind
