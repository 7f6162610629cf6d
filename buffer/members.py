"""A member is alive while it reports; what it serves is known to the ledger before it may lease.

States: joining -> serving (a proved version) -> draining -> gone; quarantined: its proof failed, no leases.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import redis

from buffer.errors import Fenced
from buffer.scripts import Scripts, decode, pairs

MISSED_REPORTS = 5  # after so many a member is dead

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
    """The registry of one run. All times are the server's."""

    def __init__(self, client: "redis.Redis", run: str, *, heartbeat_seconds: float) -> None:
        self._client = client
        self._heartbeat_seconds = heartbeat_seconds
        self._scripts = Scripts(client, run)
        self._prefix = self._scripts.prefix

    def join(self, name: str, *, role: Role, pool: str, info: dict[str, str]) -> int:
        """Register; returns the incarnation, which fences an older process of the same name."""
        return int(self._scripts.call("join_member", name, role, pool, json.dumps(info)))

    def report(self, name: str, incarnation: int, info: dict[str, str] | None = None) -> None:
        """A heartbeat; raises Fenced when a newer process has the name."""
        fields = () if info is None else ("info", json.dumps(info))
        self._tell(name, incarnation, *fields)

    def set_state(self, name: str, incarnation: int, state: State, *, version: int | None = None) -> None:
        """Change state and proved version; raises Fenced like ``report``."""
        fields = ("state", state) if version is None else ("state", state, "version", str(version))
        self._tell(name, incarnation, *fields)

    def leave(self, name: str, incarnation: int) -> None:
        """Say goodbye; nothing happens when a newer process has the name."""
        self._scripts.call("report_member", name, str(incarnation), "leave")

    def all(self, role: Role | None = None) -> list[Member]:
        """Every member known, alive or not."""
        names = sorted(decode(name) for name in self._client.smembers(f"{self._prefix}members"))
        pipeline = self._client.pipeline(transaction=False)
        pipeline.time()
        for name in names:
            pipeline.hgetall(f"{self._prefix}member:{name}")
        (seconds, microseconds), *records = pipeline.execute()
        now = int(seconds) + int(microseconds) / 1e6
        members = [
            self._member(name, pairs(record), now) for name, record in zip(names, records, strict=True) if record
        ]
        return [member for member in members if role is None or member.role == role]

    def _tell(self, name: str, incarnation: int, *fields: str) -> None:
        answer = [
            decode(part) for part in self._scripts.call("report_member", name, str(incarnation), "report", *fields)
        ]
        if answer[0] == "fenced":
            raise Fenced(
                f"{name} (incarnation {incarnation}) is replaced by incarnation {answer[1]}",
                where=f"the member {name}",
                cure="end this process; the newer one goes on",
            )

    def _member(self, name: str, record: dict[str, str], now: float) -> Member:
        since = max(0.0, now - int(record["seen"]) / 1000)
        info: dict[str, Any] = json.loads(record["info"])
        return Member(
            name=name,
            role=cast(Role, record["role"]),
            pool=record["pool"],
            state=cast(State, record["state"]),
            version=int(record["version"]),
            incarnation=int(record["incarnation"]),
            alive=since < MISSED_REPORTS * self._heartbeat_seconds,
            seconds_since_report=since,
            info=info,
        )
