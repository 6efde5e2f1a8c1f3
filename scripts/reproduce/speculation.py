"""Compares speculative decoding (draft models, prompt lookup) with greedy decoding: tokens, time, forward passes.

Run: `dynattn reproduce speculation --run FOLDER --drafts FOLDER ... --output FOLDER [--option value]`, with runs of
`dynattn pretrain` that share a tokenizer. Prompts are held-out tokens of the first run.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.arguments import option, parse_arguments
from ..common.errors import UserError
from ..common.number_ranges import check_positive

if TYPE_CHECKING:  # --help waits for none of these
    from torch import Tensor
    from transformers import PreTrainedModel

PLAIN = "greedy"


@dataclass
class SpeculationArguments:
    """Arguments of the study; a YAML file holds the same names."""

    run: str = field(metadata={"help": "folder of a finished run of dynattn pretrain, whose model is decoded"})
    drafts: list[str] = field(metadata={"help": "folders of runs of smaller models, with the same tokenizer"})
    output: str = field(metadata={"help": "folder to write record.json and table.md into"})
    prompts: int = option(4, "prompts to continue")
    prompt_length: int = option(64, "tokens of each prompt")
    tokens: int = option(64, "tokens to generate after each")
    lookup: int = option(4, "tokens that prompt lookup proposes at once")
    rounds: int = option(3, "interleaved rounds of timing")

    def __post_init__(self) -> None:
        check_positive(self, ("prompts", "prompt_length", "tokens", "lookup", "rounds"))


def main(argv: Sequence[str]) -> int:
    """Decodes in every way, and writes and prints the table.

    Raises:
        UserError: a run is not finished, holds out too few tokens or reads shorter texts, a draft does not fit it, or a
            way generates other tokens than greedy decoding.
    """
    arguments = parse_arguments(SpeculationArguments, argv, prog="dynattn reproduce speculation", description=__doc__)
    from .study_files import check_readable, claim_folder, describe_run, held_out_windows, write_study

    longest = arguments.prompt_length + arguments.tokens
    said = f"prompt_length={arguments.prompt_length} and tokens={arguments.tokens}"
    for run in (arguments.run, *arguments.drafts):
        check_readable(run, longest, said)
    prompts = held_out_windows(arguments.run, arguments.prompt_length)[: arguments.prompts]
    if len(prompts) < arguments.prompts:
        raise UserError(
            f"prompts={arguments.prompts}, but {arguments.run} holds out {len(prompts)} windows of "
            f"{arguments.prompt_length} tokens; lower one of them"
        )
    settings = {name: value for name, value in asdict(arguments).items() if name != "output"}
    described = {"run": describe_run(arguments.run), "drafts": [describe_run(draft) for draft in arguments.drafts]}
    settings |= described | {"study": "speculation"}
    model, tokens_of = load(arguments.run)
    ways = make_ways(arguments, tokens_of)
    folder = claim_folder(arguments.output, settings)
    rows = compare_ways(model, prompts, ways, arguments.tokens, arguments.rounds)
    print(write_study(folder, settings, rows))
    return 0


def load(run: str) -> tuple["PreTrainedModel", str]:
    """The final model of a run, which generates as many tokens as it is asked for, and a digest of its tokenizer."""
    from ..common.checkpoint_loading import load_checkpoint
    from ..pretrain.data.tokenizer import fingerprint

    model, tokenizer = load_checkpoint(str(Path(run) / "model"), device="cpu")
    generation: Any = model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, 0
    return model, fingerprint(tokenizer)


def make_ways(arguments: SpeculationArguments, tokens_of: str) -> dict[str, dict[str, Any]]:
    """By name, what `generate` is given.

    Args:
        tokens_of: the digest of the tokenizer that drafts must have.

    Raises:
        UserError: a draft has another tokenizer, or the name and the size of another draft.
    """
    from ..common.composition_observation import count_layers

    ways: dict[str, dict[str, Any]] = {PLAIN: {}}
    for draft in arguments.drafts:
        model, found = load(draft)
        if found != tokens_of:
            raise UserError(
                f"{draft} has another tokenizer than {arguments.run}; give a draft that reads the same tokens"
            )
        kind = "composed" if count_layers(model) else "plain"
        name = f"{kind} draft {Path(draft).resolve().name}, {model.num_parameters():,} parameters"
        if name in ways:
            raise UserError(f"two drafts are a {name}; rename the folder of one, or leave it out")
        ways[name] = {"assistant_model": model}
    ways[f"prompt lookup, {arguments.lookup} tokens"] = {"prompt_lookup_num_tokens": arguments.lookup}
    return ways


def compare_ways(
    model: "PreTrainedModel", prompts: "Tensor", ways: dict[str, dict[str, Any]], tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """One row for each way: passes of the model per token, and the least processor time, over all `prompts` `[N, T]`.

    Raises:
        UserError: a way generates other tokens than the first.
    """
    import torch

    from ..common.measuring import interleave

    calls = {name: partial(decode, model, prompts, tokens, options) for name, options in ways.items()}
    passes, generated = {}, {}
    for name, call in calls.items():
        generated[name], passes[name] = count_passes(model, call)
    if different := [name for name, found in generated.items() if not torch.equal(found, generated[PLAIN])]:
        raise UserError(f"other tokens than by greedy decoding: {', '.join(different)}")
    times = interleave({name: partial(processor_seconds, call) for name, call in calls.items()}, rounds)
    fastest = min(times[PLAIN])
    return [
        {
            "decoding": name,
            "passes_per_token": round(passes[name] / (tokens * len(prompts)), 3),
            "processor_seconds": round(min(times[name]), 3),
            "speed_up": round(fastest / min(times[name]), 2),
        }
        for name in ways
    ]


def processor_seconds(call: Callable[[], Any]) -> float:
    """The time that the process computes in `call`, which other processes on the machine hardly change."""
    start = time.process_time()
    call()
    return time.process_time() - start


def decode(model: "PreTrainedModel", prompts: "Tensor", tokens: int, options: dict[str, Any]) -> "Tensor":
    """Continues `prompts` `[N, T]` one by one, as speculation must; returns `[N, tokens]`."""
    import torch

    greedy = {"max_new_tokens": tokens, "do_sample": False}
    length = prompts.shape[1]
    generate: Any = model.generate
    rows = [generate(row, attention_mask=torch.ones_like(row), **greedy, **options) for row in prompts.split(1)]
    return torch.cat(rows)[:, length:]


def count_passes(model: "PreTrainedModel", call: Callable[[], "Tensor"]) -> tuple["Tensor", int]:
    """What `call` returns, and how often the model runs in it."""
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    hook = model.register_forward_hook(count)
    found = call()
    hook.remove()
    return found, passes
