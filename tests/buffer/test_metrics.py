"""Metrics, events, flags and due evaluations survive whoever wrote them."""

import math
import time

import pytest

from buffer import metrics
from buffer.metrics import EvaluationQueue, Metrics
from tests.buffer.world import World


def test_the_last_numbers_of_a_step_count(world: World) -> None:
    numbers = Metrics(world.client, world.run)
    numbers.record_step(2, {"loss": 2.0})
    numbers.record_step(1, {"loss": 9.0})
    numbers.record_step(1, {"loss": 1.0, "kl": math.nan})
    assert [(entry["step"], entry["loss"]) for entry in numbers.steps()] == [(1, 1.0), (2, 2.0)]
    assert math.isnan(numbers.steps()[0]["kl"])
    assert [entry["step"] for entry in numbers.steps(since=1)] == [2]


def test_the_history_is_bounded_and_keeps_the_newest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "HISTORY", 5)
    numbers = Metrics(world.client, world.run)
    for step in range(1, 9):
        numbers.record_step(step, {})
        numbers.event("join", "p0", str(step))
    assert [entry["step"] for entry in numbers.steps()] == [4, 5, 6, 7, 8]
    assert [event["text"] for event in numbers.events()] == ["4", "5", "6", "7", "8"]


def test_events_come_oldest_first_with_the_servers_time(world: World) -> None:
    numbers = Metrics(world.client, world.run)
    for text in ("one", "two", "three"):
        numbers.event("join", "p0", text)
    events = numbers.events(2)
    assert [(event["kind"], event["who"], event["text"]) for event in events] == [
        ("join", "p0", "two"),
        ("join", "p0", "three"),
    ]
    assert abs(events[0]["time"] - time.time()) < 60


def test_producers_and_evaluations(world: World) -> None:
    numbers = Metrics(world.client, world.run)
    numbers.record_producer("p0", {"running": 1.0})
    numbers.record_producer("p0", {"running": 2.0})
    assert numbers.producers() == {"p0": {"running": 2.0}}
    numbers.record_evaluation(10, {"accuracy": 0.5})
    numbers.record_evaluation(0, {"accuracy": 0.25})
    assert numbers.evaluations() == [{"accuracy": 0.25, "version": 0}, {"accuracy": 0.5, "version": 10}]


def test_flags_are_empty_until_set(world: World) -> None:
    assert world.control.get("pause") == ""
    world.control.set("pause", "1")
    assert world.control.get("pause") == "1"
    world.control.set("pause", "")
    assert world.control.get("pause") == ""


def test_an_evaluation_is_claimed_by_one_and_again_when_the_claim_runs_out(world: World) -> None:
    queue = EvaluationQueue(world.client, world.run)
    queue.request(10, 9)
    queue.request(0, 0)
    queue.request(0, 0)
    assert queue.open() == [0, 10]
    assert queue.claim("p0", version=5, seconds=0.2) == (0, 0)
    assert queue.claim("p0", version=5, seconds=0.2) == (0, 0)
    assert queue.claim("p1", version=5, seconds=0.2) is None
    assert queue.claim("p1", version=10, seconds=9) == (10, 9)
    time.sleep(0.3)
    assert queue.claim("p2", version=5, seconds=9) == (0, 0)
    queue.done(0)
    queue.request(0, 0)
    assert queue.open() == [10]


def test_what_a_member_that_is_gone_has_claimed_is_claimed_by_another_at_once(world: World) -> None:
    queue = EvaluationQueue(world.client, world.run)
    for version in (1, 2, 3):
        queue.request(version, version)
    assert queue.claim("p0", version=3, seconds=600) == (1, 1)
    assert queue.claim("p1", version=3, seconds=600) == (2, 2)
    assert queue.release("p0") == 1
    assert queue.release("p0") == 0
    assert queue.claim("p2", version=3, seconds=600) == (1, 1)
    assert queue.claim("p3", version=3, seconds=600) == (3, 3)
    assert queue.claim("p4", version=3, seconds=600) is None
