"""`ComposedMultiheadAttention`: PyTorch's module without composition, the definition and the authors' code with it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import mixers as authors
from cases.golden import assert_gradients, case_names, flax_attention, read_case, tensors_under
from cases.largest_tensor import LargestTensor
from torch import Tensor, nn

from dynattn import ComposedMultiheadAttention, mixer_fields
from dynattn.configuration.composition_config import CompositionConfig
from dynattn.configuration.multihead_config import ComposeOptions, make_config
from dynattn.modeling.ops.dcmha.attention import IMPLEMENTATIONS
from dynattn.modeling.ops.dcmha.eager import dcmha_eager
from dynattn.modeling.other_models import multihead_attention

# PyTorch would rather have both masks of one type; ours takes any.
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched", "ignore:The PyTorch API of nested tensors")

OFF = {"compose_pre": False, "compose_post": False}
# Large factors: with small ones an attention that ignored them would still look right.
STRONG = {"compose_init_scale": 40.0}
B, T, S, E, H = 3, 7, 11, 24, 6

MASKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "none": lambda t, s: {},
    "padding": lambda t, s: {"key_padding_mask": padding(s)},
    "added padding": lambda t, s: {"key_padding_mask": torch.randn(B, s).double()},
    "boolean": lambda t, s: {"attn_mask": hidden(t, s)},
    "added": lambda t, s: {"attn_mask": torch.randn(t, s).double()},
    "added infinity": lambda t, s: {"attn_mask": torch.zeros(t, s).double().masked_fill(hidden(t, s), -torch.inf)},
    "each head": lambda t, s: {"attn_mask": torch.stack([hidden(t, s) for _ in range(B * H)])},
    "added to each head": lambda t, s: {"attn_mask": torch.randn(B * H, t, s).double()},
    "boolean and padding": lambda t, s: {"attn_mask": hidden(t, s), "key_padding_mask": padding(s)},
    "added and padding": lambda t, s: {"attn_mask": torch.randn(B * H, t, s).double(), "key_padding_mask": padding(s)},
    "causal": lambda t, s: {"attn_mask": torch.ones(t, s).triu(1).bool(), "is_causal": t == s},
}
KINDS: dict[str, dict[str, Any]] = {
    "self": {},
    "self without bias": {"bias": False},
    "own widths": {"kdim": 10, "vdim": 14},
    "own widths without bias": {"kdim": 10, "vdim": 14, "bias": False},
    "own width of values": {"vdim": 14},
}
SWITCHES: list[dict[str, Any]] = [
    {},
    {"compose_pre": False},
    {"compose_post": False},
    {"compose_query_wise": False},
    {"compose_key_wise": False},
    {"compose_low_rank": False},
    {"compose_gate": False},
    {"compose_static": True},
    {"compose_static": True, "compose_query_wise": False, "compose_key_wise": False},
    {"compose_static": True, "compose_groups": 2},
    {"compose_rank": 3, "compose_hidden_size": 5, "compose_act": "gelu_pytorch_tanh"},
]


def padding(keys: int) -> Tensor:
    """`[B, S]`, True where a key is hidden; each row keeps its first two keys."""
    return torch.arange(keys) >= torch.tensor([[keys], [2], [keys - 3]])


def hidden(queries: int, keys: int) -> Tensor:
    """`[T, S]`, True where a key is hidden at random, never one of the first two."""
    mask = torch.rand(queries, keys) < 0.5
    mask[:, :2] = False
    return mask


def make_inputs(module: nn.MultiheadAttention, cross: bool, length: int = S) -> list[Tensor]:
    """Query, key and value in the layout of `module`, with gradients; without `cross` one tensor where widths allow."""
    batch_first = module.batch_first

    def draw(size: int, width: int) -> Tensor:
        shape = (B, size, width) if batch_first else (size, B, width)
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    query = draw(T, E)
    if not cross and module.kdim == module.vdim == E:
        return [query, query, query]
    return [query, draw(length, module.kdim), draw(length, module.vdim)]


def gradients(
    module: nn.Module, inputs: list[Tensor], outputs: tuple[Tensor, Tensor | None]
) -> dict[str, Tensor | None]:
    """Gradients of a loss that weighs every element of the outputs differently: of inputs and of parameters."""
    loss = sum(
        (output * torch.arange(output.numel()).view_as(output).cos()).sum() for output in outputs if output is not None
    )
    leaves = {f"input {id(tensor)}": tensor for tensor in inputs} | dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def assert_close(found: Any, expected: Any, atol: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-10)


def assert_same(
    ours: nn.Module, theirs: nn.Module, inputs: list[Tensor], options: dict[str, Any], atol: float = 1e-10
) -> None:
    """Outputs, weights and the gradients of everything that `theirs` has."""
    found, expected = ours(*inputs, **options), theirs(*inputs, **options)
    assert_close(found, expected, atol)
    found_gradients, expected_gradients = gradients(ours, inputs, found), gradients(theirs, inputs, expected)
    for name, gradient in expected_gradients.items():
        assert_close(found_gradients[name], gradient, 100 * atol)


def pair(kind: dict[str, Any], **options: Any) -> tuple[ComposedMultiheadAttention, nn.MultiheadAttention]:
    """Ours and PyTorch's module in float64 with the same projections, all drawn at random, biases too."""
    theirs = nn.MultiheadAttention(E, H, dtype=torch.float64, **kind)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours = ComposedMultiheadAttention(E, H, dtype=torch.float64, **kind, **options)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not unexpected
    assert all("composition" in name for name in missing)
    return ours, theirs


