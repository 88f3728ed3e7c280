"""Errors as OpenAI's clients read them."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from firsttoken.study.errors import (
    BusyError,
    ClosedError,
    EngineError,
    FirstTokenError,
    LengthError,
    OutputError,
    RequestError,
)
from firsttoken_serve.http.response_bodies import Json

RETRY_S = 1
_INVALID = "invalid_request_error"
_TOO_LONG = "context_length_exceeded"  # which clients look for, to shorten what they send
_KINDS = {
    400: (_INVALID, "bad_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: (_INVALID, "forbidden"),
    404: (_INVALID, "not_found"),
    405: (_INVALID, "method_not_allowed"),
    408: (_INVALID, "body_timeout"),
    413: (_INVALID, "body_too_large"),
    431: (_INVALID, "head_too_large"),
    429: ("rate_limit_error", "busy"),
    503: ("service_unavailable_error", "loading_failed"),
}

_NAME = re.compile(r"[\w.\[\]']+")  # such as messages[1].role

_STATUS = ((ClosedError, 503), (BusyError, 429), (RequestError, 400))


async def handle_error(request: Request, error: Exception) -> Response:
    """The response to a request that met ``error``; of a path that is not served, it says which ones are."""
    if isinstance(error, HTTPException) and error.status_code == 404 and error.detail == HTTPStatus(404).phrase:
        served = ", ".join(route.path for route in request.app.routes)
        error = HTTPException(404, f"nothing is served at {request.url.path[:200]}; there are {served}")
    return error_response(error)


def error_response(error: Exception) -> JSONResponse:
    """Return the response to ``error``: its status, its own headers (such as Allow), and its body."""
    status, body = error_body(error)
    headers = dict(getattr(error, "headers", None) or {})
    if status == 429 or isinstance(error, ClosedError):
        headers["Retry-After"] = str(RETRY_S)
    if status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    return JSONResponse(body, status, headers)


def error_body(error: Exception) -> tuple[int, Json]:
    """HTTP status and body. What is not foreseen is logged, and the client learns its type only."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, OutputError | EngineError):  # 503 is for what comes back by itself
        status, message = 500, str(error)
    elif isinstance(error, FirstTokenError):
        status = next((number for kind, number in _STATUS if isinstance(error, kind)), 503)
        message = str(error)
    else:
        logging.getLogger(__name__).error("an answer failed", exc_info=error)
        status, message = 500, f"internal error: {type(error).__name__}"
    kind, code = _KINDS.get(status, ("server_error", "internal"))
    if isinstance(error, LengthError):
        code = _TOO_LONG
    if isinstance(error, ClosedError):
        code = "shutting_down"
    name, colon, _ = message.partition(": ")  # the field of the request that a message begins with, as ours do
    field = name if status in (400, 404) and colon and _NAME.fullmatch(name) else None
    return status, {"error": {"message": message, "type": kind, "param": field, "code": code}}
