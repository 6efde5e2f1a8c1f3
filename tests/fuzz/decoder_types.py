"""Every decoder of Transformers with heads composed in place: is it saved, trained, served and divided as it should be?

torchrun --nproc_per_node 2 -m tests.fuzz.decoder_types --record FILE.json [TYPE ...]
"""

import argparse
import copy
import dataclasses
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
from transformers import GenerationConfig
from transformers.distributed import DistributedConfig, mixin
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dynattn import ContextParallel, with_composed_heads
from dynattn.families import FAMILIES
from dynattn.scripts.common.atomic_file import write_json
from dynattn.scripts.common.environment import hardware, provenance, versions

SECONDS = 60  # for one check of one model
VOCABULARY, TOKENS = 97, 32
# Fields of small models; a configuration takes those that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "word_embed_proj_dim": 32,
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_hidden_layers", "decoder_layers", "num_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_global_key_value_heads", "num_experts_per_tok", "max_window_layers"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("attention_dropout", "attn_pdrop"), 0.0),
    "initializer_range": 0.2,
    "rotary_dim": 4,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What some types need besides.
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
SIZES_OF_TYPES: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
}
WINDOWS: tuple[dict[str, Any], ...] = (
    {"sliding_window": 7, "use_sliding_window": True},
    {"sliding_window": None, "use_sliding_window": False},
)

