"""The one exception type that a user of the command line is meant to see."""


class UserError(Exception):
    """A mistake in what the user gave: the message names the value, the limit and the fix.

    `dynattn` prints it as a single line and exits with status 2; everything else is a bug and keeps its traceback.
    """