@pytest.mark.parametrize("kind", KINDS)
def test_composition_off_has_the_state_and_the_initial_weights_of_pytorch(kind: str) -> None:
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, H, **KINDS[kind])
    torch.manual_seed(3)
    ours = ComposedMultiheadAttention(E, H, **KINDS[kind], **OFF)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())


# Without composition and `implementation` the code is PyTorch's; with a name it is ours; scale 0 is the identity.
# Whatever the name, `eager` attends where weights are returned. Masks and kinds of projections meet in one way; the
# other ways meet each mask and each kind.
WAYS: dict[str, dict[str, Any]] = {
    "off": OFF,
    "off, sdpa": {**OFF, "implementation": "sdpa"},
    "off, chunked": {**OFF, "implementation": "chunked"},
    "identity": {"compose_init_scale": 0.0, "compose_static": True},
}
WAYS_OF_KINDS = [
    (way, kind, mask)
    for way in WAYS
    for kind in KINDS
    for mask in MASKS
    if way == "off, sdpa" or kind == "self" or mask == "none"
]


@pytest.mark.parametrize(("way", "kind", "mask"), WAYS_OF_KINDS)
def test_it_equals_pytorch_in_float64(way: str, kind: str, mask: str) -> None:
    for batch_first, cross, keys in ((True, False, S), (False, True, 4)):
        ours, theirs = pair({**KINDS[kind], "batch_first": batch_first}, **WAYS[way])
        inputs = make_inputs(ours, cross, keys)
        options = MASKS[mask](T, inputs[1].shape[1 if batch_first else 0])
        for weights in ({}, {"average_attn_weights": False}, {"need_weights": False}):
            assert_same(ours, theirs, inputs, {**options, **weights})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", ["none", "padding", "boolean", "each head"])
def test_unbatched_input_equals_pytorch(way: str, mask: str) -> None:
    ours, theirs = pair({}, **WAYS[way])
    inputs = [torch.randn(length, E, dtype=torch.float64, requires_grad=True) for length in (T, S, S)]
    masks = MASKS[mask](T, S)
    masks |= {"key_padding_mask": masks["key_padding_mask"][1]} if mask == "padding" else {}
    masks |= {"attn_mask": masks["attn_mask"][:H]} if mask == "each head" else {}
    for weights in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        assert_same(ours, theirs, inputs, {**masks, **weights})