RECORD = {
    "command": "torchrun --nproc_per_node 2 -m tests.fuzz.decoder_types",
    "what": "small random decoders of each model type of Transformers with composed heads: logits before they were "
    "saved and loaded against those after, of plain models that are loaded with composed heads, too; logits of new "
    "tokens of a padded batch with a cache against those of single rows without; gradients with gradient checkpointing "
    "against those without; greedy tokens in continuous batching against those of generate; and logits of two "
    "processes against those of one: where they share sequences, and under tensor parallelism, with heads that mix in "
    "two groups",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Makes all checks and returns 0 if no outputs differ."""
    given = start(__doc__, "types", argv)
    dist.init_process_group("gloo")
    context = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)))
    # A mesh has groups of processes with threads of their own, so one serves all models.
    mesh = mixin.initialize_distributed_mesh(DistributedConfig(tp_size=context.processes))
    mixin.initialize_distributed_mesh = lambda _: mesh
    names = {kind: name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if kind not in FAMILIES}
    rows = {kind: check_type(kind, names[kind], context) for kind in given.types or sorted(names)}
    if dist.get_rank() == 0:
        report(RECORD, "types", rows, given.record)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if any("different" in row.values() for row in rows.values()) else 0


def start(description: str | None, names: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a program that checks many small models, of which `names` may be given, and its settings."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(names, nargs="*")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    return given


def report(record: dict[str, Any], names: str, rows: dict[str, dict[str, str]], path: Path | None) -> None:
    """Prints a record with rows for `names`, how many are equal and where it was made, and writes it to a file."""
    checks = dict.fromkeys(check for row in rows.values() for check in row)
    equal = {check: sum(row[check] == "equal" for row in rows.values()) for check in checks}
    made = {"hardware": hardware(torch.device("cpu")), "versions": versions(), **provenance()}
    record = {**record, "equal": equal, names: rows, **made}
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
    return {check: min(outcomes, key=told_first) for check, outcomes in found.items()}


def told_first(verdict: str) -> int:
    """The order in which outcomes of a check are told, a difference before all others."""
    starts = ("different", "equal", "refused", "not made")
    return next(place for place, start in enumerate(starts) if verdict.startswith(start))


def outcome(check: Callable[[Any, ContextParallel], bool], model: Any, context: ContextParallel) -> str:
    """What a check finds of a model; all processes come to the same result.

    Where a plain model fails a check as well, Transformers is at fault, and the check says nothing of composed heads.
    """
    try:
        if limited(lambda: check(model, context)):
            return "equal"
        of_plain_models = OF_PLAIN_MODELS.get(check)
        if of_plain_models is None or limited(lambda: of_plain_models(plain_model(model), context)):
            return "different"
        return "refused: the plain model fails, too"
    except Exception as error:  # models are refused in many ways
        return f"refused: {first_line(error)}"


def small_model(kind: str, name: str, window: dict[str, Any]) -> Any:
    """A small model of the class `name` whose composition matters, in inference."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config_class: Any = model_class.config_class
    if window["sliding_window"] and not hasattr(config_class().get_text_config(), "sliding_window"):
        raise ValueError("it has no windows")
    sizes = {**SIZES, **SIZES_OF_TYPES.get(kind, {}), **window}
    config = config_class(**fields_of(config_class, sizes))
    if (text := config.get_text_config()) is not config:
        for field, value in fields_of(type(text), sizes).items():
            setattr(text, field, value)
        if isinstance(layers := getattr(text, "layer_types", None), list):
            text.layer_types = layers[: text.num_hidden_layers]
    if hasattr(text, "kv_lora_rank"):  # latent attention has as many keys as queries
        text.num_key_value_heads = text.num_attention_heads
    if text.hidden_size > SIZES["hidden_size"]:
        raise ValueError(f"hidden_size={text.hidden_size} is not small")
    return strengthened(with_composed_heads(model_class, compose_rank=2, dropout=0.0)(config))


def fields_of(config_class: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Those of `sizes` that are fields of a configuration, or other names of them."""
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    return {name: value for name, value in sizes.items() if name in known}


def strengthened(model: Any) -> Any:
    """A model whose composition matters from now on, in inference."""
    for part, weight in model.named_parameters():
        if "composition." in part:
            torch.nn.init.normal_(weight, std=0.1)
    return model.eval()


def plain_model(model: Any) -> Any:
    """A new model without composed heads, in inference."""
    if not hasattr(model, "plain_class"):
        return model
    torch.manual_seed(0)
    return model.plain_class(plain_config(model.config)).eval()


def plain_config(config: Any) -> Any:
    """A copy of a configuration without composed heads."""
    config = copy.deepcopy(config)
    del config.composed_heads
    return config


@torch.no_grad()
def is_loaded(model: Any, _: ContextParallel) -> bool:
    """Whether a model, composed or plain, has its logits after it was saved and loaded, twice."""
    once = saved_and_loaded(model, type(model))
    return all(have_near_logits(again, model) for again in (once, saved_and_loaded(once, type(model))))


@torch.no_grad()
def takes_plain_files(model: Any, _: ContextParallel) -> bool:
    """Whether a plain model keeps its logits when it is saved and loaded with composed heads, which do nothing yet."""
    plain = plain_model(model)
    return have_near_logits(saved_and_loaded(plain, type(model)), plain)


def saved_and_loaded(model: Any, model_class: Any) -> Any:
    """The model of `model_class` in the files of a model, in inference."""
    with tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(model).save_pretrained(folder)  # saving turns the dtype of a configuration into text
        return model_class.from_pretrained(folder).eval()


def generates(model: Any, _: ContextParallel) -> bool:
    """Whether a batch that is padded on the left has, with a cache, the logits of its rows without."""
    return has_logits_of_rows(model) or has_logits_of_rows(in_float64(copy.deepcopy(model)))


def has_logits_of_rows(model: Any) -> bool:
    """What `generates` tells, in the dtype of the model."""
    rows = [row[start:] for row, start in zip(two_rows(), (5, 0), strict=True)]
    padded = torch.stack([torch.nn.functional.pad(row, (TOKENS - len(row), 0)) for row in rows])
    batch = logits_of_new_tokens(model, padded, attention_mask=(padded > 0).long())
    alone = torch.cat([logits_of_new_tokens(model, row[None], use_cache=False) for row in rows], dim=1)
    return are_near(batch, alone)


def logits_of_new_tokens(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits `[6, B, V]` of six tokens that follow `ids` `[B, T]` greedily."""
    greedy = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    output = model.generate(ids, greedy, output_logits=True, return_dict_in_generate=True, **options)
    return torch.stack(output.logits)


def is_checkpointed(model: Any, _: ContextParallel) -> bool:
    """Whether gradients with gradient checkpointing are those without."""
    expected, found = gradients(model), None
    model.gradient_checkpointing_enable()
    try:
        found = gradients(model)
    finally:
        model.gradient_checkpointing_disable()
    return found.keys() == expected.keys() and all(are_near(found[name], expected[name]) for name in expected)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients in training of all weights that have one; the same dropout in each call."""
    torch.manual_seed(0)
    model.train()
    model.zero_grad()
    model(input_ids=two_rows(), labels=two_rows(), use_cache=False).loss.backward()
    model.eval()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


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
    if not has_equal_parts(model.plain_class, plain_config(config), context):
        raise ValueError("Transformers does not split the plain model well, either")
    return False


@torch.no_grad()
def has_equal_parts(model_class: Any, config: Any, context: ContextParallel) -> bool:
    """Whether the parts of a new model have its logits, at least in float64."""
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        whole = strengthened(model_class(copy.deepcopy(config))).to(dtype)
        with shared_folder(context) as folder:
            if context.process == 0:
                whole.save_pretrained(folder)
            dist.barrier()
            processes = DistributedConfig(tp_size=context.processes)
            parts = model_class.from_pretrained(folder, distributed_config=processes, dtype=dtype).eval()
        if dtype == torch.float64:
            whole, parts = in_float64(whole), in_float64(parts)
        if have_near_logits(parts, whole):
            return True
    return False


def in_float64(model: Any) -> Any:
    """The same model in float64, in which rounding is no reason for a difference: strong compositions amplify it."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the default has no float64
    return model.double()


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


def have_near_logits(one: Any, other: Any) -> bool:
    """Whether two models have the same logits but for rounding."""
    return are_near(*(model(input_ids=two_rows(), use_cache=False).logits for model in (one, other)))


def are_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits `[B, T, V]` are the same but for rounding."""
    return float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


CHECKS = {
    "files": is_loaded,
    "files of the plain model": takes_plain_files,
    "generation": generates,
    "gradient checkpointing": is_checkpointed,
    "continuous batching": is_served,
    "shared sequences": is_shared,
    "tensor parallelism": is_split,
}
# What a plain model has to do where a check finds a difference; if it cannot, composed heads are not at fault.
OF_PLAIN_MODELS = {
    is_loaded: is_loaded,
    takes_plain_files: is_loaded,
    generates: generates,
    is_checkpointed: is_checkpointed,
}


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
