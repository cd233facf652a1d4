"""Errors as OpenAI's clients expect them: a status, and a body `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from headwater.errors import EngineDeadError, RequestError

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 500
"""A message is one line, whatever of a request is quoted in it."""
MAX_QUOTE_CHARS = 100

STATUS_OF_CODE = {
    "invalid_api_key": 401,
    "host_not_allowed": 403,
    "origin_not_allowed": 403,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_too_large": 413,
    "unsupported_media_type": 415,
    "overloaded": 429,
    "headers_too_large": 431,
    "engine_hung": 503,
    "no_server": 503,
    "server_busy": 503,
}
"""Codes of a RequestError that do not mean 400."""
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ErrorReply(NamedTuple):
    """An error, ready to be sent."""

    status: int
    body: bytes
    headers: dict[str, str]


def shown(text: str) -> str:
    """A client's text for an error message or the log, which shall not become as long as the request was."""
    return repr(text if len(text) <= MAX_QUOTE_CHARS else text[: MAX_QUOTE_CHARS - 3] + "...")


def one_line(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """A text without line breaks, control characters and escape sequences, cut where it is too long."""
    head = text if len(text) <= max_chars else text[: max_chars - 3] + "..."
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in head)


def error_reply(error: Exception) -> ErrorReply:
    """What a client is told about an error. Only errors raised on purpose show their text."""
    param = code = None
    if isinstance(error, RequestError):
        message, param, code = str(error), error.param, error.code
        status = STATUS_OF_CODE.get(code or "", 400)
    elif isinstance(error, EngineDeadError):
        message, code, status = str(error), "engine_dead", 503
    else:
        message, code, status = "the server failed; its log says more", "internal_error", 500
    kind = _TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    fields: dict[str, Any] = {
        "message": one_line(message),
        "type": kind,
        "param": None if param is None else one_line(param, MAX_QUOTE_CHARS),
        "code": code,
    }
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return ErrorReply(status, msgspec.json.encode({"error": fields}), headers)
