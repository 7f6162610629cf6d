"""Whoever has not the token learns nothing of a run and changes nothing; how long a refusal takes tells nothing."""

import hmac
import ipaddress
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from buffer.errors import SpecError

bearer = HTTPBearer(auto_error=False, description="The run's token: in the file `token` of the run folder.")


def require(token: str) -> Callable[..., None]:
    """A dependency that lets only the bearer of ``token`` through."""
    if not token.strip():
        raise ValueError("an empty token would let everybody in")
    expected = token.encode()

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        # Headers arrive decoded as Latin-1, so any byte can be compared.
        presented = given.credentials.encode("latin-1") if given is not None else b""
        if not hmac.compare_digest(presented, expected):
            what = "the token is not this run's" if given is not None else "a bearer token is needed"
            challenge = 'Bearer realm="forebay"' + (', error="invalid_token"' if given is not None else "")
            raise HTTPException(401, what, headers={"WWW-Authenticate": challenge})

    return check


def refuse_exposure(host: str, token: str, token_env: str) -> None:
    """Raise SpecError rather than let everybody on the network steer the run."""
    if token.strip():
        return
    reach = "this machine" if is_loopback(host) else "the network"
    raise SpecError(
        f"the controller's token is empty: everybody on {reach} could steer the run",
        where=f"{host}, the variable {token_env}",
        cure=f"put a token into {token_env}, or unset it: one is made and kept in the run folder",
    )


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
