"""Errors as OpenAI's clients know them: a status and `{"error": {message, type, param, code}}`."""

import math
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from aiohttp import web

from kvstore.core.errors import ConfigError, KVStoreError, Overloaded, PeerUnavailable

_TYPES = {
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refusal(Exception):
    """A request that is answered with an error. `param` names the field that is wrong, `code` the error for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def to_json(self) -> dict[str, object]:
        """OpenAI's error object."""
        other = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = _TYPES.get(HTTPStatus(self.status), other)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def to_response(self) -> web.Response:
        """The whole answer, for a response that has not begun."""
        response = json_response(self.to_json(), status=self.status)
        if self.retry_after_s:
            response.headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        return response


async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What `handler` answers, or its error as OpenAI's. A client that is gone is the caller's (ConnectionError, cancelled)."""
    try:
        return await handler(request)
    except Refusal as err:
        return err.to_response()
    except KVStoreError as err:
        return refusal_of(err).to_response()
    except web.HTTPException as err:  # aiohttp's own: no such route, no such method
        response = Refusal(err.status, f"{request.method} {request.path[:200]}: {err.reason}").to_response()
        response.headers.update({name: err.headers[name] for name in ("Allow",) if name in err.headers})
        return response


def refusal_of(err: KVStoreError) -> Refusal:
    """How an error of the engine is told over HTTP."""
    if isinstance(err, ConfigError):
        field = err.fields.get("field")
        return Refusal(HTTPStatus.BAD_REQUEST, err.message, param=None if field is None else str(field))
    if isinstance(err, Overloaded):
        seconds = float(err.fields.get("retry_after_s", 1.0))
        return Refusal(HTTPStatus.TOO_MANY_REQUESTS, err.message, code="queue_full", retry_after_s=seconds)
    if isinstance(err, PeerUnavailable):
        return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, err.message, code="engine_unavailable", retry_after_s=1.0)
    return Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, err.message, code=err.code)


def json_response(value: object, *, status: int = HTTPStatus.OK) -> web.Response:
    """`value` as a JSON body."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
