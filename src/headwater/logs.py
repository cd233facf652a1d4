"""What servers write to stderr: lines for people, or one JSON object a line for programs.

The format is chosen once, by `--log-format` or `HEADWATER_LOG_FORMAT`; child processes inherit it. A line of JSON has
`time` (UTC), `level`, `logger`, `process` (what it is for), `pid`, `message`, and `exception` where there is one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType

from headwater.errors import InvalidArgumentError

LOG_FORMATS = ("text", "json")
LOG_FORMAT_VARIABLE = "HEADWATER_LOG_FORMAT"
MAX_CHARS = 32768
"""Of one message, and of one exception: longer ones are cut."""

_NOTES = "headwater.cli"
_state = {"format": "text"}


class JsonFormatter(logging.Formatter):
    """One JSON object a record, on one line, whatever is in it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Never raises: a record whose arguments do not fit is shown with what it has."""
        try:
            message = record.getMessage()
        except Exception:
            message = _bare(record)
        when = datetime.fromtimestamp(record.created, UTC)
        said = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "pid": record.process,
            "message": _cut(message),
        }
        if record.exc_info:
            said["exception"] = _cut(self.formatException(record.exc_info))
        if record.stack_info:
            said["stack"] = _cut(self.formatStack(record.stack_info))
        return json.dumps(said)


def set_up_logs(process: str, chosen: str | None = None, *, text: str | None = None) -> None:
    """Send warnings and worse to stderr, in the format `chosen`; a child process, which is told none, reads it from the
    environment. `text` is the format of lines for people; without it they are as Python writes them. Raises
    InvalidArgumentError for a format that there is not."""
    if chosen is None:
        chosen = "json" if os.environ.get(LOG_FORMAT_VARIABLE) == "json" else "text"
    if chosen not in LOG_FORMATS:
        raise InvalidArgumentError(f"the log format is {chosen[:80]!r}; expected one of {', '.join(LOG_FORMATS)}")
    _state["format"] = chosen
    if chosen == "text":
        os.environ.pop(LOG_FORMAT_VARIABLE, None)
        if text is not None:
            logging.basicConfig(level=logging.WARNING, format=text)
        return
    os.environ[LOG_FORMAT_VARIABLE] = chosen  # for child processes
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(_NOTES).setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def is_json() -> bool:
    """Whether programs read stderr."""
    return _state["format"] == "json"


def note(text: str, level: int = logging.INFO) -> None:
    """Tell whoever started a command something, on stderr. People see the level only if it is a warning or worse."""
    if is_json():
        logging.getLogger(_NOTES).log(level, "%s", text)
        return
    prefix = f"{logging.getLevelName(level).lower()}: " if level >= logging.WARNING else ""
    print(f"{prefix}{text}", file=sys.stderr, flush=True)


def adopt(*names: str) -> None:
    """Where programs read stderr: take over the loggers of libraries that bring handlers of their own."""
    for name in names if is_json() else ():
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("headwater").critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or isinstance(args.exc_value, SystemExit):
        return
    name = args.thread.name if args.thread is not None else "a thread"
    trace = (args.exc_type, args.exc_value, args.exc_traceback)
    logging.getLogger("headwater").critical("uncaught %s in %s", args.exc_type.__name__, name, exc_info=trace)


def _bare(record: logging.LogRecord) -> str:
    """What can be shown of a record whose message cannot be made."""
    try:
        return f"{record.msg} {record.args}"
    except Exception as error:  # an argument that cannot even be shown
        return f"{record.msg if isinstance(record.msg, str) else ''} ({type(error).__name__} in its arguments)".strip()


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 3] + "..."
