"""Defects that fuzzing has found and nobody has mended yet; whoever mends one deletes its entry."""

from .harness import Known

KNOWN: list[Known] = []
