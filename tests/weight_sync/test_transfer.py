"""Versions travel from a real publisher over real gloo to receivers in processes of their own, some of which fail."""

import signal
import time

import msgspec
import pytest

from buffer.errors import DeadlineExceeded, Fenced, ForebayError
from tests.weight_sync.material import contents, weights
from tests.weight_sync.world import World, publish, until
from weight_sync.manifest import digest
from weight_sync.registry import Epoch, Seat

BUCKETS = 6  # of a version of the tests


@pytest.mark.parametrize("count", [1, 2])
def test_a_version_reaches_every_receiver_to_the_bit_and_the_next_uses_the_same_epoch(world: World, count: int) -> None:
    receivers = [world.receiver(f"r{number}") for number in range(count)]
    publisher = world.publisher()
    assert publish(publisher, 0, weights(0)).wait(20) == 0
    manifest = world.registry.manifest()
    assert manifest is not None and len(manifest.bucket_sizes) == BUCKETS
    for receiver in receivers:
        arrival = receiver.arrival(0)
        assert (arrival.version, arrival.step) == (0, 0)
        assert arrival.tensors == contents(weights(0))
    first = world.epoch()
    for version in (1, 2, 3):
        assert publish(publisher, 10 * version, weights(version)).wait(20) == version
        for receiver in receivers:
            arrival = receiver.arrival(version)
            assert (arrival.step, arrival.tensors) == (10 * version, contents(weights(version)))
    assert world.epoch() == first
    assert world.ledger.current_version() == 3
    current = world.registry.current()
    assert current is not None and current.version == 3


def test_floating_point_weights_travel_in_the_type_that_is_asked_for(world: World) -> None:
    receiver = world.receiver("r0")
    publish(world.publisher(dtype="bfloat16"), 0, weights()).wait(20)
    expected = [(name, t.bfloat16() if t.is_floating_point() else t) for name, t in weights()]
    assert receiver.arrival(0).tensors == contents(expected)


def test_weights_may_change_as_soon_as_they_are_handed_over(world: World) -> None:
    receiver = world.receiver("r0")
    publisher = world.publisher()
    tensors = weights(1)
    publication = publish(publisher, 0, tensors)
    for _, tensor in tensors:
        tensor.zero_()
    publication.wait(20)
    assert receiver.arrival(0).tensors == contents(weights(1))


def test_a_publish_without_receivers_ends_at_once_and_those_that_join_later_get_its_version(world: World) -> None:
    publisher = world.publisher()
    began = time.monotonic()
    assert publish(publisher, 0, weights(0)).wait(20) == 0
    assert publish(publisher, 1, weights(1)).wait(20) == 1
    assert time.monotonic() - began < 3
    late = world.receiver("late")
    assert late.arrival(1).tensors == contents(weights(1))
    later = world.receiver("later")
    assert later.arrival(1).tensors == contents(weights(1))
    assert world.ledger.current_version() == 1
    assert late.silent()  # it has the version: it is in the sync, but is not handed it again


def test_a_receiver_killed_in_mid_broadcast_costs_a_new_epoch_and_the_version_arrives(world: World) -> None:
    survivor = world.receiver("survivor")
    victim = world.receiver("victim", fault=("die", BUCKETS + 3))
    publisher = world.publisher()
    publish(publisher, 0, weights(0)).wait(20)
    survivor.arrival(0)
    assert len(victim.shadows()) == 1
    before = world.epoch()
    began = time.monotonic()
    assert publish(publisher, 1, weights(1)).wait(30) == 1
    assert time.monotonic() - began < world.settings.join_seconds + world.settings.transfer_seconds
    victim.process.join(10)
    assert victim.process.exitcode == -signal.SIGKILL
    assert survivor.arrival(1).tensors == contents(weights(1))
    assert world.epoch() > before
    epoch = world.registry.epoch("gloo")
    assert epoch is not None and [seat.member for seat in epoch.seats] == [survivor.member]
    after = world.epoch()
    assert publish(publisher, 2, weights(2)).wait(20) == 2
    assert survivor.arrival(2).tensors == contents(weights(2))
    assert world.epoch() == after  # it is not waited for again

    again = world.receiver("victim")
    assert again.arrival(2).tensors == contents(weights(2))
    assert len(again.shadows()) == 1  # what the killed one left behind is gone


def test_a_receiver_that_freezes_costs_one_deadline_and_catches_up_when_it_goes_on(world: World) -> None:
    world.settings = world.settings.model_copy(update={"join_seconds": 2.0, "transfer_seconds": 2.0})
    healthy = world.receiver("healthy")
    frozen = world.receiver("frozen", fault=("freeze", BUCKETS + 3))
    publisher = world.publisher()
    publish(publisher, 0, weights(0)).wait(20)
    healthy.arrival(0)
    frozen.arrival(0)
    publication = publish(publisher, 1, weights(1))
    with pytest.raises(DeadlineExceeded, match="waiting for .*frozen"):
        publication.wait(1.0)
    began = time.monotonic()
    assert publication.wait(20) == 1
    assert time.monotonic() - began < 8
    assert healthy.arrival(1).tensors == contents(weights(1))
    frozen.send(signal.SIGCONT)
    assert frozen.arrival(1).tensors == contents(weights(1))
    assert publish(publisher, 2, weights(2)).wait(20) == 2
    assert healthy.arrival(2).tensors == frozen.arrival(2).tensors == contents(weights(2))


