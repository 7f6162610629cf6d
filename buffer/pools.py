"""How many replicas a pool is to have is in Redis alone, so that whoever starts and stops them may die and begin anew.

The spec's numbers are written at each start of a run; of the spec and of people the last one who spoke counts. So a
number set by hand is kept over a resume, unless the spec's own number was changed meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import redis

from buffer.errors import SpecError
from buffer.scripts import Scripts, decode, pairs


class UnknownPool(SpecError):
    """The run has no pool of that name."""


class OutOfBounds(SpecError):
    """A pool cannot have so many replicas."""


@dataclass(frozen=True)
class Desired:
    """What a pool is to have."""

    replicas: int
    most: int  # that it may be given


def member_names(pool: str, replicas: int) -> list[str]:
    """Names of a pool's replicas: always the lowest numbers, so that the highest is the first to go."""
    return [f"{pool}-{number}" for number in range(replicas)]


def pool_of(member: str) -> str:
    """The pool that a replica's name says."""
    return member.rsplit("-", 1)[0]


class Pools:
    """The pools of one run: replicas desired, and names of replicas that were told to drain."""

    def __init__(self, client: "redis.Redis", run: str) -> None:
        self._client = client
        self._scripts = Scripts(client, run)
        self._prefix = self._scripts.prefix
        self._draining = f"{self._prefix}pools:draining"

    def declare(self, pools: Mapping[str, Desired]) -> None:
        """Write the spec's pools, before any replica runs; pools that it does not name are forgotten."""
        parts = [str(part) for name, pool in pools.items() for part in (name, pool.replicas, pool.most)]
        self._scripts.call("declare_pools", *parts)

    def scale(self, pool: str, replicas: int) -> int:
        """Desire so many replicas; the number desired before. Raises UnknownPool and OutOfBounds."""
        answer = [decode(part) for part in self._scripts.call("scale_pool", pool, str(replicas))]
        if answer[0] == "unknown":
            known = ", ".join(sorted(answer[1:]))
            raise UnknownPool(
                f"the run has no pool `{pool}`",
                where="the pools of the run",
                cure=f"name one of: {known}" if known else "no pool is declared yet: wait until the run has started",
            )
        if answer[0] == "bounds":
            raise OutOfBounds(
                f"the pool `{pool}` takes 0 to {answer[1]} replicas, not {replicas}",
                where=f"producers.{pool}.max_replicas",
                cure="give a number within, or raise the bound in the spec and resume",
            )
        return int(answer[1])

    def desired(self) -> dict[str, Desired]:
        """What each pool is to have, by name."""
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hgetall(f"{self._prefix}pools:replicas")
        pipeline.hgetall(f"{self._prefix}pools:most")
        replicas, most = (pairs(reply) for reply in pipeline.execute())
        return {name: Desired(int(replicas[name]), int(most[name])) for name in sorted(replicas)}

    def draining(self) -> frozenset[str]:
        """Replicas that were told to drain and have not ended."""
        return frozenset(decode(name) for name in self._client.smembers(self._draining))

    def told_to_drain(self, member: str) -> None:
        """Remember that a replica was told to drain."""
        self._client.sadd(self._draining, member)

    def ended(self, member: str) -> None:
        """The replica has ended: its name is free."""
        self._client.srem(self._draining, member)
