"""The two names of a model's cache: `past_key_values` in Transformers before 5.24, and `cache` from then on.

The code of this package says `past_key_values`. What it passes to Transformers, and what models return, has the name of
the installed version; models and layers take both.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, cast

from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

Forward = TypeVar("Forward", bound=Callable[..., Any])
OLD_NAME, NEW_NAME = "past_key_values", "cache"
CACHE_NAME = NEW_NAME if NEW_NAME in {field.name for field in fields(BaseModelOutputWithPast)} else OLD_NAME


def named_cache(cache: Any) -> dict[str, Any]:
    """Keyword arguments with which a function or an output of Transformers gets a cache."""
    return {CACHE_NAME: cache}


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache in the output of a model, or among arguments of Transformers; None if there is none."""
    return arguments.get(CACHE_NAME)


def layers_write_paged_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether a layer with these arguments has to write into the cache of Transformers' continuous batching.

    Before 5.24 the attention functions of Transformers do that.
    """
    return CACHE_NAME == NEW_NAME and arguments.get(NEW_NAME) is not None


def takes_either_name(forward: Forward) -> Forward:
    """A method with the argument `past_key_values` that takes it as `cache`, too.

    `cache` may also be the paged cache of a serving engine, which is no `Cache` and is left alone.

    Raises:
        ValueError: both are given.
    """

    @wraps(forward)
    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get(NEW_NAME), Cache | list | tuple):
            if kwargs.get(OLD_NAME) is not None:
                raise ValueError(f"{NEW_NAME} and {OLD_NAME} are two names of the same argument; give one of them")
            kwargs[OLD_NAME] = kwargs.pop(NEW_NAME)
        elif NEW_NAME in kwargs and kwargs[NEW_NAME] is None:
            del kwargs[NEW_NAME]
        return forward(self, *args, **kwargs)

    return cast(Forward, renamed)