def test_leaving_and_joining_makes_nobody_else_restart(world: World) -> None:
    stays, leaves = world.receiver("stays"), world.receiver("leaves")
    publisher = world.publisher()
    publish(publisher, 0, weights(0)).wait(20)
    leaves.arrival(0)
    leaves.leave()
    assert leaves.shadows() == []
    assert set(world.registry.receivers()) == {stays.member}
    began = time.monotonic()
    publish(publisher, 1, weights(1)).wait(20)
    assert time.monotonic() - began < 5
    joins = world.receiver("joins")
    assert joins.arrival(1).tensors == contents(weights(1))
    publish(publisher, 2, weights(2)).wait(20)
    assert stays.arrival(2).tensors == joins.arrival(2).tensors == contents(weights(2))
    assert stays.process.is_alive()


def test_bytes_that_change_on_the_way_are_not_handed_over_and_are_sent_again(world: World) -> None:
    receiver = world.receiver("r0", fault=("corrupt once", 1))
    assert publish(world.publisher(), 0, weights(0)).wait(20) == 0
    assert receiver.arrival(0).tensors == contents(weights(0))
    epoch = world.registry.epoch("gloo")
    assert epoch is not None and epoch.sync == 2


def test_a_receiver_whose_bytes_never_agree_names_the_tensor_and_is_handed_nothing(world: World) -> None:
    receiver = world.receiver("r0", fault=("corrupt", 2))
    assert publish(world.publisher(), 0, weights(0)).wait(20) == 0
    record = world.registry.receivers()[receiver.member]
    assert record.version == -1
    assert "the bytes of 'model.embed_tokens.weight' of version 0 differ from the manifest" in record.error
    assert f"version 0 did not reach {receiver.member}" in world.events
    assert receiver.silent()


def test_an_older_publisher_is_refused_and_its_version_never_becomes_current(world: World) -> None:
    receiver = world.receiver("r0")
    older = world.publisher()
    publish(older, 0, weights(0)).wait(20)
    receiver.arrival(0)
    newer = world.publisher()
    assert publish(newer, 1, weights(1)).wait(20) == 1
    assert receiver.arrival(1).tensors == contents(weights(1))
    with pytest.raises(Fenced, match="a newer publisher has taken over"):
        publish(older, 2, weights(2)).wait(20)
    with pytest.raises(Fenced):
        publish(older, 3, weights(3))
    assert publish(newer, 2, weights(4)).wait(20) == 2
    assert receiver.arrival(2).tensors == contents(weights(4))


def test_a_receiver_refuses_the_epoch_of_an_older_publisher(world: World) -> None:
    receiver = world.receiver("r0")
    world.publisher().stop()
    publish(world.publisher(), 0, weights(0)).wait(20)
    receiver.arrival(0)
    seat = Seat(receiver.member, world.registry.receivers()[receiver.member].incarnation)
    stolen = Epoch(fence=1, number=99, transport="gloo", phase="calling", seats=(seat,))
    world.client.set(world.registry._key("epoch:gloo"), msgspec.json.encode(stolen))
    until(lambda: "older publisher (fence 1) is refused" in world.registry.receivers()[receiver.member].error)
    assert world.registry.receivers()[receiver.member].answered != 99


def test_a_new_publisher_takes_over_receivers_without_a_restart(world: World) -> None:
    receiver = world.receiver("r0")
    first = world.publisher()
    publish(first, 0, weights(0)).wait(20)
    receiver.arrival(0)
    first.stop()
    assert publish(world.publisher(), 1, weights(1)).wait(20) == 1
    assert receiver.arrival(1).tensors == contents(weights(1))


def test_a_version_is_handed_over_only_once_the_ledger_knows_it(world: World) -> None:
    receiver = world.receiver("r0")
    publisher = world.publisher()
    publish(publisher, 0, weights(0)).wait(20)
    receiver.arrival(0)
    world.ledger.register_publisher()  # from here on the ledger refuses this publisher
    with pytest.raises(Fenced):
        publish(publisher, 1, weights(1)).wait(20)
    manifest = world.registry.manifest()
    assert manifest is not None and manifest.version == 1
    assert world.registry.receivers()[receiver.member].manifest == digest(manifest)  # it arrived whole
    time.sleep(1.0)
    assert receiver.silent()


def test_a_stopped_publisher_takes_no_more_weights(world: World) -> None:
    publisher = world.publisher()
    publisher.stop()
    with pytest.raises(ForebayError, match="was stopped"):
        publish(publisher, 0, weights(0))


def test_one_who_waits_does_not_poll_redis(world: World) -> None:
    """Publisher and receiver at rest, then a publisher that calls a receiver which does not answer."""
    receiver = world.receiver("r0")
    publisher = world.publisher()

    def commands_per_second(seconds: float) -> float:
        before = world.client.info("stats")["total_commands_processed"]
        time.sleep(seconds)
        return float(world.client.info("stats")["total_commands_processed"] - before) / seconds

    receiver.send(signal.SIGSTOP)
    publication = publish(publisher, 0, weights(0))
    until(lambda: world.epoch() > 0)
    assert commands_per_second(0.6) < 40
    assert not publication.done()
    receiver.send(signal.SIGCONT)
    assert publication.wait(20) == 0
    receiver.arrival(0)
    assert commands_per_second(1.5) < 110  # most of them are heartbeats, quick in tests
