"""A member is alive while it reports; what it serves is known to the ledger before it may lease.

States: joining -> serving (a proved version) -> draining -> gone; quarantined: its proof failed, no leases.
"""

from dataclasses import dataclass, field
from typing import Literal

import redis

Role = Literal["producer", "consumer", "controller", "scorer"]
State = Literal["joining", "serving", "draining", "quarantined"]


@dataclass(frozen=True)
class Member:
    """What is known of one member."""

    name: str
    role: Role
    pool: str
    state: State
    version: int  # the version that it has proved; -1: none
    incarnation: int  # grows with each start under the same name
    alive: bool
    seconds_since_report: float
    info: dict[str, str] = field(default_factory=dict)  # pid, host, platform, last error, ...


class Members:
    """The registry of one run."""

    def __init__(self, client: "redis.Redis", run: str, *, heartbeat_seconds: float) -> None:
        raise NotImplementedError

    def join(self, name: str, *, role: Role, pool: str, info: dict[str, str]) -> int:
        """Register; returns the incarnation, which fences an older process of the same name."""

    def report(self, name: str, incarnation: int, info: dict[str, str] | None = None) -> None:
        """A heartbeat; raises Fenced when a newer process has the name."""

    def set_state(self, name: str, incarnation: int, state: State, *, version: int | None = None) -> None:
        """Change state and proved version; raises Fenced like ``report``."""

    def leave(self, name: str, incarnation: int) -> None:
        """Say goodbye."""

    def all(self, role: Role | None = None) -> list[Member]:
        """Every member known, alive or not."""