def reference(
    module: ComposedMultiheadAttention, query: Tensor, key: Tensor, value: Tensor, **masking: Any
) -> tuple[Tensor, Tensor]:
    """Composed attention of `[B, T, E]`, `[B, S, kdim]` and `[B, S, vdim]` by the op's definition, without the module.

    Returns the output `[B, T, E]` and the composed probabilities `[B, H, T, S]`.
    """
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    sizes = [len(weight) for weight in weights]
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.split(sizes)
    heads = [
        F.linear(x, weight, bias).unflatten(-1, (-1, E // H)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    ]
    factors = module.composition(query)
    if "key" in module.composition.sides:
        factors = factors.with_keys_of(module.composition(key))
    elif module.key_composition is not None:
        factors = factors.with_keys_of(module.key_composition(key))
    pre, post = module.composition.assemble(factors)
    masking = {"attention_mask": None, "is_causal": False, **masking}
    output, probs = dcmha_eager(*heads, pre=pre, post=post, scaling=(E // H) ** -0.5, sliding_window=None, **masking)
    return module.out_proj(output.flatten(2)), probs


def assert_equals_reference(
    module: ComposedMultiheadAttention, inputs: list[Tensor], options: dict[str, Any], **masking: Any
) -> None:
    expected, probs = reference(module, *inputs, **masking)
    wanted = gradients(module, inputs, (expected, None))
    for weights in ({"average_attn_weights": False}, {}, {"need_weights": False}):
        output, found = module(*inputs, **options, **weights)
        assert_close(output, expected, 1e-9)
        if "need_weights" not in weights:
            assert_close(found, probs if weights else probs.mean(1), 1e-9)
        given = gradients(module, inputs, (output, None))
        assert all(gradient is None or gradient.isfinite().all() for gradient in given.values())
        assert_close(given, wanted, 1e-7)


@pytest.mark.parametrize("cross", ["self", "one generator", "two generators", "own widths"])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_composition_equals_the_definition(switches: dict[str, Any], cross: str) -> None:
    kind = {"own widths": {"kdim": 10, "vdim": 14}, "two generators": {"cross_attention": True}}.get(cross, {})
    module = ComposedMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **kind, **switches, **STRONG)
    inputs = make_inputs(module, cross != "self")
    assert_equals_reference(module, inputs, {})
    plain = ComposedMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **kind, **OFF)
    plain.load_state_dict({name: w for name, w in module.state_dict().items() if "composition" not in name})
    assert (plain(*inputs)[0] - module(*inputs)[0]).abs().max() > 0.001
    found = gradients(module, inputs, module(*inputs, need_weights=False))
    assert not [name for name, gradient in found.items() if gradient is None or not gradient.abs().max() > 0]


@pytest.mark.parametrize(("given", "layer"), [({}, 0), ({"layer_idx": 2}, 2)])
def test_differential_heads_equal_their_authors_formula(given: dict[str, Any], layer: int) -> None:
    fields = mixer_fields("differential") | given
    module = ComposedMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **fields)
    part = module.differential
    assert part is not None
    with torch.no_grad():
        part.norm.weight.normal_()
    x = torch.randn(B, T, E, dtype=torch.float64, requires_grad=True)
    heads = module._project(x, x, x)
    dots = [(part.lambda_q1 @ part.lambda_k1).exp(), (part.lambda_q2 @ part.lambda_k2).exp()]
    start = 0.8 - 0.6 * 2.718281828459045 ** (-0.3 * layer)
    wide = torch.cat(authors.differential(*heads, dots[0] - dots[1] + start).chunk(2, dim=2), dim=-1)  # [B, T, H/2, 2D]
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * part.norm.weight * (1 - start)
    expected = module.out_proj(normed.flatten(2))
    wanted = gradients(module, [x], (expected, None))
    for need_weights in (True, False):
        output, _ = module(x, x, x, need_weights=need_weights, is_causal=True)
        assert_close(output, expected)
        assert_close(gradients(module, [x], (output, None)), wanted)


def test_values_may_differ_where_queries_are_keys() -> None:
    module = ComposedMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **STRONG)
    query, key, value = make_inputs(module, cross=True, length=T)
    assert_equals_reference(module, [query, query, value], {})
    assert_equals_reference(module, [query, key, query], {})


@pytest.mark.parametrize("implementation", [None, "eager"])
@pytest.mark.parametrize("keys", [4, S])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_equal_the_definition(mask: str, keys: int, implementation: str | None) -> None:
    module = ComposedMultiheadAttention(
        E, H, batch_first=True, dtype=torch.float64, implementation=implementation, **STRONG
    )
    inputs = make_inputs(module, cross=True, length=keys)
    options = MASKS[mask](T, keys)
    bias = torch.zeros(B, H, T, keys, dtype=torch.float64)
    if "attn_mask" in options:
        given = options["attn_mask"]
        given = given.view(B, H, T, keys) if given.dim() == 3 else given.expand(B, H, T, keys)
        bias = bias.masked_fill(given, -torch.inf) if given.dtype == torch.bool else bias + given
    if "key_padding_mask" in options:
        given = options["key_padding_mask"][:, None, None]
        bias = bias.masked_fill(given, -torch.inf) if given.dtype == torch.bool else bias + given
    assert_equals_reference(module, inputs, options, attention_mask=bias)


def test_causality_needs_no_mask() -> None:
    module = ComposedMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **STRONG)
    inputs = make_inputs(module, cross=False)
    assert_equals_reference(module, inputs, {"is_causal": True}, is_causal=True)
    mask = torch.ones(T, T).triu(1).bool()
    assert_close(module(*inputs, attn_mask=mask), module(*inputs, is_causal=True))
    assert_close(module(*inputs, attn_mask=mask, is_causal=True), module(*inputs, is_causal=True))
    inputs = make_inputs(module, cross=True)
    with pytest.raises(ValueError, match="ambiguous for 7 queries and 11 keys"):
        module(*inputs, is_causal=True)
    mask = torch.ones(T, S).triu(1).bool()
    assert_close(module(*inputs, attn_mask=mask, is_causal=True), module(*inputs, attn_mask=mask))


