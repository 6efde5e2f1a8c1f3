"""Masks, positions and packed documents of a forward pass: what is derived from what the caller gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from dynattn import (
    DCFormerConfig,
    DCFormerForCausalLM,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    RCMHAConfig,
    RCMHAForCausalLM,
)
from dynattn.modeling.common.input_checks import check_attention_mask

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}
WINDOWED = {**SMALL, "sliding_window": 5}
RECENT = {**SMALL, "mem_len": 4}
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "dcformer": (DCFormerConfig, DCFormerForCausalLM, {**WINDOWED, "compose_init_scale": 30.0}),
    "plain": (DCFormerConfig, DCFormerForCausalLM, {**WINDOWED, "compose_pre": False, "compose_post": False}),
    "dcpythia": (DCPythiaConfig, DCPythiaForCausalLM, {**WINDOWED, "head_dim": 8, "compose_init_scale": 30.0}),
    "rcmha": (RCMHAConfig, RCMHAForCausalLM, RECENT),
    "rcmha-without-window": (RCMHAConfig, RCMHAForCausalLM, {**SMALL, "mem_len": None, "conv_kernel_size": 5}),
    "mdha-alibi": (RCMHAConfig, RCMHAForCausalLM, {**RECENT, "attention_type": "mdha", "position_scheme": "alibi"}),
    "mha-learned": (RCMHAConfig, RCMHAForCausalLM, {**RECENT, "attention_type": "mha", "position_scheme": "learned"}),
}
IDS = torch.randint(1, 61, (1, 16), generator=torch.Generator().manual_seed(3))
every_family = pytest.mark.parametrize("family", FAMILIES)


def make(family: str) -> PreTrainedModel:
    torch.manual_seed(1)
    config_class, model_class, fields = FAMILIES[family]
    return model_class(config_class(**fields)).eval().double()


def assert_same(logits: Tensor, expected: Tensor) -> None:
    # Rotary angles are float32 in models of any dtype.
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def two_documents(model: PreTrainedModel) -> Tensor:
    return torch.cat([model(ids, use_cache=False).logits for ids in IDS.split([9, 7], dim=1)], dim=1)


POSITIONS = torch.cat([torch.arange(9), torch.arange(7)])[None]


@pytest.mark.parametrize(
    "new_cache",
    [
        lambda config: DynamicCache(config=config),
        lambda config: DynamicCache(),
        lambda config: StaticCache(config=config, max_cache_len=20),
    ],
    ids=["dynamic", "dynamic without configuration", "static"],
)
@every_family
@torch.no_grad()
def test_documents_are_packed_beside_an_empty_cache_too(family: str, new_cache: Callable) -> None:
    model = make(family)
    logits = model(IDS, position_ids=POSITIONS, past_key_values=new_cache(model.config)).logits
    assert_same(logits, two_documents(model))


@every_family
@torch.no_grad()
def test_positions_beside_cached_tokens_are_only_positions(family: str) -> None:
    model = make(family)
    cache = DynamicCache(config=model.config)
    places = torch.arange(16)[None]
    parts = [
        model(IDS[:, start:stop], position_ids=places[:, start:stop], past_key_values=cache).logits
        for start, stop in ((0, 6), (6, 7), (7, 16))
    ]
    assert_same(torch.cat(parts, dim=1), model(IDS, use_cache=False).logits)


@every_family
@torch.no_grad()
def test_borders_leave_given_positions_alone(family: str) -> None:
    model = make(family)
    borders = torch.tensor([0, 9, 16], dtype=torch.int32)
    assert_same(model(IDS, cu_seq_lens_q=borders).logits, two_documents(model))
    shifted = POSITIONS + 11
    logits = model(IDS, position_ids=shifted, cu_seq_lens_q=borders).logits
    assert_same(logits, model(IDS, position_ids=shifted).logits)
    if family == "mha-learned":
        assert (logits - two_documents(model)).abs().max() > 1e-2


@every_family
@torch.no_grad()
def test_two_documents_of_one_token_are_apart(family: str) -> None:
    model = make(family)
    expected = torch.cat([model(ids).logits for ids in IDS[:, :2].split(1, dim=1)], dim=1)
    assert_same(model(IDS[:, :2], position_ids=torch.zeros(1, 2, dtype=torch.long)).logits, expected)


@every_family
@torch.no_grad()
def test_positions_that_jump_ahead_separate_nothing(family: str) -> None:
    """A later token depends on the first one of its row, whatever numbers lie between them."""
    model = make(family)
    positions = torch.tensor([[0, 2, 3, 7]])
    changed = IDS[:, :4].clone()
    changed[0, 0] = changed[0, 0] % 60 + 1
    first, second = (model(ids, position_ids=positions).logits for ids in (IDS[:, :4], changed))
    assert (first - second)[0, -1].abs().max() > 1e-4


def test_padding_between_documents_is_refused() -> None:
    mask = torch.ones_like(IDS)
    mask[0, 12:] = 0
    with pytest.raises(ValueError, match="attention_mask hides 4 tokens of documents packed by cu_seq_lens; drop"):
        make("dcformer")(IDS, attention_mask=mask, cu_seq_lens_q=torch.tensor([0, 9, 16]))


def test_borders_beside_cached_tokens_are_refused() -> None:
    model, borders = make("dcformer"), torch.tensor([0, 9, 16])
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache, cu_seq_lens_q=borders)
    with pytest.raises(ValueError, match="past_key_values holds tokens already; leave cu_seq_lens out"):
        model(IDS, past_key_values=cache, cu_seq_lens_q=borders)


@every_family
@torch.no_grad()
def test_a_hole_in_a_mask_is_the_same_with_and_without_a_cache(family: str) -> None:
    model = make(family)
    mask = torch.ones_like(IDS)
    mask[0, [1, 6]] = 0
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    without = model(IDS, **options, use_cache=False).logits
    with_cache = model(IDS, **options, past_key_values=DynamicCache(config=model.config)).logits
    assert_same(with_cache[mask.bool()], without[mask.bool()])
    changed = torch.where(mask.bool(), IDS, IDS % 60 + 1)
    assert torch.equal(model(changed, **options).logits[mask.bool()], model(IDS, **options).logits[mask.bool()])


@every_family
@torch.no_grad()
def test_padding_on_the_left_changes_nothing_without_positions(family: str) -> None:
    model = make(family)
    padded = torch.cat([torch.full((1, 5), 7), IDS], dim=1)
    mask = (torch.arange(21) >= 5).long()[None]
    expected = model(IDS, use_cache=False).logits
    assert_same(model(padded, attention_mask=mask, use_cache=False).logits[:, 5:], expected)
    cache = DynamicCache(config=model.config)
    parts = [
        model(padded[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
        for start, stop in ((0, 8), (8, 9), (9, 21))
    ]
    assert_same(torch.cat(parts, dim=1)[:, 5:], expected)


@pytest.mark.parametrize(
    "new_cache",
    [lambda config: DynamicCache(config=config), lambda config: StaticCache(config=config, max_cache_len=20)],
    ids=["dynamic", "static"],
)
@every_family
@torch.no_grad()
def test_a_mask_of_the_new_tokens_alone_is_refused_beside_a_cache(family: str, new_cache: Callable) -> None:
    model = make(family)
    cache = new_cache(model.config)
    model(IDS[:, :11], past_key_values=cache)
    for columns in (5, 15):
        mask = torch.ones(1, columns, dtype=torch.long)
        with pytest.raises(ValueError, match=f"mask has {columns} columns for 11 cached and 5 new tokens; give 16"):
            model(IDS[:, 11:], attention_mask=mask, past_key_values=cache)
    logits = model(IDS[:, 11:], attention_mask=torch.ones_like(IDS), past_key_values=cache).logits
    assert_same(logits, model(IDS).logits[:, 11:])


def test_a_mask_longer_than_the_tokens_is_refused_without_a_cache() -> None:
    with pytest.raises(ValueError, match=r"attention_mask of shape \(1, 20\) does not fit 1 rows of 16 tokens"):
        make("dcformer")(IDS, attention_mask=torch.ones(1, 20), use_cache=False)


@torch.no_grad()
def test_a_static_cache_without_room_is_named() -> None:
    model = make("rcmha-without-window")
    cache = StaticCache(config=model.config, max_cache_len=15)
    model(IDS[:, :11], past_key_values=cache)
    with pytest.raises(ValueError, match="max_cache_len=15 tokens, and 11 cached and 5 new ones come to 16; make it"):
        model(IDS[:, 11:], past_key_values=cache)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "rcmha-without-window"])
@torch.no_grad()
def test_a_static_cache_shorter_than_the_window_does_not_narrow_it(family: str) -> None:
    """With windows in all layers nothing else ends the cache, and the oldest tokens would be dropped in silence."""
    config_class, model_class, fields = FAMILIES[family]
    sliding = {} if config_class is RCMHAConfig else {"layer_types": ["sliding_attention"] * 2}
    torch.manual_seed(1)
    model = model_class(config_class(**fields, **sliding)).eval().double()
    short, whole = (StaticCache(config=model.config, max_cache_len=room) for room in (4, 5))
    expected = model(IDS).logits
    parts = [model(part, past_key_values=whole).logits for part in IDS.split([1, 4, 3, 8], dim=1)]
    assert_same(torch.cat(parts, dim=1), expected)
    assert_same(model(IDS[:, :4], past_key_values=short).logits, expected[:, :4])
    with pytest.raises(ValueError, match="max_cache_len=4 tokens, and 4 cached and 1 new ones come to 5; make it"):
        model(IDS[:, 4:5], past_key_values=short)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "rcmha-without-window"])
def test_prefill_in_chunks_takes_padding_longer_than_a_chunk(family: str) -> None:
    model = make(family)
    batch = torch.cat([torch.cat([torch.full((1, 9), 7), IDS[:, :7]], dim=1), IDS])
    mask = torch.ones_like(batch)
    mask[0, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(batch, **options)
    assert torch.equal(model.generate(batch, **options, prefill_chunk_size=4), whole)


@every_family
@torch.no_grad()
def test_positions_that_restart_after_cached_tokens_separate_nothing(family: str) -> None:
    model = make(family)
    restarting = torch.tensor([[6, 7, 8, 6, 7]])
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(IDS[:, :6], past_key_values=cache)
    changed = IDS[:, 6:11].clone()
    changed[0, 0] = changed[0, 0] % 60 + 1
    first, second = (
        model(ids, position_ids=restarting, past_key_values=cache).logits
        for ids, cache in zip((IDS[:, 6:11], changed), caches, strict=True)
    )
    assert (first - second)[0, -1].abs().max() > 1e-4


@every_family
@torch.no_grad()
def test_a_cache_is_returned_only_where_one_is_used(family: str) -> None:
    model = make(family)
    cache = DynamicCache(config=model.config)
    assert model(IDS[:, :9], past_key_values=cache, use_cache=False).past_key_values is None
    assert model(IDS[:, 9:], past_key_values=cache).past_key_values is cache
    assert cache.get_seq_length() == 16
    assert model(IDS).past_key_values.get_seq_length() == 16


@pytest.mark.parametrize("implementation", ["eager", "chunked", "sdpa"])
def test_a_complete_mask_alone_decides_what_a_token_sees(implementation: str) -> None:
    """Later tokens, those beyond the window and those of other documents included."""
    family = "plain" if implementation == "sdpa" else "dcformer"
    config_class, model_class, fields = FAMILIES[family]
    torch.manual_seed(1)
    model = model_class(config_class(**{**fields, "num_hidden_layers": 1}, attn_implementation=implementation)).double()
    embeddings = torch.randn(1, 16, 48, dtype=torch.float64, requires_grad=True)
    visible = (torch.rand(16, 16) < 0.5) | torch.eye(16, dtype=torch.bool)
    logits = model(inputs_embeds=embeddings, attention_mask=visible[None, None], position_ids=POSITIONS).logits
    for query in (0, 6, 10, 15):
        (grad,) = torch.autograd.grad(logits[0, query].sum(), embeddings, retain_graph=True)
        assert grad[0].abs().sum(dim=-1).ne(0).tolist() == visible[query].tolist()


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["learned", "sinusoidal"])
def test_a_mask_that_hides_nothing_changes_no_positions_of_packed_documents(scheme: str) -> None:
    config_class, model_class, fields = FAMILIES["dcformer"]
    torch.manual_seed(1)
    model = model_class(config_class(**fields, position_scheme=scheme, position_scale=1.0)).eval().double()
    borders = torch.tensor([0, 9, 16])
    logits = model(IDS, attention_mask=torch.ones_like(IDS), cu_seq_lens_q=borders).logits
    assert_same(logits, two_documents(model))


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, "dcformer-learned", "rcmha-segment"])
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_mask_may_go_on_after_the_new_tokens(family: str, cache_class: Any) -> None:
    """As the mask of a whole static cache does: what it says of tokens that are yet to come is not read."""
    extra = {"dcformer-learned": {"position_scheme": "learned"}, "rcmha-segment": {"memory_type": "segment"}}
    if family in extra:
        config_class, model_class, fields = FAMILIES[family.partition("-")[0]]
        torch.manual_seed(1)
        model = model_class(config_class(**{**fields, **extra[family]})).eval().double()
    else:
        model = make(family)
    if family == "rcmha-segment" and cache_class is StaticCache:
        pytest.skip("a memory of segments is kept in a DynamicCache only")
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :3] = 0
    ids = IDS.reshape(2, 8)

    def read(end: int) -> list[Tensor]:
        cache = cache_class(config=model.config, **({"max_cache_len": 24} if cache_class is StaticCache else {}))
        first = model(ids[:, :5], attention_mask=mask[:, : end + 5], past_key_values=cache).logits
        return [first[1, 3:], model(ids[:, 5:], attention_mask=mask[:, : end + 8], past_key_values=cache).logits]

    for logits, expected in zip(read(16), read(0), strict=True):
        assert_same(logits, expected)


def test_arguments_that_do_not_fit_are_named() -> None:
    model = make("dcformer")
    with pytest.raises(
        ValueError, match=r"position_ids of shape \(1, 7\) must be \[1, 16\] or \[1, 16\], one position"
    ):
        model(IDS, position_ids=torch.arange(7)[None])
    with pytest.raises(ValueError, match=r"position_ids of shape \(16,\)"):
        model(IDS, position_ids=torch.arange(16))
    with pytest.raises(ValueError, match="past_key_values is a tuple; give a Cache"):
        model(IDS, past_key_values=((IDS, IDS),))
    with pytest.raises(ValueError, match="past_key_values is a EncoderDecoderCache; give a Cache"):
        model(IDS, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()))
    with pytest.raises(ValueError, match=r"no mask for the layer types \['sliding_attention'\]"):
        model(IDS, attention_mask={"full_attention": None})
    for borders in (torch.tensor([], dtype=torch.long), torch.tensor([[0, 16], [0, 16]])):
        with pytest.raises(ValueError, match=r"cu_seq_lens of shape .* must be \[documents \+ 1\]"):
            model(IDS, cu_seq_lens_q=borders)
    with pytest.raises(ValueError, match="cu_seq_lens_k is given without cu_seq_lens_q"):
        model(IDS, cu_seq_lens_k=torch.tensor([0, 9, 16]))
    learned = make("mha-learned")
    with pytest.raises(ValueError, match="position_ids has -3; learned positions count from 0"):
        learned(IDS, position_ids=torch.arange(16)[None] - 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_that_should_see_later_tokens_is_refused(family: str) -> None:
    model = make(family)
    with pytest.raises(ValueError, match="is_causal=False is not supported"):
        model(IDS, is_causal=False)
    model.config.is_causal = False
    with pytest.raises(ValueError, match="is_causal=False is not supported"):
        model(IDS)


def tiny(**fields: Any) -> DCFormerForCausalLM:
    torch.manual_seed(0)
    config = DCFormerConfig.from_size("tiny", **{"num_hidden_layers": 2, "initializer_range": 0.2, **fields})
    return DCFormerForCausalLM(config).eval()


ROWS = torch.randint(3, 99, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(2, 5), (2, 8, 1), (1, 8), (3, 8), (3, 1, 8, 8)])
def test_masks_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        tiny()(ROWS, attention_mask=torch.ones(shape))


def test_masks_are_not_read_while_tracing() -> None:
    def check(embeds: Tensor, mask: Tensor) -> Tensor:
        check_attention_mask(mask, embeds, None, exact=True)
        return embeds * mask[..., None]

    compiled = torch.compile(check, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2, 3, 1), torch.ones(2, 3)).sum() == 6


def test_borders_start_at_the_first_token() -> None:
    with pytest.raises(ValueError, match="cu_seq_lens must rise from 0"):
        tiny()(ROWS[:1], cu_seq_lens_q=torch.tensor([1, 4, 8]))


@torch.no_grad()
def test_a_mask_of_pairs_hides_no_token_from_rotations_by_content() -> None:
    model = tiny(position_scheme="carope", sliding_window=None)
    mask = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, 1, 8, 8)
    for given in (mask, {"full_attention": mask}):
        torch.testing.assert_close(model(ROWS, attention_mask=given).logits, model(ROWS).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_configuration_may_ask_for_fewer_layers() -> None:
    both, one = tiny(layer_types=["full_attention"] * 2), tiny(num_hidden_layers=1, layer_types=["full_attention"])
    one.load_state_dict(both.state_dict(), strict=False)
    both.config.num_hidden_layers = 1
    torch.testing.assert_close(both(ROWS).logits, one(ROWS).logits)
