"""The one exception type that a user of the command line is meant to see."""


class UserError(Exception):
    """A mistake in what the user gave: the message names the value, the limit and the fix.

    `dynattn` prints it as a single line and exits with status 2; everything else is a bug and keeps its traceback.
    """


def first_line(error: BaseException | str) -> str:
    """The first line of what an error says, where details follow."""
    return _lines(error)[0]


def last_line(error: BaseException | str) -> str:
    """The last line of what an error says, where the cause comes last."""
    return _lines(error)[-1]


def _lines(error: BaseException | str) -> list[str]:
    lines = [line.strip().rstrip(" .:") for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]
