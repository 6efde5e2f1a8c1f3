"""Asking the Hugging Face Hub without waiting for a network that is not there."""

from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from huggingface_hub import constants, get_session

TIMEOUT_SECONDS = 5.0


@contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """Yields whether the Hub answers within `TIMEOUT_SECONDS`; while it does not, look-ups use the local cache only.

    Without this, every look-up retries for about 25 seconds before it gives up.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
        reachable = True
    except Exception:  # the class depends on the HTTP client; with `HF_HUB_OFFLINE` set, it comes without a request
        reachable = False
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not reachable:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield reachable
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
