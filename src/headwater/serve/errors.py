"""Errors as OpenAI's clients expect them: a status, and a body `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from headwater.errors import EngineDeadError, RequestError

RETRY_AFTER_S = 1

STATUS_OF_CODE = {
    "invalid_api_key": 401,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_too_large": 413,
    "overloaded": 429,
}
"""Codes of a RequestError that do not mean 400."""
_TYPE_OF_STATUS = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


class ErrorReply(NamedTuple):
    """An error, ready to be sent."""

    status: int
    body: bytes
    headers: dict[str, str]


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
    fields: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return ErrorReply(status, msgspec.json.encode({"error": fields}), headers)
