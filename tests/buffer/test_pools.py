"""What a pool is to have is changed by one atomic operation within its bounds, and whoever spoke last counts."""

import threading

import pytest

from buffer.pools import Desired, OutOfBounds, Pools, UnknownPool, member_names, pool_of
from tests.buffer.world import World


def replicas(pools: Pools) -> dict[str, int]:
    return {name: pool.replicas for name, pool in pools.desired().items()}


@pytest.fixture
def pools(world: World) -> Pools:
    pools = Pools(world.client, world.run)
    pools.declare({"fast": Desired(2, 8), "slow": Desired(0, 3)})
    return pools


def test_the_specs_pools_are_desired_from_the_start(pools: Pools) -> None:
    assert pools.desired() == {"fast": Desired(2, 8), "slow": Desired(0, 3)}


def test_a_run_that_has_not_started_has_no_pools(world: World) -> None:
    pools = Pools(world.client, world.run)
    assert pools.desired() == {}
    assert pools.draining() == frozenset()
    with pytest.raises(UnknownPool, match="no pool `fast`") as refused:
        pools.scale("fast", 1)
    assert "wait until the run has started" in refused.value.cure


def test_scaling_answers_what_was_desired_before(pools: Pools) -> None:
    assert pools.scale("fast", 5) == 2
    assert pools.scale("fast", 0) == 5
    assert replicas(pools) == {"fast": 0, "slow": 0}


def test_the_bounds_of_a_pool_hold_and_a_refusal_changes_nothing(pools: Pools) -> None:
    assert pools.scale("slow", 3) == 0
    for number in (-1, 4, 1_000_000):
        with pytest.raises(OutOfBounds, match=f"takes 0 to 3 replicas, not {number}"):
            pools.scale("slow", number)
    assert replicas(pools) == {"fast": 2, "slow": 3}


def test_a_pool_that_is_not_there_is_refused_with_the_names_that_are(pools: Pools) -> None:
    with pytest.raises(UnknownPool) as refused:
        pools.scale("fats", 1)
    assert refused.value.cure == "name one of: fast, slow"
    assert replicas(pools) == {"fast": 2, "slow": 0}


def test_a_number_set_by_hand_is_kept_over_a_resume(pools: Pools) -> None:
    pools.scale("fast", 5)
    pools.declare({"fast": Desired(2, 8), "slow": Desired(0, 3)})
    assert replicas(pools) == {"fast": 5, "slow": 0}


def test_a_number_changed_in_the_spec_counts_more_than_an_older_one_set_by_hand(pools: Pools) -> None:
    pools.scale("fast", 5)
    pools.declare({"fast": Desired(3, 8), "slow": Desired(0, 3)})
    assert replicas(pools) == {"fast": 3, "slow": 0}
    pools.scale("fast", 6)
    pools.declare({"fast": Desired(3, 8), "slow": Desired(0, 3)})
    assert replicas(pools) == {"fast": 6, "slow": 0}


def test_a_lower_bound_of_the_spec_counts_at_once(pools: Pools) -> None:
    pools.scale("fast", 7)
    pools.declare({"fast": Desired(2, 4), "slow": Desired(0, 3)})
    assert pools.desired()["fast"] == Desired(4, 4)


def test_a_pool_that_the_spec_no_longer_names_is_forgotten(pools: Pools) -> None:
    pools.scale("fast", 5)
    pools.declare({"slow": Desired(0, 3)})
    assert replicas(pools) == {"slow": 0}
    pools.declare({"fast": Desired(2, 8), "slow": Desired(0, 3)})
    assert replicas(pools) == {"fast": 2, "slow": 0}


def test_who_was_told_to_drain_is_known_until_it_has_ended_or_the_run_starts_anew(pools: Pools) -> None:
    for name in ("fast-1", "fast-1", "slow-0"):
        pools.told_to_drain(name)
    assert pools.draining() == {"fast-1", "slow-0"}
    pools.ended("fast-1")
    pools.ended("fast-1")
    assert pools.draining() == {"slow-0"}
    pools.declare({"slow": Desired(0, 3)})
    assert pools.draining() == frozenset()


def test_of_concurrent_orders_each_sees_the_one_before(pools: Pools) -> None:
    seen: list[int] = []

    def order(number: int) -> None:
        seen.append(pools.scale("fast", number))

    orders = [threading.Thread(target=order, args=(number,)) for number in (3, 4, 5, 6, 7)]
    for thread in orders:
        thread.start()
    for thread in orders:
        thread.join(10)
    assert sorted([*seen, replicas(pools)["fast"]]) == [2, 3, 4, 5, 6, 7]


def test_replicas_are_named_by_their_pool_and_the_lowest_numbers() -> None:
    assert member_names("fast", 3) == ["fast-0", "fast-1", "fast-2"]
    assert member_names("fast", 0) == []
    assert [pool_of(name) for name in ("fast-0", "a-b-12")] == ["fast", "a-b"]
