"""Names of tests from the cases that they run on."""

from dataclasses import MISSING, fields


class Described:
    """A base of dataclasses: `str` shows the fields without a default, and those that differ from theirs.

    Sets are shown in order, so that all processes, each with hashes of its own, call a test by the same name.
    """

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        defaults = {field.name: field.default for field in fields(self)}
        shown = [_shown(value) for name, value in values.items() if defaults[name] is MISSING]
        changed = {name: value for name, value in values.items() if defaults[name] not in (MISSING, value)}
        return " ".join([*shown, *(f"{name}={_shown(value)}" for name, value in changed.items())])


def _shown(value: object) -> str:
    """A value without spaces; collections as their members between commas, or the word "none" for an empty one."""
    members = sorted(value) if isinstance(value, frozenset) else value
    return (",".join(map(_shown, members)) or "none") if isinstance(members, list | tuple) else str(value)
