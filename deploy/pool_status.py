"""What a pool is to have stands beside what it has, so that a difference is seen, and beside what it brought."""

from collections.abc import Mapping, Sequence

from buffer.members import Member
from buffer.pools import Desired, pool_of
from buffer.provenance import Share
from deploy.shown import Shown


class PoolStatus(Shown):
    """One pool of producers."""

    name: str
    """Its name in the spec."""
    desired: int
    """Replicas that it is to have."""
    max_replicas: int
    """Most that it may be given."""
    running: int
    """Replicas that report and stay."""
    serving: int
    """Those of them that have proved a version and may lease."""
    draining: int
    """Replicas that were told to drain and have not ended."""
    tokens_per_second: float | None
    """Tokens generated per second, over its living replicas."""
    groups: int
    """Its groups among the newest planned ones (256, in whole steps)."""
    share: float | None
    """Its part of those groups."""
    staleness: float | None
    """Mean staleness of those, in versions."""
    staleness_max: int | None
    """Largest staleness of those."""


class ReplicaStatus(Shown):
    """One replica of a pool."""

    name: str
    """Its name in the run."""
    state: str
    """joining, serving, draining or quarantined."""
    version: int | None
    """The version that it has proved and serves."""
    pid: int | None
    """Its process."""
    host: str
    """The machine that it runs on."""
    alive: bool
    """Whether it reports."""
    seconds_since_report: float
    """Time since its last report."""
    told_to_drain: bool
    """Whether it was told to leave."""


class PoolDetail(PoolStatus):
    """A pool with its replicas."""

    replicas: list[ReplicaStatus]
    """Those that have joined, by name; a process that has just been started joins within seconds."""


def pool_statuses(
    desired: Mapping[str, Desired],
    *,
    members: Sequence[Member],
    draining: frozenset[str],
    rates: Mapping[str, float | None],
    shares: Mapping[str, Share],
) -> list[PoolStatus]:
    """Every declared pool. ``members``: producers; ``rates``: tokens per second by producer."""
    planned = sum(share.groups for share in shares.values())
    found = []
    for name, wanted in desired.items():
        own = [member for member in members if member.pool == name and member.alive]
        stays = [member for member in own if not _leaves(member, draining)]
        known = [rate for member in own if (rate := rates.get(member.name)) is not None]
        share = shares.get(name)
        found.append(
            PoolStatus(
                name=name,
                desired=wanted.replicas,
                max_replicas=wanted.most,
                running=len(stays),
                serving=sum(member.state == "serving" for member in stays),
                draining=len(
                    {member.name for member in own if _leaves(member, draining)}
                    | {member for member in draining if pool_of(member) == name}
                ),
                tokens_per_second=sum(known) if known else None,
                groups=share.groups if share else 0,
                share=(share.groups if share else 0) / planned if planned else None,
                staleness=share.staleness_mean if share else None,
                staleness_max=share.staleness_max if share else None,
            )
        )
    return found


def pool_details(
    pools: Sequence[PoolStatus], *, members: Sequence[Member], draining: frozenset[str]
) -> list[PoolDetail]:
    """The pools with their replicas."""
    return [
        PoolDetail(
            **pool.model_dump(),
            replicas=[_replica(member, draining) for member in members if member.pool == pool.name],
        )
        for pool in pools
    ]


def _leaves(member: Member, draining: frozenset[str]) -> bool:
    return member.state == "draining" or member.name in draining


def _replica(member: Member, draining: frozenset[str]) -> ReplicaStatus:
    pid = member.info.get("pid", "")
    return ReplicaStatus(
        name=member.name,
        state=member.state,
        version=member.version if member.version >= 0 else None,
        pid=int(pid) if pid.isdigit() else None,
        host=member.info.get("host", ""),
        alive=member.alive,
        seconds_since_report=round(member.seconds_since_report, 3),
        told_to_drain=member.name in draining,
    )
