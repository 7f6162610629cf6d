"""A controller is asked over HTTP with its token; whatever goes wrong is one error with its cause and cure."""

from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import pydantic

from buffer.errors import ForebayError
from deploy.controller.answers import Order, PoolList, Scaled
from deploy.shown import Shown
from deploy.status import Status

SECONDS = 10.0
Answer = TypeVar("Answer", bound=Shown)


class ControllerError(ForebayError):
    """The controller cannot be reached or refuses."""


class ControllerClient:
    """The controller of one live run."""

    def __init__(self, url: str, token: str, *, seconds: float = SECONDS) -> None:
        self._url, self._seconds = url.rstrip("/"), seconds
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}

    def status(self) -> Status:
        """What the run is doing."""
        return self._read(Status, "GET", "/v1/status")

    def pools(self) -> PoolList:
        """What each pool is to have and has."""
        return self._read(PoolList, "GET", "/v1/pools")

    def scale(self, pool: str, replicas: int) -> Scaled:
        """Change the number of a pool's replicas."""
        return self._read(Scaled, "PATCH", f"/v1/pools/{quote(pool, safe='')}", {"replicas": replicas})

    def stop(self) -> Order:
        """Drain, checkpoint, end."""
        return self._order("stop")

    def pause(self) -> Order:
        """Give out no prompts until resumed."""
        return self._order("pause")

    def resume(self) -> Order:
        """Go on after a pause."""
        return self._order("resume")

    def checkpoint(self) -> Order:
        """Write a checkpoint with the next step."""
        return self._order("checkpoint")

    def _order(self, asked: str) -> Order:
        return self._read(Order, "POST", f"/v1/{asked}")

    def _read(self, kind: type[Answer], method: str, path: str, body: Any = None) -> Answer:
        try:
            return kind.model_validate(self._ask(method, path, body))
        except pydantic.ValidationError as error:
            raise self._error(
                "the controller's answer cannot be read", "use the release that started the run"
            ) from error

    def _ask(self, method: str, path: str, body: Any) -> Any:
        try:
            # No proxy of the environment: it would see the token, and does not reach loopback.
            with httpx.Client(headers=self._headers, timeout=self._seconds, trust_env=False) as client:
                response = client.request(method, self._url + path, json=body)
        except httpx.TimeoutException as error:
            raise self._error(
                f"the controller did not answer within {self._seconds:g} s",
                "see logs/controller.log in the run folder; a signal to `forebay run` (Ctrl-C) stops the run too",
            ) from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._error(
                f"the controller cannot be reached: {error}",
                "see that the run is alive (`forebay status`), and that this is its controller's address",
            ) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise self._error(
                "the controller refuses the token",
                "use the one in the run folder's file `token`, or in the variable that `controller.token_env` names",
            )
        content = _content(response)
        if response.is_error:
            raise self._error(
                _detail(content) or f"the controller answered {response.status_code}",
                str(content.get("cure") or "see logs/controller.log in the run folder"),
            )
        if not content:
            raise self._error(
                f"what answers is no controller (status {response.status_code})", "check the address of the controller"
            )
        return content

    def _error(self, what: str, cure: str) -> ControllerError:
        return ControllerError(what, where=self._url, cure=cure)


def _detail(problem: dict[str, Any]) -> str:
    faults = [f"{fault.get('where')}: {fault.get('what')}" for fault in problem.get("errors") or []]
    return ": ".join(filter(None, [str(problem.get("detail") or ""), "; ".join(faults)]))


def _content(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer; empty when it is none."""
    try:
        content = response.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
