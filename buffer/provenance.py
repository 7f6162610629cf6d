"""Which pool the newest planned groups came from, and how stale each pool's were, is read from the ledger itself."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import redis

from buffer.scripts import decode, prefix

GROUPS = 256  # newest ones, in whole steps and at least one step


@dataclass(frozen=True)
class Share:
    """One pool's part of the newest planned groups."""

    groups: int
    staleness_mean: float  # versions, at the plan
    staleness_max: int


def by_pool(client: "redis.Redis", run: str, *, groups: int = GROUPS) -> dict[str, Share]:
    """Each pool's share; empty before the first plan."""
    start = prefix(run)
    last = int(client.hget(f"{start}counters", "last_planned") or 0)
    per_step = int(client.hget(f"{start}config", "groups_per_step") or 0)
    if not last or not per_step:
        return {}
    pipeline = client.pipeline(transaction=False)
    for step in range(last, max(0, last - max(1, groups // per_step)), -1):
        pipeline.hmget(f"{start}plan:{step}", "prompts", "version")
    plans = [(decode(prompts).split(), int(version)) for prompts, version in pipeline.execute() if prompts is not None]
    pipeline = client.pipeline(transaction=False)
    for prompts, _ in plans:
        for prompt in prompts:
            pipeline.hmget(f"{start}prompt:{prompt}", "pool", "oldest_version")
    origins: list[Any] = pipeline.execute()
    versions = [version for prompts, version in plans for _ in prompts]
    found: defaultdict[str, list[int]] = defaultdict(list)
    for version, (pool, oldest) in zip(versions, origins, strict=True):
        if pool is not None and int(oldest or -1) >= 0:
            found[decode(pool)].append(version - int(oldest))
    return {pool: Share(len(values), sum(values) / len(values), max(values)) for pool, values in sorted(found.items())}
