"""Each pool's share of what is trained, and how stale it was, follow from the ledger's prompts and plans."""

import msgspec

from buffer.provenance import Share, by_pool
from tests.buffer.world import World, make_group


def answer(world: World, pool: str, count: int, *, version: int, sampled: int) -> None:
    """``count`` prompts leased at ``version``, answered by ``pool`` with tokens of version ``sampled``."""
    for lease in world.lease("p0", count, version).leases:
        group = msgspec.structs.replace(make_group(lease, version=sampled), pool=pool)
        world.ledger.commit(lease, group, usable=True)


def test_nothing_is_known_before_the_first_plan(world: World) -> None:
    assert by_pool(world.client, world.run) == {}
    world.set_up()
    answer(world, "fast", 3, version=0, sampled=0)
    assert by_pool(world.client, world.run) == {}


def test_staleness_is_counted_from_the_version_of_the_plan_by_pool(world: World) -> None:
    world.set_up(rows=40)
    answer(world, "fast", 3, version=0, sampled=0)
    world.train(1)
    assert by_pool(world.client, world.run) == {"fast": Share(3, 0.0, 0)}
    answer(world, "fast", 1, version=0, sampled=0)
    answer(world, "slow", 2, version=0, sampled=0)
    world.publish(1)
    world.train(2)
    found = by_pool(world.client, world.run)
    assert found == {"fast": Share(4, 0.25, 1), "slow": Share(2, 1.0, 1)}


def test_only_the_newest_steps_count_and_one_at_least(world: World) -> None:
    world.set_up(rows=40)
    for step, pool in ((1, "old"), (2, "new")):
        answer(world, pool, 3, version=step - 1, sampled=step - 1)
        world.train(step)
        world.publish(step)
        world.serve("p0", step)
    assert set(by_pool(world.client, world.run, groups=6)) == {"old", "new"}
    assert set(by_pool(world.client, world.run, groups=5)) == {"new"}
    assert set(by_pool(world.client, world.run, groups=1)) == {"new"}
