"""Every error answer is a problem document (RFC 9457) for people and programs; no answer shows a traceback."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from buffer.errors import BufferUnavailable, ForebayError
from buffer.pools import OutOfBounds, UnknownPool

MEDIA_TYPE = "application/problem+json"
STATUSES = {BufferUnavailable: 503, UnknownPool: 404, OutOfBounds: 422}  # of our own errors; others are 500

log = structlog.get_logger()


class Fault(BaseModel):
    """One part of a request that is not valid."""

    where: str
    """The part: `query.events`."""
    what: str
    """What is wrong with it."""


class Problem(BaseModel):
    """A problem document."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    type: str = "about:blank"
    """Kind of the problem; `about:blank`: the status says it all."""
    title: str
    """The status in words."""
    status: int
    """The HTTP status."""
    detail: str
    """What happened."""
    instance: str
    """The path that was asked."""
    where: str | None = None
    """Where it happened, if it is not the controller."""
    cure: str | None = None
    """What to do about it."""
    errors: list[Fault] | None = None
    """Each part of the request that is not valid."""


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the API's description: these answers are problem documents."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in statuses
    }


def answer(
    request: Request,
    status: int,
    detail: str,
    *,
    where: str = "",
    cure: str = "",
    errors: list[Fault] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """A problem document as an answer."""
    problem = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=request.url.path,
        where=where or None,
        cure=cure or None,
        errors=errors,
    )
    content = problem.model_dump(mode="json", exclude_none=True)
    return JSONResponse(content, status_code=status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Have the app answer every error so."""

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        detail = str(error.detail)
        if error.status_code == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:
            detail = f"there is nothing at {request.url.path}"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{request.url.path} does not take {request.method}"
        return answer(request, error.status_code, detail, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> JSONResponse:
        faults = [Fault(where=".".join(map(str, fault["loc"])), what=fault["msg"]) for fault in error.errors()]
        return answer(request, 422, "the request is not valid", errors=faults)

    @app.exception_handler(ForebayError)
    async def known(request: Request, error: ForebayError) -> JSONResponse:
        status = next((code for kind, code in STATUSES.items() if isinstance(error, kind)), 500)
        log.warning("request failed", path=request.url.path, error=str(error))
        return answer(request, status, error.what, where=error.where, cure=error.cure)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return answer(request, 500, "an unexpected error in the controller", cure="see logs/controller.log")
