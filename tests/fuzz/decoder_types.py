"""Every decoder of Transformers with heads composed in place: can engines serve it, processes share its work?

torchrun --nproc_per_node 2 -m tests.fuzz.decoder_types --record FILE.json [TYPE ...]
"""

import argparse
import copy
import json
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, GenerationConfig
from transformers.distributed import DistributedConfig, mixin
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dynattn import ContextParallel, with_composed_heads
from dynattn.families import FAMILIES
from dynattn.scripts.common.atomic_file import write_json
from dynattn.scripts.common.environment import hardware, provenance, versions

SECONDS = 60  # for one check of one model
VOCABULARY, TOKENS = 97, 32
# Fields of small models; a configuration takes those that it knows, and keeps others as attributes.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "word_embed_proj_dim": 32,
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_global_key_value_heads", "num_experts_per_tok", "max_window_layers"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("attention_dropout", "attn_pdrop"), 0.0),
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS: tuple[dict[str, Any], ...] = (
    {"sliding_window": 7, "use_sliding_window": True},
    {"sliding_window": None, "use_sliding_window": False},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes all checks and returns 0 if no outputs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    dist.init_process_group("gloo")
    context = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)))
    # A mesh has groups of processes with threads of their own, so one serves all models.
    mesh = mixin.initialize_distributed_mesh(DistributedConfig(tp_size=context.processes))
    mixin.initialize_distributed_mesh = lambda _: mesh
    names = {kind: name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if kind not in FAMILIES}
    rows = {kind: check_type(kind, names[kind], context) for kind in given.types or sorted(names)}
    if dist.get_rank() == 0:
        report(rows, given.record)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if any("different" in row.values() for row in rows.values()) else 0


def report(rows: dict[str, dict[str, str]], path: Path | None) -> None:
    """Prints the rows with their counts, and writes them to a file."""
    equal = {check: sum(row[check] == "equal" for row in rows.values()) for check in CHECKS}
    record = {
        "command": "torchrun --nproc_per_node 2 -m tests.fuzz.decoder_types",
        "what": "small random decoders of each model type of Transformers with composed heads: greedy tokens in "
        "continuous batching against those of generate, and logits of two processes against those of one: where they "
        "share sequences, and under tensor parallelism, with heads that mix in two groups",
        "equal": equal,
        "types": rows,
        "hardware": hardware(torch.device("cpu")),
        "versions": versions(),
        **provenance(),
    }
    print(json.dumps(record, indent=1))
    if path is not None:
        write_json(path, record, indent=1)


def check_type(kind: str, names: str | tuple[str, ...], context: ContextParallel) -> dict[str, str]:
    """The outcome of each check for a model type: `equal`, `different`, or why there is none.

    It is tried with windows and without; a type is equal if it is wherever it runs.
    """
    print(kind, file=sys.stderr, flush=True)
    name = names if isinstance(names, str) else names[0]
    found: dict[str, list[str]] = {check: [] for check in CHECKS}
    for window in WINDOWS:
        try:
            model = limited(lambda window=window: small_model(kind, name, window))
        except Exception as error:  # most are of classes that do not know the sizes, or whose parts are not installed
            for outcomes in found.values():
                outcomes.append(f"not made: {first_line(error)}")
            continue
        for check, run in CHECKS.items():
            found[check].append(outcome(run, model, context))
    verdicts = ("different", "equal")
    return {check: next((one for one in verdicts if one in tried), tried[-1]) for check, tried in found.items()}


def outcome(check: Callable[[Any, ContextParallel], bool], model: Any, context: ContextParallel) -> str:
    """What a check finds of a model; all processes come to the same result."""
    try:
        return "equal" if limited(lambda: check(model, context)) else "different"
    except Exception as error:  # models are refused in many ways
        return f"refused: {first_line(error)}"


