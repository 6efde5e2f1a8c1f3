"""Prints a function with which a shell completes `dynattn` commands and their options.

Run: `eval "$(dynattn completion bash)"` in ~/.bashrc, the same with `zsh` in ~/.zshrc, and in the configuration of fish
`dynattn completion fish | source`

The function asks this module for the words that can follow, which are read from the help texts of the commands.
"""

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module

from .common.errors import UserError

SHELLS = {
    "bash": """\
_dynattn() {
    local following="$(dynattn completion --words "${COMP_WORDS[@]:1:COMP_CWORD-1}")"
    COMPREPLY=($(compgen -W "$following" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _dynattn dynattn""",
    "zsh": """\
_dynattn() {
    compadd -- $(dynattn completion --words "${(@)words[2,CURRENT-1]}")
    _files
}
compdef _dynattn dynattn""",
    "fish": """\
complete -c dynattn -a "(dynattn completion --words (commandline -opc)[2..])\"""",
}

# Commands of other packages: their help takes seconds, so they are not completed.
OTHERS = ("lm-eval", "serve", "run")


def main(argv: Sequence[str]) -> int:
    """Prints the function for a shell or, for `--words WORD ...`, what can follow these words.

    Raises:
        UserError: the shell is unknown.
    """
    if argv[:1] == ["--words"]:
        print("\n".join(following(argv[1:])))
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: dynattn completion {{{','.join(SHELLS)}}}\n\n{__doc__}")
        return 0 if argv else 2
    if argv[0] not in SHELLS:
        raise UserError(f"unknown shell {argv[0]!r}; choose from {', '.join(SHELLS)}")
    print(SHELLS[argv[0]])
    return 0


def following(words: Sequence[str]) -> list[str]:
    """The options in the help of the command that `words` begin with or, if it has none, its sub-commands."""
    words, _ = import_module("dynattn.scripts.cli").split_imports(words)
    command = [word for word in words if not word.startswith("-")]
    if command and command[0] in OTHERS:
        return []
    for length in (2, 1, 0):  # how many words name the command; the others are arguments
        text = help_text(command[:length]) if length <= len(command) else None
        if text is not None:
            options = re.findall(r"^ {2}(?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
            return [*options, "--import"] if options else re.findall(r"^ {2}([a-z][\w-]*) {2,}", text, re.MULTILINE)
    return []


def help_text(command: Sequence[str]) -> str | None:
    """What `dynattn COMMAND --help` prints, or None if there is no such command."""
    shown = io.StringIO()
    with redirect_stdout(shown), redirect_stderr(io.StringIO()):
        try:
            status = import_module("dynattn.scripts.cli").main([*command, "--help"])
        except SystemExit as ended:
            status = ended.code
    return None if status else shown.getvalue()
