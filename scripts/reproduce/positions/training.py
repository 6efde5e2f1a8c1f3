"""One run of the study: a small DCFormer learns a task on short lengths and is tested on longer ones."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynattn import DCFormerConfig, DCFormerForCausalLM

from ..model_training import begin_alike, matched_width, train_steps
from .arguments import SCHEMES
from .tasks import VOCABULARY, Batch, lengths_to_test, make_batch, trained_length

BATCH, TEST_EXAMPLES = 64, 200
# Each use of random numbers has a stream of its own, so that one does not change the others.
TRAINING, TESTING = 0, 1
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "sliding_window": None,
    "use_qk_norm": False,
    "initializer_range": 0.05,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Run:
    """What decides a run.

    Attributes:
        composition: `off`, `on`, or `wide`: plain with a wider MLP, of as many parameters as with composition.
        longest: the longest trained length, 0 for that of the task.
    """

    task: str
    scheme: str
    composition: str
    seed: int
    learning_rate: float
    steps: int
    layers: int
    longest: int

    @property
    def cell(self) -> str:
        """Identifies the runs that share a learning rate."""
        return self.composition

    @property
    def file_name(self) -> str:
        """The file of its result in the folder of runs."""
        return f"{self.task}/{self.scheme}-{self.composition}-seed-{self.seed}-rate-{self.learning_rate:g}.json"


def train(run: Run) -> dict[str, Any]:
    """Trains and tests a model; returns the settings of the run, sizes, seconds and the exact match by length."""
    began = time.perf_counter()
    model, trained = make_model(run), trained_length(run.task, run.longest)
    rng = np.random.default_rng([run.seed, TRAINING])

    def loss_of(step: int) -> Tensor:
        """The mean cross-entropy of answers to a batch of one length."""
        logits, targets = answers(model, make_batch(run.task, rng, BATCH, int(rng.integers(1, trained + 1))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    last_loss = train_steps(model, run.learning_rate, run.steps, loss_of)
    return {
        **asdict(run),
        "trained": trained,
        "parameters": model.num_parameters(),
        "last_loss": last_loss,
        "exact_match": test(model, run.task, trained),
        "seconds": time.perf_counter() - began,
    }


def definition(run: Run) -> dict[str, Any]:
    """What the names of the run stand for, to tell its file from those of other versions of this study."""
    return {"model": MODEL, "scheme": scheme_fields(run), "batch": BATCH, "test_examples": TEST_EXAMPLES}


def make_model(run: Run) -> DCFormerForCausalLM:
    """The model of a run; one that composes heads starts from the weights of the plain one."""
    torch.manual_seed(run.seed)
    plain = DCFormerForCausalLM(config_of(run, composed=False))
    if run.composition == "off":
        return plain
    composed = DCFormerForCausalLM(config_of(run, composed=True))
    if run.composition == "wide":
        wider = matched_width(DCFormerForCausalLM, composed.config, plain.config)
        return DCFormerForCausalLM(config_of(run, composed=False, intermediate_size=wider))
    begin_alike(composed, plain)
    return composed


def config_of(run: Run, *, composed: bool, **fields: Any) -> DCFormerConfig:
    """The configuration of a model, with the implementation that is the fastest on such short sequences."""
    config = DCFormerConfig(
        **{**MODEL, **scheme_fields(run), "num_hidden_layers": run.layers, **fields},
        compose_pre=composed,
        compose_post=composed,
    )
    plain = "eager" if config.has_distance_tables else "sdpa"
    config._attn_implementation = "chunked" if composed else plain
    return config


def scheme_fields(run: Run) -> dict[str, Any]:
    """The fields of a run's position scheme, with the length of the longest training input for Giraffe's truncation."""
    chosen = SCHEMES[run.scheme]
    if chosen.get("rope_parameters", {}).get("rope_type") != "truncated":
        return chosen
    longest = make_batch(run.task, np.random.default_rng(0), 1, trained_length(run.task, run.longest))
    return {"rope_parameters": {**chosen["rope_parameters"], "truncate_length": longest.tokens.shape[1] - 1}}


def answers(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits `[B, A, V]` and targets `[B, A]` of the `A` tokens of the answers, EOS included."""
    tokens = torch.from_numpy(batch.tokens)
    logits = model(tokens[:, :-1], use_cache=False).logits
    return logits[:, batch.answer - 1 :], tokens[:, batch.answer :]


@torch.no_grad()
def test(model: nn.Module, task: str, trained: int) -> list[float]:
    """The share of examples of each tested length, from 1 on, whose answer is right in every token.

    Every token is predicted after the right ones before it. All are right exactly if greedy decoding is.
    """
    model.eval()
    shares = []
    for length in lengths_to_test(trained):
        rng = np.random.default_rng([length, TESTING])
        logits, targets = answers(model, make_batch(task, rng, TEST_EXAMPLES, length))
        shares.append(float((logits.argmax(-1) == targets).all(-1).float().mean()))
    return shares
