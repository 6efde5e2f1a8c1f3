"""Documents behind a shared first token: the official layout, and models that see what a written mask shows."""

from typing import Any

import numpy as np
import pytest
import torch
from cases.golden import read_case
from cases.models import make_model

from dynattn import DCFormerConfig, RCMHAConfig
from dynattn.modeling.ops.chunked_loss import IGNORED
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.anchored import AnchoredSequences
from dynattn.scripts.pretrain.data.position_sampling import check_reads_positions
from dynattn.scripts.pretrain.data.token_stream import TokenStream
from dynattn.scripts.pretrain.outputs.throughput import positions

# Three documents of 5, 1 and 4 text tokens between a start token 90 and an end token 91.
TOKENS = [90, 1, 2, 3, 4, 5, 91, 90, 6, 91, 90, 7, 8, 9, 10, 91]
STARTS = [0, 7, 10]


def make(tokens: list[int], starts: list[int], length: int, anchor: int, *, score_all: bool) -> AnchoredSequences:
    stream = TokenStream(np.array(tokens, dtype=np.int32), np.array(starts, dtype=np.int64), text_bytes=10)
    return AnchoredSequences(stream, "the data", length, anchor=anchor, pad=0, score_all=score_all)


def test_anchors_lie_where_the_official_code_puts_them() -> None:
    _, golden = read_case("positions_anchor")
    tokens, starts = golden["flash.tokens"].tolist(), (golden["flash.positions_official"] == 0).nonzero().flatten()
    item = make([1, *tokens], [0, *(1 + starts).tolist()], len(tokens) + 1, anchor=1, score_all=False)[0]
    # The first window begins with a document, whose own start token stands right behind the anchor.
    assert item["input_ids"].tolist() == [1, 1, *tokens[:-1]]
    item = make(tokens[1:], (starts[1:] - 1).tolist(), len(tokens), anchor=1, score_all=False)[0]
    assert torch.equal(item["input_ids"], golden["flash.tokens"])
    assert torch.equal(item["position_ids"], golden["flash.positions_official"])


@pytest.mark.parametrize("length", [3, 5, 8, 17, 40])
def test_validation_scores_every_token_exactly_once_and_none_behind_an_anchor_that_is_not_its_own(length: int) -> None:
    sequences = make(TOKENS, STARTS, length, anchor=90, score_all=True)
    targets = [t for item in sequences for t in item["labels"][1:].tolist() if t != IGNORED]
    assert targets == [token for token in TOKENS if token != 90]
    assert all(len(values) == length and item["input_ids"][0] == 90 for item in sequences for values in item.values())


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("fields", [{}, {"compose_pre": False, "compose_post": False}, {"position_scheme": "learned"}])
def test_a_model_sees_what_a_written_mask_shows(fields: dict[str, Any], implementation: str) -> None:
    """Copies of the anchor in linear memory, against one anchor and a mask of all pairs in float64."""
    model = make_model(sliding_window=None, layer_types=["full_attention"] * 3, **fields)
    item = make(TOKENS, STARTS, 17, anchor=90, score_all=False)[0]
    ids, places = item["input_ids"][None], item["position_ids"][None]
    copies = (places == 0).flatten()
    kept = ~copies
    kept[0] = True
    document = copies.cumsum(0)[kept]
    visible = (document[:, None] == document) & torch.ones(len(document), len(document)).tril().bool()
    visible[:, 0] = True
    model.set_attn_implementation(implementation)
    found = model(ids, position_ids=places).logits[:, kept][:, 1:]
    model.double().set_attn_implementation("eager")
    expected = model(ids[:, kept], position_ids=places[:, kept], attention_mask=visible[None, None]).logits[:, 1:]
    torch.testing.assert_close(found.double(), expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    alone = model(ids[:, kept], position_ids=places[:, kept]).logits[:, 1:]
    assert (alone - expected).abs().max() > 0.01  # the mask hides something
    model.set_attn_implementation(implementation)
    exact = model(ids, position_ids=places).logits[:, kept][:, 1:]
    torch.testing.assert_close(exact, expected, atol=1e-6, rtol=0)  # angles are float32


def test_throughput_counts_what_is_seen_behind_an_anchor() -> None:
    item = make(TOKENS, STARTS, 17, anchor=90, score_all=False)[0]
    seen = positions({name: tensor[None] for name, tensor in item.items()})
    assert seen.tolist() == [[0, *range(7), *range(3), *range(6)]]


def test_documents_without_the_start_token_are_refused() -> None:
    with pytest.raises(UserError, match="document 1 of the data begins with token 91; choose another packing"):
        make(TOKENS, [0, 6], 8, anchor=90, score_all=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DCFormerConfig.from_size("tiny", position_scheme="alibi"), r"position_scheme=\['alibi'\] counts places"),
        (RCMHAConfig.from_size("tiny"), "counts places|for the decoders of this package"),
    ],
    ids=["alibi", "rcmha"],
)
def test_models_that_read_no_positions_are_refused(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_reads_positions(config, "packing=anchor")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_documents": False}, "keeps documents apart"),
        ({"length_warmup_steps": 5}, "counts positions anew"),
        ({"sequence_length": 2}, "sequence_length=2 must be 3 or more with packing=anchor"),
        ({"streaming": True, "max_steps": 3, "tokenizer": "x"}, "and packing: concatenate"),
    ],
)
def test_what_excludes_anchors_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PretrainArguments(output="x", packing="anchor", **options)
