"""Errors as OpenAI's clients know them.

Invariant: whatever goes wrong, the body is ``{"error": {message, type, param, code}}``; what may
help to try again carries ``retry-after`` in whole seconds.
"""

import math

import orjson
from starlette.requests import Request
from starlette.responses import Response

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer other than 200. ``param`` names the field of the request that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, object]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else TYPES[400])
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        content = orjson.dumps(self.body())
        return Response(content, self.status, headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_found(what: str, name: str) -> ApiError:
    """One answer for what does not exist and for what is another tenant's."""
    return ApiError(404, f"there is no {what} {name!r} here", code=f"{what}_not_found")


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    return ApiError(503, message, code="unavailable", retry_after=retry_after)


async def answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()
