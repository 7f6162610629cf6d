"""A status can be read of any run, and its sentence says who waits on whom and why."""

import json
import math
import time

import pytest

from buffer.metrics import Metrics
from buffer.pools import Desired, Pools
from deploy.status import Status
from tests.buffer.world import World
from tests.deploy.shown import join, status_of, step_numbers, trained_run


def test_the_status_of_a_run_that_has_written_nothing_is_all_unknown(world: World) -> None:
    status = status_of(world)
    known = {name for name, value in status.model_dump().items() if value not in (None, [], {})}
    assert known == {"run", "steps", "waiting", "ledger", "paused", "stopping"}
    assert set(status.ledger.counts.values()) == {0}
    assert status.ledger.budget_bytes is None
    assert status.waiting == "the consumer has not joined; nobody generates: no producer has joined"
    assert Status.model_validate_json(status.model_dump_json()) == status


def test_the_status_shows_what_the_services_have_written(world: World) -> None:
    status = status_of(trained_run(world))
    assert (status.phase, status.step, status.steps, status.version) == ("running", 3, 5, 3)
    assert status.reward == pytest.approx(0.3)
    assert (status.response_length, status.staleness, status.mismatch) == (13.0, 0.5, 3e-6)
    assert status.accuracy is not None
    assert (status.accuracy.version, status.accuracy.step, status.accuracy.value) == (3, 3, 0.75)
    assert [(one.version, one.accuracy) for one in status.evaluations] == [(0, 0.25), (3, 0.75)]
    assert status.evaluations[1].rewards == {"exact": 0.75}
    assert status.tokens_per_second == 150.0
    assert status.eta_seconds == pytest.approx(2 * 2.0)
    assert [(step.step, step.reward) for step in status.rewards] == [
        (1, pytest.approx(0.1)),
        (2, pytest.approx(0.2)),
        (3, pytest.approx(0.3)),
    ]
    assert status.last_step["time/forward_backward"] == 1.0
    assert status.ledger.counts["trained"] == 9
    assert (status.ledger.budget_bytes, status.ledger.groups_per_step) == (1_000_000, 3)
    first, second = status.producers
    assert (first.name, first.pool, first.state, first.version, first.alive) == ("p0", "producer", "serving", 3, True)
    assert (first.running, first.tokens_per_second, second.version) == (2, 100.0, 0)
    assert status.consumer is not None
    assert status.consumer.state == "serving"
    assert status.events[-1].kind == "join"


def test_numbers_that_are_not_finite_are_null_in_json(world: World) -> None:
    trained_run(world)
    Metrics(world.client, world.run).record_step(3, step_numbers(3, **{"reward/mean": math.nan, "loss": math.inf}))
    status = status_of(world)
    read = json.loads(status.model_dump_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read["reward"] is None
    assert read["last_step"]["loss"] is None
    assert read["rewards"][-1] == {"step": 3, "reward": None}


def test_a_dead_producer_is_shown_dead_and_its_rate_does_not_count(world: World) -> None:
    trained_run(world)
    time.sleep(0.06)
    incarnation = join(world, "p1", "serving", 3, last_error="")
    world.members.report("p1", incarnation)
    status = status_of(world, heartbeat_seconds=0.01)  # dead after 0.05 s
    dead, alive = status.producers
    assert (dead.alive, dead.tokens_per_second, dead.running) == (False, None, None)
    assert (alive.alive, status.tokens_per_second) == (True, 50.0)


def test_numbers_of_an_earlier_process_of_a_name_are_not_shown(world: World) -> None:
    trained_run(world)
    join(world, "p0", "joining", waiting="the engine starts")
    first = status_of(world).producers[0]
    assert (first.running, first.tokens_per_second, first.waiting) == (None, None, "the engine starts")


def test_each_pool_shows_what_it_is_to_have_what_it_has_and_what_it_brought(world: World) -> None:
    trained_run(world)
    assert status_of(world).pools == [], "no pool is declared yet"
    pools = Pools(world.client, world.run)
    pools.declare({"producer": Desired(3, 8), "slow": Desired(1, 8)})
    fast, slow = status_of(world).pools
    assert (fast.name, fast.desired, fast.running, fast.serving, fast.draining) == ("producer", 3, 2, 2, 0)
    assert (fast.tokens_per_second, fast.groups, fast.share) == (150.0, 9, 1.0)
    assert (fast.staleness, fast.staleness_max) == (0.0, 0)
    assert (slow.desired, slow.running, slow.tokens_per_second, slow.groups) == (1, 0, None, 0)
    assert (slow.share, slow.staleness) == (0.0, None)


def test_a_replica_that_leaves_counts_as_draining_from_the_moment_it_is_told(world: World) -> None:
    trained_run(world)
    pools = Pools(world.client, world.run)
    pools.declare({"producer": Desired(1, 8)})
    pools.told_to_drain("p1")
    pools.told_to_drain("producer-7")  # told before it had joined
    (pool,) = status_of(world).pools
    assert (pool.running, pool.draining) == (1, 2)
    join(world, "p0", "quarantined", 3)
    (pool,) = status_of(world).pools
    assert (pool.running, pool.serving) == (1, 0)
    join(world, "p0", "draining", 3)
    (pool,) = status_of(world).pools
    assert (pool.running, pool.draining) == (0, 3)


def test_asking_what_is_due_changes_nothing(world: World) -> None:
    world.set_up(per_step=3)
    world.generate(1)
    before = world.ledger.summary()
    due = world.ledger.due()
    assert due is not None
    assert due.missing == 2
    assert due.detail == "step 1 waits for 2 groups: 2 are not leased yet"
    assert world.ledger.summary() == before
    world.generate(2)
    assert world.ledger.due() is None
    world.holds()


def test_it_says_that_the_engine_starts_and_no_version_is_published(world: World) -> None:
    join(world, "consumer-0", "joining")
    join(world, "p0", "joining", waiting="the engine starts")
    assert status_of(world).waiting == (
        "consumer-0 starts and has published no version yet; nobody generates: p0 joining (the engine starts)"
    )


def test_it_names_the_producer_that_holds_what_the_consumer_waits_for(world: World) -> None:
    trained_run(world)
    world.lease("p0", count=3, version=3)
    assert status_of(world).waiting == "consumer-0 waits for 3 groups of step 4 from p0; p0 generates"


def test_it_says_that_the_holder_of_what_is_due_is_gone(world: World) -> None:
    trained_run(world)
    world.lease("p0", count=3, version=3)
    time.sleep(0.06)
    consumer, other = join(world, "consumer-0", "serving", 3), join(world, "p1", "serving", 3)
    world.members.report("consumer-0", consumer)
    world.members.report("p1", other)
    waiting = status_of(world, heartbeat_seconds=0.01).waiting
    assert waiting.startswith(
        "consumer-0 waits for 3 groups of step 4 from p0 (gone: its leases have to run out); nobody generates: p1"
    )


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ("staleness", "more groups would be too stale"),
        ("budget", "the byte budget is used up"),
        ("exhausted", "no prompts are left"),
    ],
)
def test_it_says_what_leases_were_refused_for(world: World, refusal: str, words: str) -> None:
    trained_run(world)
    world.generate(3, version=3)
    world.plan(4)
    Metrics(world.client, world.run).record_producer("p0", {"running": 0.0})
    for name in ("p0", "p1"):
        join(world, name, "serving", 3, waiting=f"{refusal}: the ledger's words")
    assert status_of(world).waiting == (
        f"consumer-0 trains step 4; nobody generates: no lease for p0 and p1, {words} (the ledger's words)"
    )


