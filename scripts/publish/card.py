"""The model card of a published folder: the checkpoint's own, completed, or one rendered from its configuration."""

import dataclasses
import html
import json
import reprlib
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers import PreTrainedConfig

from dynattn.remote_code import owner_of

from ..common.checkpoint_files import require_inside
from ..common.errors import UserError, last_line
from ..common.folder_names import may_be_on_the_hub
from ..common.markdown import table
from ..common.yaml_files import check_size
from .arguments import PublishArguments
from .checkpoint import TASKS, Checkpoint
from .evaluation_metadata import merge_evaluation, read_evaluation
from .sentence_modules import LIBRARY

# Authors, year and title of the papers of all families, by the number on arXiv.
PAPERS = {
    "2405.08553": ("Da Xiao and Qingye Meng and Shengping Li and Xingyuan Yuan", 2024,
                   "Improving Transformers with Dynamically Composable Multi-Head Attention"),
    "2308.03429": ("Herman Sugiharto and Aradea and Husni Mubarok", 2023,
                   "RCMHA: Relative Convolutional Multi-Head Attention for Natural Language Modelling"),
}  # fmt: skip

# What stands for the name of the model in the code of a card that was written before the model had one.
PLACEHOLDER = '"PATH_OR_NAME"'

RENDERED = """\
---
{{}}
---
# {name}

{summary}

The model has {parameters} parameters. This card was written by `dynattn publish` from the checkpoint alone: it does
not know the training data.

{usage}
## Architecture

{architecture}

## Limits

{limits}

## Citation

{citation}
"""

# The section on limits, by the main input of the model.
LIMITS = {
    "input_ids": """\
- Positions beyond `max_position_embeddings` were not seen in training.
- The text it was trained on decides what it can do; it may produce text that is wrong, biased or offensive.
- The cache of a model that generates must be a `DynamicCache` or a `StaticCache` of Transformers.""",
    "pixel_values": """\
- Images must be scaled as in training, as the image processor does.
- The images it was trained on decide what it can do; its answers may be wrong or biased.""",
}

COMPOSED = """\
This is a `{plain}` of Transformers with composed heads. Transformers alone drops their weights with a warning.

"""

USAGE = """\
## How to load

{kind}With the `{package}` package installed, its own code is used:

```python
import {package}  # makes the model known to Transformers
from {library} import {imports}

{load}
```

Without the package, Transformers can run the code files of this repository. It never does so by default: say so, after
you have read them, and pin the `revision` that you read when you load from the Hub.

```python
from {library} import {imports}

{load_remote}
```
"""


def make_card(checkpoint: Checkpoint, arguments: PublishArguments) -> str:
    """Returns the text of README.md.

    If the checkpoint has one, that is kept, and metadata or instructions for loading are added if missing. The title of
    a rendered card, and what users pass to `from_pretrained`, is the repository or, without one, the folder's name.

    Raises:
        UserError: the checkpoint's README.md is not a valid model card, or the results are of another model.
    """
    repo = arguments.repo
    name, readme = repo or checkpoint.folder.name, checkpoint.folder / "README.md"
    card = _read_card(readme) if readme.is_file() else ModelCard(_render(checkpoint, name))
    data: Any = card.data  # whose fields are not declared
    _complete_metadata(data, checkpoint, arguments.license)
    if arguments.evaluation is not None:
        scores = read_evaluation(Path(arguments.evaluation), checkpoint)
        data.model_name = data.model_name or name.rpartition("/")[2]
        data.eval_results = merge_evaluation(data.eval_results or [], scores, data.model_name)
    if repo is not None:
        card.text = card.text.replace(PLACEHOLDER, _quote(repo))
    if f"import {owner_of(type(checkpoint.config))}" not in card.text or "trust_remote_code=True" not in card.text:
        card.text = f"{card.text.rstrip()}\n\n{_usage(checkpoint, name)}"
    return str(card)


