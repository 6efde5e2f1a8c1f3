"""The model card of a final checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import CONFIG_MAPPING

from dynattn.remote_code import owner_of

from ..common import markdown
from ..common.folder_names import may_be_on_the_hub
from .arguments import PretrainArguments
from .data.documents import is_hub_name
from .options.optimization import OptimizationOptions
from .results import Result

# Arguments that every card has; others of the optimization are named where they differ from their defaults.
LISTED_ARGUMENTS = (
    "objective",
    "packing",
    "sequence_length",
    "mask_documents",
    "carry_memory",
    "batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "composition_learning_rate",
    "freeze_parent_steps",
    "min_learning_rate_ratio",
    "weight_decay",
    "max_grad_norm",
    "mixed_precision",
    "seed",
)

BODY = """
# {name}

A `{model_type}` {kind}{heads} that `dynattn pretrain` made from {origin}.

## Use

```python
{use}
```

{ability}, as well as its size and data allow.
It was not tuned to follow instructions, and it repeats whatever errors and biases its training text has.

## Measured

On the held-out part of the data, after the last update:

{measured}

## Training

{training}

## Settings

{settings}

## Software

{versions}
"""

USE_CAUSAL = """import {package}  # makes the model known to Transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH_OR_NAME")
model = AutoModelForCausalLM.from_pretrained("PATH_OR_NAME")
inputs = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))"""
USE_MASKED = """import {package}  # makes the model known to Transformers
from transformers import pipeline

fill = pipeline("fill-mask", model="PATH_OR_NAME")
print(fill(f"The {{fill.tokenizer.mask_token}} statement"))"""


@dataclass(frozen=True)
class Wording:
    """The words of a card that depend on the objective of the run."""

    kind: str
    pipeline: str
    use: str
    ability: str


WORDINGS = {
    "causal_lm": Wording("language model", "text-generation", USE_CAUSAL, "It continues text"),
    "masked_lm": Wording("encoder", "fill-mask", USE_MASKED, "It says which tokens are hidden in a text"),
}


def write_card(
    folder: Path, arguments: PretrainArguments, result: Result, model_type: str, *, composed_in_place: bool = False
) -> None:
    """Writes `README.md` with Hub metadata, the data, the settings and what was measured.

    Args:
        composed_in_place: whether it is a model of Transformers with composed heads.
    """
    words = asdict(WORDINGS[result.objective])
    words["use"] = words["use"].format(package=owner_of(CONFIG_MAPPING[model_type]))
    text = BODY.format(
        **words,
        name=result.output.resolve().name,
        model_type=model_type,
        heads=" with composed heads" if composed_in_place else "",
        origin=origin(arguments.init_from),
        measured=table(loss_rows(result)),
        training=table(training_rows(result)),
        settings=table(settings_of(arguments)),
        versions=table(result.versions),
    )
    data = metadata(arguments, result, model_type)
    ModelCard(f"---\n{data.to_yaml()}\n---\n{text}").save(folder / "README.md")


def settings_of(arguments: PretrainArguments) -> dict[str, Any]:
    """The arguments that a card names, with their values."""
    changed = [one.name for one in fields(OptimizationOptions) if getattr(arguments, one.name) != one.default]
    return {name: getattr(arguments, name) for name in dict.fromkeys((*LISTED_ARGUMENTS, *changed))}


def origin(init_from: str | None) -> str:
    """What the weights were before training. Of a folder only the name is told, as cards are published."""
    if init_from is None:
        return "fresh weights"
    return f"the weights of `{init_from if _is_on_the_hub(init_from) else Path(init_from).resolve().name}`"


def _is_on_the_hub(init_from: str) -> bool:
    """Whether `init_from` names a model on the Hub. A folder that was deleted since may look like one: `runs/model`."""
    return may_be_on_the_hub(init_from) and not Path(init_from).exists()


def metadata(arguments: PretrainArguments, result: Result, model_type: str) -> ModelCardData:
    """What the Hub reads at the head of the card."""
    parent = arguments.init_from
    return ModelCardData(
        datasets=[source.dataset for source in arguments.sources.values() if is_hub_name(source.dataset)] or None,
        base_model=parent if parent is not None and _is_on_the_hub(parent) else None,
        library_name="transformers",
        pipeline_tag=WORDINGS[result.objective].pipeline,
        tags=["dynattn", model_type],
        model_name=result.output.resolve().name,
        eval_results=_evaluations(result),
    )


def loss_rows(result: Result) -> dict[str, str]:
    """What was measured on held-out and on training text."""
    rows = {
        f"validation loss ({result.loss_unit})": f"{result.validation_loss:.4f}",
        "validation perplexity": f"{result.perplexity:.3f}",
    }
    if result.train_loss is not None:
        rows[f"training loss ({result.loss_unit})"] = f"{result.train_loss:.4f}"
    if result.bits_per_byte is not None:
        rows["validation bits per byte"] = f"{result.bits_per_byte:.4f}"
    return rows


def training_rows(result: Result) -> dict[str, Any]:
    """The data, the sizes and the speed of the run."""
    speed = result.tokens_per_second
    return {
        "data": result.dataset,
        "updates": f"{result.steps:,}",
        "tokens": f"{result.tokens:,}",
        "parameters": f"{result.parameters:,}",
        "parameters without embeddings": f"{result.non_embedding_parameters:,}",
        "hardware": result.hardware,
        "processes": result.processes,
        "tokens per second (median)": "not measured" if speed is None else f"{speed:,.0f}",
        "model FLOPs utilization": utilization(result),
        "seconds of training": f"{result.train_seconds:,.0f}",
    }


def utilization(result: Result) -> str:
    """MFU: the model's FLOP/s as a share of those of matrix products on the same hardware."""
    if result.tokens_per_second is None:
        return "not measured"
    if result.mfu is None or result.gemm_flops_per_second is None:
        return "not known for this architecture"
    return f"{result.mfu:.1%} of {result.gemm_flops_per_second / 1e9:,.1f} GFLOP/s measured on matrix products"


def table(rows: Mapping[str, Any]) -> str:
    """A two-column Markdown table."""
    return markdown.table(["", ""], [[name, str(value)] for name, value in rows.items()])


def _evaluations(result: Result) -> list[EvalResult]:
    metrics = {"loss": result.validation_loss, "perplexity": result.perplexity, "bits_per_byte": result.bits_per_byte}
    return [
        EvalResult(
            task_type=WORDINGS[result.objective].pipeline,
            dataset_type=result.dataset,
            dataset_name=f"{result.dataset} (held-out part)",
            metric_type=name,
            metric_value=round(value, 6),
        )
        for name, value in metrics.items()
        if value is not None
    ]
