"""A communicator carries bytes or fails within its deadline, and names whom it waited for."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weight_sync.communicators import TransportMissing, transport
from weight_sync.communicators.base import Communicator, CommunicatorFailed
from weight_sync.communicators.gloo import GlooTransport


def connected(size: int, seconds: float = 10.0) -> list[Communicator]:
    """The members of an epoch; each has a transport of its own, as in processes of their own."""
    transports = [GlooTransport("127.0.0.1") for _ in range(size)]
    rendezvous = transports[0].create_rendezvous()
    with ThreadPoolExecutor(size) as pool:
        joining = [
            pool.submit(each.connect, rendezvous, epoch=1, rank=rank, size=size, seconds=seconds)
            for rank, each in enumerate(transports)
        ]
        return [future.result(seconds + 5) for future in joining]


def fails_within(seconds: float, call: Callable[[], object], match: str) -> None:
    began = time.monotonic()
    with pytest.raises(CommunicatorFailed, match=match):
        call()
    assert time.monotonic() - began < seconds


@pytest.mark.parametrize("size", [2, 3, 5])
def test_buckets_reach_every_member_in_order(size: int) -> None:
    members = connected(size)
    sent = [torch.randint(0, 256, (count,), dtype=torch.uint8) for count in (1, 1000, 77, 1 << 20)]
    received: list[list[torch.Tensor]] = [[torch.zeros_like(bucket) for bucket in sent] for _ in range(size)]
    received[0] = sent
    with ThreadPoolExecutor(size) as pool:
        work = [
            pool.submit(lambda m=member, b=buckets: [m.broadcast(bucket, 10) for bucket in b])
            for member, buckets in zip(members, received, strict=True)
        ]
        for future in work:
            future.result(20)
    for buckets in received:
        assert all(torch.equal(bucket, original) for bucket, original in zip(buckets, sent, strict=True))
    for member in members:
        member.close()


def test_a_member_that_does_not_join_is_named_within_the_deadline() -> None:
    publisher = GlooTransport("127.0.0.1")
    rendezvous = publisher.create_rendezvous()
    fails_within(
        3, lambda: publisher.connect(rendezvous, epoch=7, rank=0, size=3, seconds=0.5), "gloo epoch 7: .*rank 1, 2 of 3"
    )


def test_a_store_that_does_not_answer_fails_within_the_deadline() -> None:
    publisher, receiver = GlooTransport("127.0.0.1"), GlooTransport("127.0.0.1")
    rendezvous = publisher.create_rendezvous()
    publisher.create_rendezvous()  # the first one's store is gone with it
    fails_within(5, lambda: receiver.connect(rendezvous, epoch=1, rank=1, size=2, seconds=1), "joining gloo epoch 1")


def test_a_rendezvous_that_is_none_is_refused() -> None:
    fails_within(
        2,
        lambda: GlooTransport("127.0.0.1").connect(b"{}", epoch=1, rank=1, size=2, seconds=1),
        "joining gloo epoch 1 as rank 1 of 2",
    )


def test_a_receiver_waits_for_a_broadcast_only_until_its_deadline_and_the_epoch_is_over() -> None:
    members = connected(2)
    bucket = torch.zeros(8, dtype=torch.uint8)
    fails_within(3, lambda: members[1].broadcast(bucket, 0.5), "broadcast in the gloo epoch 1 failed")
    fails_within(1, lambda: members[1].broadcast(bucket, 0.5), "is closed")
    members[0].close()


def test_closing_does_not_wait_for_a_broadcast_that_runs() -> None:
    members = connected(2)
    failed = threading.Event()

    def receive() -> None:
        with pytest.raises(CommunicatorFailed):
            members[1].broadcast(torch.zeros(8, dtype=torch.uint8), 1.0)
        failed.set()

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.2)
    began = time.monotonic()
    members[1].close()
    assert time.monotonic() - began < 0.1
    assert not failed.is_set()
    thread.join(5)
    assert failed.is_set()
    members[0].close()


def test_a_process_group_of_the_trainer_is_left_alone() -> None:
    assert not torch.distributed.is_initialized()
    for member in connected(2):
        member.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("name", ["nccl", "hccl", "carrier pigeon"])
def test_a_transport_that_is_not_there_is_refused_with_one_that_is(name: str) -> None:
    with pytest.raises(TransportMissing, match="use `gloo`"):
        transport(name)
    assert transport("gloo").name == "gloo"