def _read_card(path: Path) -> ModelCard:
    require_inside(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        if (block := REGEX_YAML_BLOCK.search(text)) is not None:
            check_size(yaml.compose(block[2]) or yaml.ScalarNode("", ""))
        card = ModelCard(text if text.lstrip().startswith("---") else f"---\n{{}}\n---\n{text}")
    except (ValueError, TypeError, AttributeError, OSError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} is no model card that the Hub accepts: {last_line(error)}") from error
    _check_metadata(card.data, path)
    return card


def _check_metadata(data: Any, path: Path) -> None:
    """Raises UserError if a field has a type that the Hub, or `_complete_metadata`, cannot use."""
    for name in ("license", "pipeline_tag"):
        if not isinstance(data.get(name), str | None):
            raise UserError(f"{name} in {path} is {reprlib.repr(data.get(name))}; it must be text")
    parents = [data.base_model] if isinstance(data.base_model, str) else data.base_model or []
    if not (isinstance(parents, list) and all(isinstance(name, str) and may_be_on_the_hub(name) for name in parents)):
        given = reprlib.repr(data.base_model)
        raise UserError(f"base_model in {path} is {given}; give names on the Hub, or leave it out")
    tags = data.tags or []
    if not isinstance(tags, str) and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise UserError(f"tags in {path} are {reprlib.repr(tags)}; they must be a list of texts")


def _complete_metadata(data: Any, checkpoint: Checkpoint, license_name: str | None) -> None:
    data.library_name = "transformers" if checkpoint.sentence_class is None else "sentence-transformers"
    features = {"input_ids": "feature-extraction", "pixel_values": "image-feature-extraction"}
    data.pipeline_tag = data.pipeline_tag or TASKS.get(checkpoint.auto_class, features[checkpoint.reads])
    data.license = license_name or data.license
    tags = [data.tags] if isinstance(data.tags, str) else list(data.tags or [])
    wanted = ["dynattn", checkpoint.config.model_type, "custom_code", f"arxiv:{checkpoint.paper}"]
    data.tags = tags + [tag for tag in wanted if tag not in tags]


def _render(checkpoint: Checkpoint, name: str) -> str:
    described: Any = checkpoint.model_class
    if checkpoint.plain_class is None:
        described = sys.modules[described.__module__]
    docstring = described.__doc__ or checkpoint.config.model_type
    return RENDERED.format(
        name=name,
        summary=docstring.strip().splitlines()[0],
        parameters=", ".join(f"{count:,} {kind}" for kind, count in checkpoint.elements.most_common()),
        usage=_usage(checkpoint, name),
        architecture=table(["field", "value"], _architecture(checkpoint.config)),
        limits=LIMITS[checkpoint.reads],
        citation=_bibtex(checkpoint.paper),
    )


def _architecture(config: PreTrainedConfig) -> list[tuple[str, str]]:
    """The fields of the configuration that not every Transformers model has, and their values unless None.

    Values are escaped, because pages on the Hub would obey HTML in them.
    """
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names = [*(field.name for field in dataclasses.fields(config) if field.name not in common), "composed_heads"]
    values = {name: getattr(config, name, None) for name in names}
    shown = {
        name: _format_value(value)
        for name, value in values.items()
        if value is not None and not isinstance(value, PreTrainedConfig)  # such as that of a part for pictures
    }
    return [(f"`{name}`", html.escape(value, quote=False)) for name, value in shown.items()]


def _format_value(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return ", ".join(f"{count} x {item}" for item, count in Counter(value).items())
    return json.dumps(value, default=str)


def _bibtex(paper: str) -> str:
    authors, year, title = PAPERS[paper]
    key = f"{authors.split()[1].lower()}{year}"
    fields = {"title": title, "author": authors, "year": year, "eprint": paper, "archivePrefix": "arXiv"}
    lines = ",\n".join(f"  {field} = {{{value}}}" for field, value in fields.items())
    return f"```bibtex\n@misc{{{key},\n{lines}\n}}\n```"


def _usage(checkpoint: Checkpoint, name: str) -> str:
    plain, sentence_class = checkpoint.plain_class, checkpoint.sentence_class
    kind = "" if plain is None else COMPOSED.format(plain=plain.__name__)
    library = "transformers" if sentence_class is None else LIBRARY
    main, others = sentence_class or checkpoint.auto_class, _other_classes(checkpoint)
    call = main if sentence_class is not None else f"{main}.from_pretrained"
    load = partial(_load, name=name, others=others)
    texts = {"library": library, "package": owner_of(type(checkpoint.config)), "imports": ", ".join([main, *others])}
    texts |= {"load": load(call), "load_remote": load(call, options=", trust_remote_code=True")}
    return USAGE.format(**texts, kind=kind)


def _other_classes(checkpoint: Checkpoint) -> list[str]:
    """The Auto classes of what is loaded beside the model; Sentence Transformers loads all at once.

    A processor of texts and pictures holds the tokenizer.
    """
    if checkpoint.sentence_class is not None:
        return []
    if "processor_config.json" in checkpoint.files_to_copy:
        return ["AutoProcessor"]
    processors = ["AutoImageProcessor"] if "preprocessor_config.json" in checkpoint.files_to_copy else []
    return [*(["AutoTokenizer"] if checkpoint.tokenizer else []), *processors]


def _load(call: str, name: str, others: list[str], options: str = "") -> str:
    """The lines of code that load the model `name` by `call`, and what belongs to it by the classes `others`."""
    variables = {"AutoTokenizer": "tokenizer", "AutoImageProcessor": "processor", "AutoProcessor": "processor"}
    calls = {"model": call, **{variables[cls]: f"{cls}.from_pretrained" for cls in others}}
    return "\n".join(f"{variable} = {call}({_quote(name)}{options})" for variable, call in calls.items())


def _quote(name: str) -> str:
    """`name` as a string of Python, which a JSON string is as well."""
    return json.dumps(name, ensure_ascii=False)
