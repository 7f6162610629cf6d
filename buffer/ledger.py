"""The ledger knows each prompt of each pass, and each of its transitions is one atomic, idempotent server operation.

    pending -> leased -> generated -> planned -> trained
       ^         |           |
       +---------+           +-> dropped (why)      leased -> dropped (why); leased -> pending when a lease ends

A prompt gets a *ticket* at its first lease and keeps it when it goes back: groups are planned in ticket order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import redis

from buffer.records import Group

Refusal = Literal[
    "budget", "staleness", "exhausted", "paused", "stopping", "quarantined", "not_proved", "no_version", "no_pass"
]


@dataclass(frozen=True)
class Lease:
    """The right to answer one prompt, until ``deadline_ms`` (the server's clock) unless renewed."""

    prompt: int
    ticket: int
    token: int  # fencing: whoever holds a later token holds the prompt
    row: int
    pass_number: int
    task: str
    deadline_ms: int


@dataclass(frozen=True)
class LeaseAnswer:
    """Leases, or the reason why there are none."""

    leases: tuple[Lease, ...]
    refusal: Refusal | None
    detail: str = ""  # a sentence for people: "12 of 12 groups allowed at version 3 are running or stored"


@dataclass(frozen=True)
class Plan:
    """The groups of one step, in order; written once, read by all ranks."""

    step: int
    prompts: tuple[int, ...]
    version: int  # newest published version when it was planned
    final: bool = False  # the run ends after this step
    checkpoint: bool = False  # a checkpoint was asked for


@dataclass(frozen=True)
class Waiting:
    """Why a step cannot be planned yet: how many groups are due and who holds them."""

    missing: int
    holders: tuple[str, ...]
    detail: str


@dataclass(frozen=True)
class LedgerReport:
    """Result of a verification: counts by state, and each thing that does not add up."""

    counts: dict[str, int]
    dropped: dict[str, int]  # reason -> count
    problems: tuple[str, ...]


class Ledger:
    """All operations on the ledger of one run. Every method may be retried; raises BufferUnavailable after the
    client's deadline, Fenced when the caller's lease or fence is no longer valid."""

    def __init__(self, client: "redis.Redis", run: str) -> None:
        raise NotImplementedError

    # -- set-up
    def configure(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        budget_bytes: int,
        lease_seconds: float,
        reserve_bytes: int,
        passes: int | None,
        data_digest: str,
    ) -> None:
        """Fix the run's numbers (first caller writes, a later caller with other numbers or data is refused).
        ``reserve_bytes``: upper bound of one group's bytes, reserved at its lease."""

    def open_pass(self, pass_number: int, order: Sequence[int], tasks: Sequence[str]) -> bool:
        """Add a pass: ``order[i]`` is the row of prompt ``pass_number * len(order) + i``, ``tasks[row]`` its task.
        False when the pass is open already."""

    # -- producers
    def lease(self, member: str, *, count: int, version: int) -> LeaseAnswer:
        """Up to ``count`` leases for a member that serves ``version`` (proved). Expired leases of others are taken
        back first. Granted while (max_staleness + 1) x groups_per_step + consumed(version) - accepted - running > 0,
        where consumed(version) is the groups trained when that version was published, accepted the usable groups ever
        committed and running the leased prompts; and while stored + reserved bytes stay in the budget."""

    def renew(self, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Extend leases; those that are no longer held are missing from the answer."""

    def give_back(self, leases: Sequence[Lease]) -> None:
        """Return prompts to pending (a drain); leases no longer held are ignored."""

    def give_back_all(self, member: str) -> int:
        """Return all prompts leased by a member that is known to be gone; number returned."""

    def drop(self, lease: Lease, reason: str) -> None:
        """End a prompt without a group (over-long prompt, scorer failed, ...)."""

    def commit(self, lease: Lease, group: Group, *, usable: bool, reason: str = "") -> bool:
        """Store the group's payload, then make it real: prompt *generated* (or, when not usable, *dropped* with
        ``reason``). False when this very commit was made before (a retry). Raises Fenced when the lease is not held."""

    # -- consumers
    def register_publisher(self) -> int:
        """A fencing token for a new incarnation of the publisher; older ones can no longer plan, retire or publish."""

    def plan(self, step: int, *, fence: int, final: bool) -> Plan | Waiting:
        """The plan of ``step``: the one written before if there is one, else the groups_per_step lowest tickets in
        play once all of them are generated."""

    def read_plan(self, step: int) -> Plan | None:
        """The plan of a step if it is written (other ranks poll this)."""

    def read_groups(self, prompts: Sequence[int]) -> list[Group]:
        """The stored groups, in the order asked for; raises LedgerBroken naming a group that is not there."""

    def retire(self, step: int, *, fence: int) -> None:
        """The step's groups are in the durable journal: mark them trained at ``step``, delete payloads, free bytes."""

    def publish(self, *, fence: int, step: int) -> int:
        """Make the next version current, after its weights were sent; returns it. The first version of a run is 0."""

    def next_version(self) -> int:
        """The number that the next publish will give."""

    def current_version(self) -> int:
        """The newest published version; -1 before the first."""

    # -- everyone
    def summary(self) -> dict[str, object]:
        """Counts by state, bytes stored and reserved, accepted, running, current version, last planned and trained
        step, oldest lease; for status and `why is nobody generating?`."""

    def history(self, prompt: int) -> dict[str, object] | None:
        """One prompt's life: state, row, holder, attempts, producer, versions, rewards, step or reason."""

    def verify(self) -> LedgerReport:
        """Count everything from the ground up and compare with the counters."""