def small_model(kind: str, name: str, window: dict[str, Any]) -> Any:
    """A small model of the class `name` whose composition matters, in inference."""
    torch.manual_seed(0)
    sizes = {**SIZES, **window}
    if window["sliding_window"] and not hasattr(CONFIG_MAPPING[kind]().get_text_config(), "sliding_window"):
        raise ValueError("it has no windows")
    config: Any = CONFIG_MAPPING[kind](**sizes)
    if (text := config.get_text_config()) is not config:
        for field, value in sizes.items():
            if hasattr(text, field):
                setattr(text, field, value)
    if text.hidden_size > SIZES["hidden_size"]:
        raise ValueError(f"hidden_size={text.hidden_size} is not small")
    return strengthened(with_composed_heads(getattr(transformers, name), compose_rank=2, dropout=0.0)(config))


def strengthened(model: Any) -> Any:
    """A model whose composition matters from now on, in inference."""
    for part, weight in model.named_parameters():
        if "composition." in part:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


def is_served(model: Any, _: ContextParallel) -> bool:
    """Whether continuous batching gives the greedy tokens of `generate`."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (5, 20, 3, 30, 11, 1)]
    greedy = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = model.generate_batch(
        prompts, greedy, ContinuousBatchingConfig(page_size=8, num_blocks=40, max_batch_tokens=24)
    )
    found = {tuple(answer.prompt_ids): answer.generated_tokens for answer in answers.values()}
    alone = [model.generate(torch.tensor([prompt]), greedy)[0, len(prompt) :].tolist() for prompt in prompts]
    return [found.get(tuple(prompt)) for prompt in prompts] == alone


@torch.no_grad()
def is_shared(model: Any, context: ContextParallel) -> bool:
    """Whether the parts of all processes have the logits of whole sequences."""
    ids = two_rows()
    expected = model(input_ids=ids, use_cache=False).logits
    found = context.gather(model(**context.part(model, input_ids=ids)).logits)
    return are_near(found, expected)


def is_split(model: Any, context: ContextParallel) -> bool:
    """Whether processes that each have a part of a model with two groups of heads have the logits of the whole one."""
    config = copy.deepcopy(model.config)
    config.composed_heads = {**config.composed_heads, "compose_groups": 2}
    if has_equal_parts(type(model), config, context):
        return True
    plain = copy.deepcopy(config)
    del plain.composed_heads
    if not has_equal_parts(model.plain_class, plain, context):
        raise ValueError("Transformers does not split the plain model well, either")
    return False


@torch.no_grad()
def has_equal_parts(model_class: Any, config: Any, context: ContextParallel) -> bool:
    """Whether the parts of a new model have its logits, at least in float64: strong compositions amplify rounding."""
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        whole = strengthened(model_class(copy.deepcopy(config))).to(dtype)
        with shared_folder(context) as folder:
            if context.process == 0:
                whole.save_pretrained(folder)
            dist.barrier()
            processes = DistributedConfig(tp_size=context.processes)
            parts = model_class.from_pretrained(folder, distributed_config=processes, dtype=dtype).eval()
        for one in (whole, parts):
            if dtype == torch.float64 and one._can_set_experts_implementation():
                one.set_experts_implementation("eager")  # the default has no float64
        if are_near(*(one(input_ids=two_rows(), use_cache=False).logits for one in (parts, whole))):
            return True
    return False


@contextmanager
def shared_folder(context: ContextParallel) -> Iterator[str]:
    """A folder that the first process makes for all, and removes when all have read it."""
    folders: list[Any] = [tempfile.mkdtemp() if context.process == 0 else None]
    dist.broadcast_object_list(folders)
    yield folders[0]
    dist.barrier()
    if context.process == 0:
        shutil.rmtree(folders[0])


def two_rows() -> torch.Tensor:
    """Random tokens `[2, TOKENS]`."""
    return torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def are_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits `[B, T, V]` are the same but for rounding."""
    return float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


CHECKS = {"continuous batching": is_served, "shared sequences": is_shared, "tensor parallelism": is_split}


def limited(work: Callable[[], Any]) -> Any:
    """The result of `work`, which is interrupted after a while."""
    signal.alarm(SECONDS)
    try:
        return work()
    finally:
        signal.alarm(0)


def too_long(*_: Any) -> None:
    """Interrupts what `limited` runs."""
    raise TimeoutError(f"it took more than {SECONDS} seconds")


def first_line(error: Exception) -> str:
    """The kind and the first line of an error, short enough for a record."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


if __name__ == "__main__":
    sys.exit(main())