def test_with_other_numbers_of_keys_the_mask_alone_says_what_is_causal() -> None:
    module = ComposedMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **STRONG)
    inputs = make_inputs(module, cross=True)
    for need_weights in (True, False):
        options = {"attn_mask": torch.zeros(T, S, dtype=torch.bool), "need_weights": need_weights}
        assert_close(module(*inputs, **options, is_causal=True), module(*inputs, **options))


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_one_norm_of_heads_acts_without_composition_too(name: str) -> None:
    ours, theirs = pair({}, **OFF, **{name: nn.LayerNorm(E // H, elementwise_affine=False)})
    x = torch.randn(T, B, E, dtype=torch.float64)
    assert (ours(x, x, x)[0] - theirs(x, x, x)[0]).abs().max() > 1e-3


def test_the_implementation_that_is_asked_for_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def attend(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(arguments[0].shape)
        return dcmha_eager(*arguments, **options)

    monkeypatch.setitem(IMPLEMENTATIONS, "eager", attend)
    for composed in ({}, OFF):
        module = ComposedMultiheadAttention(E, H, batch_first=True, implementation="eager", **composed)
        x = torch.randn(B, T, E)
        module(x, x, x, need_weights=False)
    assert calls == [(B, H, T, E // H)] * 2


@pytest.mark.parametrize(("queries", "keys"), [(70, 50), (33, 200), (64, 64)])
def test_float32_in_linear_memory_equals_float64(queries: int, keys: int) -> None:
    module = ComposedMultiheadAttention(E, H, batch_first=True, **STRONG)
    query, key = torch.randn(B, queries, E), torch.randn(B, keys, E)
    masks = {"key_padding_mask": padding(keys)}
    expected, _ = copy.deepcopy(module).double()(query.double(), key.double(), key.double(), **masks)
    found, _ = module(query, key, key, need_weights=False, **masks)
    torch.testing.assert_close(found.double(), expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


def test_an_additive_mask_gets_its_gradient() -> None:
    module = ComposedMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **STRONG)
    inputs = make_inputs(module, cross=False)
    bias = torch.randn(B * H, T, T, dtype=torch.float64, requires_grad=True)
    found = [torch.autograd.grad(module(*inputs, attn_mask=bias, need_weights=w)[0].sum(), bias)[0] for w in (0, 1)]
    assert found[0].abs().max() > 0
    assert_close(*found)


def test_a_query_that_sees_no_key_gives_the_output_bias() -> None:
    module = ComposedMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **STRONG)
    x = torch.randn(B, T, E, dtype=torch.float64)
    mask = torch.zeros(T, T, dtype=torch.bool)
    mask[2] = True
    for need_weights in (False, True):
        output, _ = module(x, x, x, attn_mask=mask, need_weights=need_weights)
        assert_close(output[:, 2], module.out_proj.bias.expand(B, E))
        assert output.isfinite().all()


@pytest.mark.parametrize("composed", [False, True])
def test_grouped_queries_repeat_keys_and_values(composed: bool) -> None:
    options = STRONG if composed else OFF
    module = ComposedMultiheadAttention(
        E, H, batch_first=True, dtype=torch.float64, num_key_value_heads=2, kdim=10, vdim=14, **options
    )
    assert {name: tuple(p.shape) for name, p in module.named_parameters() if "composition" not in name} == {
        "q_proj_weight": (24, 24),
        "k_proj_weight": (8, 10),
        "v_proj_weight": (8, 14),
        "in_proj_bias": (40,),
        "out_proj.weight": (24, 24),
        "out_proj.bias": (24,),
    }
    whole = ComposedMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, kdim=10, vdim=14, **options)
    state = module.state_dict()

    def repeat(rows: Tensor) -> Tensor:
        """Rows of two heads for six."""
        return rows.unflatten(0, (2, 4)).repeat_interleave(3, dim=0).flatten(0, 1)

    nn.init.normal_(module.in_proj_bias)
    query, key, value = state["in_proj_bias"].split([24, 8, 8])
    state |= {name: repeat(state[name]) for name in ("k_proj_weight", "v_proj_weight")}
    whole.load_state_dict({**state, "in_proj_bias": torch.cat([query, repeat(key), repeat(value)])})
    inputs = make_inputs(module, cross=True)
    for weights in ({"average_attn_weights": False}, {"need_weights": False}):
        assert_close(module(*inputs, **weights), whole(*inputs, **weights))


def official_weights(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """The authors' tensors under the names of this module, which joins the projections."""
    ours = flax_attention(official)
    for kind in ("weight", "bias"):
        ours[f"in_proj_{kind}"] = torch.cat([ours.pop(f"{name}_proj.{kind}") for name in "qkv"])
        ours[f"out_proj.{kind}"] = ours.pop(f"o_proj.{kind}")
    return ours


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("name", case_names("dcvit_attn_*", "dcvit_cross_*"))
def test_it_equals_the_authors_vision_transformer(name: str, implementation: str) -> None:
    meta, tensors = read_case(name)
    width = meta["hidden_size"] // meta["heads"]
    norms = {key: nn.LayerNorm(width, eps=1e-6, bias=False) for key in ("q_norm", "k_norm")}
    module = ComposedMultiheadAttention(
        meta["hidden_size"],
        meta["heads"],
        batch_first=True,
        cross_attention=meta["cross"],
        implementation=implementation,
        compose_static=True,
        compose_groups=meta["groups"],
        compose_act="gelu_pytorch_tanh",
        **norms,
    ).double()
    module.load_state_dict(official_weights(tensors_under(tensors, "sd.")))
    x = tensors["x"].requires_grad_()
    y = tensors["y"].requires_grad_() if meta["cross"] else x
    mask = ~tensors["mask"].expand(-1, meta["heads"], -1, -1).flatten(0, 1) if "mask" in tensors else None
    output, _ = module(x, y, y, attn_mask=mask, need_weights=False)
    torch.testing.assert_close(output, tensors["out"], atol=1e-9, rtol=0)

    (output * tensors["weight_of_output"]).sum().backward()
    expected = official_weights(tensors_under(tensors, "grad.sd."))
    assert_gradients(module, expected)
    for key, tensor in {"x": x, "y": y}.items():
        if f"grad.{key}" in tensors:
            torch.testing.assert_close(tensor.grad, tensors[f"grad.{key}"], atol=1e-8, rtol=0)


@pytest.mark.parametrize("masks", ["none", "padding", "causal"])
def test_no_map_of_all_pairs_is_made_unless_weights_are_asked_for(masks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length = 400
    module = ComposedMultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, length, 16, requires_grad=True)
    options: dict[str, Any] = {
        "none": {},
        "padding": {"key_padding_mask": torch.arange(length)[None] > 300},
        "causal": {"is_causal": True},
    }[masks]
    with LargestTensor() as largest:
        module(x, x, x, **options)
    assert largest.elements >= 2 * length**2
    monkeypatch.setattr(multihead_attention, "dcmha_eager", None)
    with LargestTensor() as largest:
        module(x, x, x, **options, need_weights=False)[0].sum().backward()
    assert largest.elements < length**2


def test_weights_that_are_returned_may_be_negative_and_need_not_sum_to_one() -> None:
    module = ComposedMultiheadAttention(E, H, **STRONG)
    x = torch.randn(T, B, E)
    _, weights = module(x, x, x, average_attn_weights=False)
    assert weights.min() < 0
    assert (weights.sum(-1) - 1).abs().max() > 0.1


def test_self_attention_has_one_generator_and_cross_attention_two() -> None:
    def generators(**options: Any) -> dict[str, tuple[int, ...]]:
        module = ComposedMultiheadAttention(E, H, **options)
        return {name: tuple(p.shape) for name, p in module.named_parameters() if "hidden" in name or "static" in name}

    assert generators() == {"composition.hidden_weight": (24, 1, 4, 24)}
    assert generators(kdim=10, compose_static=True) == {
        "composition.hidden_weight": (24, 1, 2, 24),
        "composition.static_weight": (2, 1, 6, 6),
        "key_composition.hidden_weight": (10, 1, 2, 24),
    }
    assert generators(cross_attention=True).keys() == generators(kdim=24).keys()
    assert generators(cross_attention=True, compose_key_wise=False) == {"composition.hidden_weight": (24, 1, 2, 24)}


def test_one_generator_computes_what_two_do() -> None:
    one = ComposedMultiheadAttention(E, H, dtype=torch.float64, **STRONG)
    two = ComposedMultiheadAttention(E, H, dtype=torch.float64, cross_attention=True, **STRONG)
    state = dict(one.state_dict())
    for name in ("hidden_weight", "factor_weight", "gate_weight"):
        weight = state.pop(f"composition.{name}")
        axis = 1 if name == "factor_weight" else 2
        for side, generator in enumerate(("composition", "key_composition")):
            state[f"{generator}.{name}"] = weight.index_select(axis, torch.tensor([side, 2 + side]))
    two.load_state_dict(state)
    inputs = make_inputs(one, cross=True)
    assert_close(two(*inputs), one(*inputs))


def test_initial_weights_can_be_drawn_again() -> None:
    for options in ({}, {"kdim": 10}, {"num_key_value_heads": 2}, {"differential_heads": True}):
        module = ComposedMultiheadAttention(E, H, compose_static=True, **options)
        before = copy.deepcopy(module.state_dict())
        module._reset_parameters()
        same = [name for name, weight in module.state_dict().items() if torch.equal(weight, before[name])]
        assert {name.rpartition(".")[2] for name in same} <= {"in_proj_bias", "weight", "bias"}


@pytest.mark.parametrize(("embed_dim", "num_heads"), [(6, 6), (9, 3), (10, 2)])
def test_heads_of_any_width_are_composed(embed_dim: int, num_heads: int) -> None:
    module = ComposedMultiheadAttention(embed_dim, num_heads, batch_first=True)
    x = torch.randn(B, T, embed_dim)
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], module(x, x, x)[0])


def test_device_and_dtype_reach_every_parameter() -> None:
    module = ComposedMultiheadAttention(E, H, device="meta", dtype=torch.bfloat16, compose_static=True)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_serves_inputs_of_other_sizes() -> None:
    """While tracing, sizes are tensors."""
    module = ComposedMultiheadAttention(E, H, batch_first=True, **STRONG)
    x, longer = torch.randn(B, T, E), torch.randn(B + 1, T + 2, E)
    traced = torch.jit.trace(module, (x, x, x), check_trace=False)
    torch.testing.assert_close(traced(longer, longer, longer), module(longer, longer, longer))


def test_copies_compiled_modules_and_autocast_work() -> None:
    module = ComposedMultiheadAttention(E, H, batch_first=True, **STRONG)
    x = torch.randn(B, T, E)
    expected = module(x, x, x, need_weights=False)[0]
    assert torch.equal(copy.deepcopy(module)(x, x, x, need_weights=False)[0], expected)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x, x, need_weights=False)[0], expected)
    with torch.autocast("cpu", torch.bfloat16):
        for need_weights in (False, True):
            output, _ = module(x, x, x, need_weights=need_weights, attn_mask=torch.zeros(T, T))
            assert output.dtype == torch.bfloat16
            torch.testing.assert_close(output.float(), expected, atol=0.1 * expected.abs().max().item(), rtol=0)
        low = x.bfloat16()  # as a layer before it gives
        assert module(low, low, low, need_weights=False)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, r"dropout=0\.1 drops probabilities.*use dropout=0.0, or torch.nn"),
        ({"add_bias_kv": True}, "add_bias_kv=True adds a key that is no token.*use add_bias_kv=False"),
        ({"add_zero_attn": True}, "add_zero_attn=True adds a key that is no token"),
        ({"embed_dim": 25}, r"embed_dim \(25\) must be a positive multiple of num_heads \(6\)"),
        ({"num_heads": 0}, r"must be a positive multiple of num_heads \(0\)"),
        ({"num_heads": 1}, "composing takes at least 2 heads"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads \(4\) must divide num_attention_heads \(6\)"),
        ({"compose_rank": 7}, r"compose_rank \(7\) must be from 1 to the heads of a group \(6\)"),
        ({"compose_rank": "2"}, "compose_rank.*expected int"),
        ({"compose_groups": 4}, r"compose_groups \(4\) must divide"),
        ({"differential_heads": True, "compose_post": False}, "differential_heads subtracts probabilities"),
        ({"differential_heads": True, "num_key_value_heads": 3}, r"num_key_value_heads \(3\) must be even"),
        ({"differential_heads": True, "layer_idx": -1}, "layer_idx is -1; it must be the number of the layer, an int"),
        ({"differential_heads": True, "layer_idx": 0.5}, r"layer_idx is 0\.5"),
        ({"compose_act": "gelo"}, "compose_act 'gelo' does not exist; choose from"),
        ({"implementation": "sdpa"}, "cannot compose heads"),
        ({"implementation": "flash"}, "cannot compose heads"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ComposedMultiheadAttention(**{"embed_dim": E, "num_heads": H, **options})


def test_the_options_are_the_fields_of_the_configurations() -> None:
    fields = {name for name in CompositionConfig.__dataclass_fields__ if name.startswith("compose_")}
    assert fields | {"differential_heads", "head_norm_eps"} == ComposeOptions.__annotations__.keys()


def test_options_that_checkpoints_leave_out_keep_their_values() -> None:
    """Models with composed heads in place save only the options that were given: others would change their outputs."""
    saved = make_config(E, H, None, {})
    assert {name: getattr(saved, name) for name in ComposeOptions.__annotations__} == {
        **dict.fromkeys(("compose_pre", "compose_post", "compose_query_wise", "compose_key_wise"), True),
        **dict.fromkeys(("compose_low_rank", "compose_gate"), True),
        **dict.fromkeys(("compose_static", "differential_heads"), False),
        "compose_rank": 2,
        "compose_groups": 1,
        "compose_hidden_size": None,
        "compose_act": "gelu",
        "compose_norm_eps": 1e-6,
        "compose_init_scale": 1.0,
        "compose_dropout": 0.0,
        "head_norm_eps": 1e-5,
    }


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no options \['rank'\].*compose_rank"):
        ComposedMultiheadAttention(E, H, rank=2)  # type: ignore[call-arg]


def test_dropout_that_is_switched_on_later_is_refused() -> None:
    module = ComposedMultiheadAttention(E, H)
    module.dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        module(*[torch.randn(T, B, E)] * 3)


@pytest.mark.parametrize(
    ("inputs", "masks", "message"),
    [
        (((T, B, E), (S, B, E), (T, B, E)), {}, r"\(11, 3, 24\) and \(7, 3, 24\).*\[T, B, 24\], \[S, B, 24\], \[S, B"),
        (((T, B, E), (S, 2, E), (S, 2, E)), {}, "with batch_first=False they must be"),
        (((T, B, 23), (S, B, E), (S, B, E)), {}, r"query, key and value are \(7, 3, 23\)"),
        (((T, E), (S, B, E), (S, B, E)), {}, "or all without B"),
        (
            ((T, B, E),) * 3,
            {"attn_mask": torch.zeros(T, S)},
            r"attn_mask is \(7, 11\).*\(7, 7\) or \(18, 7, 7\)",
        ),
        (((T, B, E),) * 3, {"attn_mask": torch.zeros(T, T).int()}, r"attn_mask is torch.int32; it must be boolean"),
        (
            ((T, B, E),) * 3,
            {"key_padding_mask": torch.zeros(T, B)},
            r"mask is \(7, 3\); it must be \(3, 7\)",
        ),
        (((T, E),) * 3, {"key_padding_mask": torch.zeros(5)}, r"mask is \(5,\); it must be \(7,\)"),
        (((T, E),) * 3, {"key_padding_mask": torch.zeros(1, T)}, r"mask is \(1, 7\); it must be \(7,\)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(inputs: Any, masks: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ComposedMultiheadAttention(E, H)(*map(torch.randn, inputs), **masks)


def test_other_dtypes_and_nested_tensors_are_refused() -> None:
    module = ComposedMultiheadAttention(E, H, batch_first=True)
    with pytest.raises(ValueError, match=r"torch.float64, torch.float64.*weights torch.float32.*\.to\(dtype\)"):
        module(*[torch.randn(B, T, E).double()] * 3)
    with pytest.raises(ValueError, match="nested tensors are not supported; pad them"):
        module(*[torch.nested.nested_tensor([torch.randn(3, E), torch.randn(5, E)])] * 3)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_shared_key_heads_read_the_same_or_equal_inputs_alike(bias: bool) -> None:
    attention = ComposedMultiheadAttention(16, 4, bias=bias, batch_first=True, num_key_value_heads=2)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(attention(x, x, x)[0], attention(x, x.clone(), x.clone())[0])


@torch.no_grad()
def test_inputs_without_a_batch_have_no_batch_first() -> None:
    attention = ComposedMultiheadAttention(16, 4, batch_first=True)
    query, key = torch.randn(5, 16), torch.randn(7, 16)
    batched = attention(query[None], key[None], key[None])[0][0]
    torch.testing.assert_close(attention(query, key, key)[0], batched)
