"""Which weights decay, and which are Muon's."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dynattn import DCFormerConfig, DCFormerForCausalLM, RCMHAConfig, RCMHAForCausalLM
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.optimizer import build_optimizer, moment_bytes


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_that_are_no_embeddings_decay(tied: bool):
    config = LlamaConfig(
        vocab_size=8, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        tie_word_embeddings=tied, attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = build_optimizer(model, PretrainArguments(output="x", weight_decay=0.3))
    names = {id(weight): name for name, weight in model.named_parameters()}
    decayed, rest = ({names[id(weight)] for weight in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert decayed | rest == set(names.values())
    assert all(name.endswith("bias") or "norm" in name or "embed" in name for name in rest)
    assert ("lm_head.weight" in decayed) == (not tied)


def test_tables_of_positions_and_biases_of_heads_do_not_decay():
    model = RCMHAForCausalLM(RCMHAConfig.from_size("tiny"))
    decayed, rest = build_optimizer(model, PretrainArguments(output="x", weight_decay=0.3)).param_groups
    kept = {id(weight) for weight in rest["params"]}
    attention = model.model.layers[0].self_attn
    assert kept >= {id(w) for w in (attention.position_embeddings, attention.position_bias, attention.content_bias)}
    assert id(attention.q_proj.weight) in {id(weight) for weight in decayed["params"]}


MODELS = {
    "dcformer": lambda: DCFormerForCausalLM(DCFormerConfig.from_size("tiny", compose_static=True, attention_bias=True)),
    "rcmha": lambda: RCMHAForCausalLM(RCMHAConfig.from_size("tiny")),
}


@pytest.mark.parametrize("name", MODELS)
def test_muon_learns_hidden_matrices_alone(name: str):
    model = MODELS[name]()
    arguments = PretrainArguments(output="x", optimizer="muon", weight_decay=0.3)
    optimizer = build_optimizer(model, arguments)
    names = {weight: name for name, weight in model.named_parameters()}
    muon = {names[weight] for group in optimizer.parts[0].param_groups for weight in group["params"]}
    adamw = {names[weight] for group in optimizer.parts[1].param_groups for weight in group["params"]}
    assert muon | adamw == set(names.values())
    assert not muon & adamw
    assert all(name.endswith("_proj.weight") for name in muon)
    for part in ("embed", "lm_head", "norm", "bias", "composition", "conv"):
        assert not any(part in name for name in muon)
    assert all(names[weight] in muon for weight in model.parameters() if names[weight].endswith("_proj.weight"))


def test_muon_beside_adamw_is_the_two_optimizers_by_themselves():
    """Bit for bit against torch's own, over three updates, with states that went through a checkpoint."""
    torch.manual_seed(0)
    model, twin = MODELS["dcformer"](), MODELS["dcformer"]()
    twin.load_state_dict(model.state_dict())
    arguments = PretrainArguments(output="x", optimizer="muon", learning_rate=1e-2, weight_decay=0.1)
    optimizer = build_optimizer(model, arguments)
    weights = dict(twin.named_parameters())
    matrices = {name for name in weights if name.endswith("_proj.weight")}
    kept = {name for name, weight in weights.items() if weight.ndim < 2 or "embed" in name}
    muon = torch.optim.Muon(
        [weights[name] for name in weights if name in matrices],
        lr=1e-2,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    groups = [
        {"params": [weights[name] for name in weights if name not in matrices | kept], "weight_decay": 0.1},
        {"params": [weights[name] for name in weights if name in kept], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        ids = torch.randint(2048, (2, 16), generator=torch.Generator().manual_seed(step))
        for one in (model, twin):
            one.zero_grad()
            one(input_ids=ids, labels=ids).loss.backward()
        for one in (optimizer, muon, adamw):
            one.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters()), step


def test_muon_keeps_one_moment_of_a_matrix():
    model = MODELS["dcformer"]()
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    for choice in ("adamw", "muon"):
        arguments = PretrainArguments(output="x", optimizer=choice)
        optimizer = build_optimizer(model, arguments)
        optimizer.step()
        states = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]
        assert moment_bytes(model, arguments) == sum(tensor.numel() * 4 for tensor in states)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(UserError, match="optimizer=muon: Embedding has no linear layers to learn; use adamw"):
        build_optimizer(torch.nn.Embedding(3, 3), PretrainArguments(output="x", optimizer="muon"))