def test_a_refusal_is_explained_in_the_ledgers_own_words(world: World) -> None:
    trained_run(world)
    world.generate(6, version=3)
    answer = world.lease("p0", version=3)
    assert answer.refusal == "staleness"
    Metrics(world.client, world.run).record_producer("p0", {"running": 0.0})
    world.members.leave("p1", 1)
    join(world, "p0", "serving", 3, waiting=f"{answer.refusal}: {answer.detail}")
    waiting = status_of(world).waiting
    assert waiting.startswith("consumer-0 is about to plan step 4; nobody generates: no lease for p0, more groups ")
    assert answer.detail in waiting


def test_it_says_that_producers_are_dead_or_quarantined_and_why(world: World) -> None:
    trained_run(world)
    join(world, "p0", "quarantined", 2, last_error="the probe is off by 0.5\n  cure: none")
    world.members.leave("p1", 1)
    assert "nobody generates: p0 quarantined: the probe is off by 0.5" in status_of(world).waiting
    join(world, "p0", "serving", 2, last_error="the engine died")
    time.sleep(0.06)
    waiting = status_of(world, heartbeat_seconds=0.01).waiting
    assert "nobody generates: p0 has not reported for 0 s: the engine died" in waiting
    assert waiting.startswith("consumer-0 has not reported for 0 s;")


def test_it_says_that_people_paused_or_stopped_the_run_and_that_it_ended(world: World) -> None:
    trained_run(world)
    world.control.set("pause", "1")
    status = status_of(world)
    assert status.paused
    assert status.waiting.startswith("producers wait for people: the run is paused; consumer-0 waits for 3 groups")
    world.control.set("stop", "drain")
    status = status_of(world)
    assert status.stopping
    assert status.waiting.startswith("the run is stopping, so nobody gets new prompts; consumer-0 ")
    world.control.set("phase", "failed: the loss is NaN")
    assert status_of(world).waiting == "nobody works: the run has failed: the loss is NaN"
    world.control.set("phase", "finished")
    assert status_of(world).waiting == "nobody works: the run has finished"
    world.control.set("phase", "stopped")
    assert status_of(world).waiting == "nobody works: the run has been stopped"


def test_after_the_last_step_the_consumer_waits_for_evaluations(world: World) -> None:
    trained_run(world)
    assert status_of(world, steps=3).waiting.startswith("consumer-0 has made all 3 steps and waits for the last")
    assert status_of(world, steps=3).eta_seconds == 0.0
