"""The `headwater` command: how it starts, and how it ends.

Commands raise; here every error becomes one line and an exit code (0 done, 1 failed, 2 wrong usage, 130 interrupted).
Nothing heavy is imported at the top: `--help` must be quick, and the demo's ranks import this package too.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from headwater.cli.usage import WrongUsageError
from headwater.errors import HeadwaterError
from headwater.redaction import HIDDEN, redact_words

__all__ = ["main", "run"]

_came: list[int] = []
"""Signals that ask for an end."""


def main() -> None:
    """Entry point of the console script."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    sys.unraisablehook = _ask_again
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # `headwater pool ls | head`: nobody reads on. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def run(args: Sequence[str]) -> int:
    """Run one command and return its exit code. Never raises for what a command may meet."""
    try:
        from headwater.cli.app import command

        code = command()(list(args), prog_name="headwater", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        raise
    except WrongUsageError as wrong:
        return _fail(wrong.cause, str(wrong), args, code=2)
    except HeadwaterError as error:
        return _fail(error, str(error), args)
    except OSError as error:
        return _fail(error, redact_words(str(error), args), args)
    except Exception as error:
        if (usage := _usage_exit(error, args)) is not None:
            return usage
        if os.environ.get("HEADWATER_TRACEBACK"):
            raise
        if _came:
            # CPython puts a TypeError in place of what a signal raises while it words a failed import.
            return 128 + _came[-1]
        said = f"{type(error).__name__}: {redact_words(str(error), args)}"
        text = f"unexpected {said} (HEADWATER_TRACEBACK=1 shows where; please report it)"
        return _fail(error, text, args)


def _usage_exit(error: Exception, args: Sequence[str]) -> int | None:
    """Show what is wrong with a command line, as Typer does but without passwords in it, and return the exit code; None
    for other exceptions."""
    import logging

    import typer

    from headwater.cli.output import one_line
    from headwater.logs import is_json, note

    if isinstance(error, typer.Abort):
        print("Aborted.", file=sys.stderr, flush=True)
        return 1
    # The classes are Click's, or those of the copy that newer versions of Typer bring along.
    if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
        return None
    if type(error).__name__ != "NoArgsIsHelpError":  # that is the help of a group of commands, in columns
        error.message = _without_key(redact_words(getattr(error, "message", ""), args), args)  # type: ignore[attr-defined]
    if not is_json():
        from headwater.cli.log_option import set_up_unparsed

        set_up_unparsed(args)
    if is_json():
        note(one_line(error.format_message()), logging.ERROR)
    else:
        error.show()  # type: ignore[attr-defined]
    return int(error.exit_code)


def _without_key(text: str, args: Sequence[str]) -> str:
    """What is wrong with a command line, without what may be an API key: `serve` and `proxy` take no arguments, and
    `exporter` takes one, so what they get besides is probably the value of a mistyped option."""
    text = re.sub(r"(--?api[-_]?key)[^\s=]+", rf"\1{HIDDEN}", text)
    if args[:1] in (["serve"], ["proxy"]) or args[:2] == ["pool", "exporter"]:
        text = re.sub(r"(unexpected extra argument\S*) \(.*\)", rf"\1 ({HIDDEN})", text, flags=re.DOTALL)
    return text


def _fail(error: Exception, text: str, args: Sequence[str], code: int = 1) -> int:
    import logging

    from headwater.cli.output import one_line, print_json
    from headwater.logs import note

    note(one_line(text), logging.ERROR)
    if "--json" in args:
        print_json({"error": text, "kind": type(error).__name__})
    return code


def _stop(number: int, _frame: FrameType | None) -> None:
    """Ctrl-C and `kill` unwind the stack like any other exit, so that what was begun is cleaned up."""
    _came.append(number)
    raise SystemExit(128 + number)


def _ask_again(lost: sys.UnraisableHookArgs) -> None:
    """A signal that arrives inside a destructor or a callback raises where nobody can catch it: raise once more."""
    if not isinstance(lost.exc_value, SystemExit):
        sys.__unraisablehook__(lost)
        return
    code = lost.exc_value.code
    signal.signal(signal.SIGALRM, lambda number, frame: _stop(int(code or 0) - 128, frame))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
