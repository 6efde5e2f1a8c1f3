"""Files in YAML: what their values mean to options, and a limit of how many there are."""

import math
import re
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError

TAG = "tag:yaml.org,2002:"
# Kinds of values that YAML 1.1 and 1.2 recognize by different spellings.
REPLACED = ("bool", "int", "float", "timestamp")
NUMBERS = (f"{TAG}int", f"{TAG}float")
# Aliases (`*name`) repeat a part of a file: a few lines can stand for more values than fit into memory.
MOST_VALUES = 100_000


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a mapping of names to values; an empty file is an empty mapping.

    Raises:
        UserError: the file cannot be read, is not YAML, or holds something else.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), YamlLoader)
    except OSError as error:
        raise UserError(f"cannot read the argument file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping of argument names to values, not a {type(content).__name__}")
    return content


class YamlLoader(yaml.SafeLoader):
    """Reads booleans and numbers as YAML 1.2 does, the keys of mappings as strings, and no key twice.

    A number that is the value of an option, or an item of its list, stays text, which the option then reads as it reads
    the command line: `1.10` in `revision: 1.10` is a name. Numbers deeper inside are numbers.

    PyYAML follows YAML 1.1, which takes `on` and `no` for booleans, `0100` for octal, `1:30` for 90, and `1e-3` for
    text. Here they can be the name of an option or its value.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.removeprefix(TAG) not in REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_document(self, node: yaml.Node) -> Any:
        """The content of the file, whose options have their numbers as text.

        Raises:
            YAMLError: see `check_size`.
        """
        check_size(node)
        if isinstance(node, yaml.MappingNode):
            node.value = [(key, number_as_text(value)) for key, value in node.value]
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping whose keys are the text in the file: `1:` is "1" and `true:` is "true".

        Raises:
            ConstructorError: a key occurs twice; one that a merge (`<<`) brings may be overridden.
        """
        if isinstance(node, yaml.MappingNode):
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            names = [key.value for key in keys]
            if twice := [key for place, key in enumerate(keys) if key.value in names[:place]]:
                problem = f"{twice[0].value} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, twice[0].start_mark)
            self.flatten_mapping(node)
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    key.tag = f"{TAG}str"
        return super().construct_mapping(node, deep=deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        """An integer in decimal digits, also with zeros before it."""
        return int(self.construct_scalar(node), 10)


def number_as_text(node: yaml.Node) -> yaml.Node:
    """The node with text in place of a number, or of the numbers in a list; `.inf` and `.nan` stay what they are.

    It is a new node, as an anchor may put the old one elsewhere, too.
    """
    if isinstance(node, yaml.SequenceNode):
        return yaml.SequenceNode(node.tag, list(map(number_as_text, node.value)), node.start_mark, node.end_mark)
    if node.tag in NUMBERS and any(map(str.isdigit, node.value)):
        return yaml.ScalarNode(f"{TAG}str", node.value, node.start_mark, node.end_mark)
    return node


def check_size(node: yaml.Node) -> None:
    """Raises YAMLError if a document stands for more than `MOST_VALUES` values, or for endlessly many."""
    if _count_values(node, {}) > MOST_VALUES:
        raise yaml.YAMLError(f"its aliases (*name) stand for more than {MOST_VALUES:,} values; use fewer of them")


def _count_values(node: yaml.Node, known: dict[int, float]) -> float:
    """The number of values that a node stands for; `known` has those of other nodes by their `id`."""
    if id(node) not in known:
        known[id(node)] = math.inf  # of a node that contains itself
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    return known[id(node)]


FLOAT = r"^[-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
YamlLoader.add_implicit_resolver(f"{TAG}bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
YamlLoader.add_implicit_resolver(f"{TAG}int", re.compile("^[-+]?[0-9]+$"), list("-+0123456789"))
YamlLoader.add_implicit_resolver(f"{TAG}float", re.compile(FLOAT), list("-+.0123456789"))
YamlLoader.add_constructor(f"{TAG}int", YamlLoader.construct_integer)
