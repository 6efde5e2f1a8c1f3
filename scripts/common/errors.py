"""The exceptions that the command line reports to its user without a traceback."""

import pickle
import signal

TIME_IS_OVER = 124  # the exit status of timeout(1)
# PyTorch's own words for this tell how to run the code.
REFUSED_PICKLE = "damaged, or a pickle that runs code, and was not opened"


class UserError(Exception):
    """A mistake in what the user gave: the message names the value, the limit and the fix.

    `dynattn` prints it as a single line and exits with status 2; everything else is a bug and keeps its traceback.

    Attributes:
        command: the words of the command that refused, such as `dynattn reproduce vision`; empty before one is chosen.
    """

    command = ""


class StoppedError(KeyboardInterrupt):
    """A signal, or a limit of time, ended the work; the message says how the user can continue it.

    `dynattn` prints it and exits with `status`.

    Attributes:
        number: the number of the signal; 0 for the time limit.
        left: the part of the message that says what was saved; empty where the job saves nothing before its end.
    """

    def __init__(self, number: int, left: str = "") -> None:
        super().__init__(number, left)
        self.number, self.left = number, left

    def __str__(self) -> str:
        cause = signal.Signals(self.number).name if self.number else "max_seconds"
        return f"stopped by {cause}{self.left and f'; {self.left}'}"

    @property
    def status(self) -> int:
        """The exit status of the process: that of a shell for the signal, or that of timeout(1) for the limit."""
        return 128 + self.number if self.number else TIME_IS_OVER


def first_line(error: BaseException | str) -> str:
    """The first line of an error's message, for errors whose message begins with the cause."""
    return _lines(error)[0]


def last_line(error: BaseException | str) -> str:
    """The last line of an error's message, for errors whose message ends with the cause, as of configurations."""
    return _lines(error)[-1].removeprefix("ValueError: ")


def in_one_line(error: BaseException) -> str:
    """The whole message of an error in one line, for errors whose cause may be in any of its lines."""
    return " ".join(str(error).split())


def refusal_of(error: Exception) -> str:
    """Why something refused what is in a file, such as a model its `config.json`, in one line.

    An error whose message alone says nothing, such as a KeyError with its key, is preceded by its type.
    """
    if type(error).__name__ == "SafetensorError":  # which is not imported, so that this module stays light
        return f"a weight file is truncated or damaged ({last_line(error)}); copy or save it again"
    if isinstance(error, pickle.UnpicklingError):
        return f"a file is {REFUSED_PICKLE}"
    is_sentence = not isinstance(error, ArithmeticError | AttributeError | LookupError)
    return last_line(error) if is_sentence else f"{type(error).__name__}: {last_line(error)}"


def printable(text: str) -> str:
    """`text` as a line for a terminal, which would obey some of the characters that names of strangers may have."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _lines(error: BaseException | str) -> list[str]:
    lines = [line.strip().rstrip(" .:") for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]
