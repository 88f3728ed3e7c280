"""Errors as OpenAI's clients read them."""

from __future__ import annotations

import logging

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from firsttoken.progressive.service.schema import Json
from firsttoken.study.errors import BusyError, FirstTokenError, RequestError

_KINDS = {
    400: ("invalid_request_error", "bad_request"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "body_too_large"),
    429: ("rate_limit_error", "busy"),
    503: ("service_unavailable_error", "loading_failed"),
}


async def refuse(request: Request, error: Exception) -> Response:
    """The response to a request that met ``error``."""
    status, body = refusal(error)
    return JSONResponse(body, status, {"Retry-After": "1"} if status == 429 else None)


def refusal(error: Exception) -> tuple[int, Json]:
    """HTTP status and body. What is not foreseen is logged, and the client learns its type only."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, FirstTokenError):
        status = 429 if isinstance(error, BusyError) else 400 if isinstance(error, RequestError) else 503
        message = str(error)
    else:
        logging.getLogger(__name__).error("an answer failed", exc_info=error)
        status, message = 500, f"internal error: {type(error).__name__}"
    kind, code = _KINDS.get(status, ("server_error", "internal"))
    return status, {"error": {"message": message, "type": kind, "code": code}}
