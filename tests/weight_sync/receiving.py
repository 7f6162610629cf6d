"""A receiver as a process of its own, which reports what it was handed, and which can be told how to misbehave."""

import os
import signal
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal

import torch

from buffer.client import connect
from buffer.members import Members
from buffer.processes import die_with_parent
from tests.weight_sync.material import content
from weight_sync.communicators.base import Communicator, Transport
from weight_sync.manifest import Manifest
from weight_sync.receiver import Receiver
from weight_sync.settings import WeightSyncSettings
from weight_sync.shadow import ShadowReference, open_shadow

HEARTBEAT_SECONDS = 0.6

Fault = Literal["die", "freeze", "corrupt once", "corrupt"]


@dataclass(frozen=True)
class Assignment:
    """What a receiver is told at its start."""

    url: str
    password: str
    run: str
    member: str
    settings: WeightSyncSettings
    folder: str
    fault: tuple[Fault, int] | None = None  # what happens at the n-th bucket, to `corrupt` also at each one after it


@dataclass
class Arrival:
    """What a receiver was handed."""

    version: int
    step: int
    tensors: dict[str, tuple[str, tuple[int, ...], str]] = field(repr=False)


class FaultyTransport:
    """The real transport; after so many buckets something happens."""

    def __init__(self, real: Transport, fault: tuple[Fault, int]) -> None:
        self.name = real.name
        self._real = real
        self.kind, self.left = fault

    def create_rendezvous(self) -> bytes:
        return self._real.create_rendezvous()

    def connect(self, rendezvous: bytes, *, epoch: int, rank: int, size: int, seconds: float) -> Communicator:
        real = self._real.connect(rendezvous, epoch=epoch, rank=rank, size=size, seconds=seconds)
        return FaultyCommunicator(real, self)


class FaultyCommunicator:
    """The real communicator, counted."""

    def __init__(self, real: Communicator, transport: FaultyTransport) -> None:
        self._real, self._transport = real, transport

    def broadcast(self, bucket: torch.Tensor, seconds: float) -> None:
        self._transport.left -= 1
        kind, left = self._transport.kind, self._transport.left
        if left == 0 and kind in ("die", "freeze"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "die" else signal.SIGSTOP)
        self._real.broadcast(bucket, seconds)
        if (left == 0 and kind == "corrupt once") or (left <= 0 and kind == "corrupt"):
            bucket[0] ^= 1

    def close(self) -> None:
        self._real.close()


def receive(assignment: Assignment, reports: Connection) -> None:
    """Join the run and receive until SIGTERM."""
    die_with_parent()
    torch.set_num_threads(1)
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    client = connect(assignment.url, password=assignment.password, timeout_seconds=10)
    members = Members(client, assignment.run, heartbeat_seconds=HEARTBEAT_SECONDS)
    incarnation = members.join(assignment.member, role="producer", pool="producer", info={})

    def ready(manifest: Manifest, reference: ShadowReference) -> None:
        tensors = {name: content(tensor) for name, tensor in open_shadow(reference)}
        receiver.release(reference)
        reports.send(Arrival(manifest.version, manifest.step, tensors))

    receiver = Receiver(
        client,
        assignment.run,
        assignment.member,
        incarnation,
        "gloo",
        assignment.settings,
        assignment.folder,
        ready,
    )
    if assignment.fault is not None:
        receiver._transport = FaultyTransport(receiver._transport, assignment.fault)
    receiver.start()
    reports.send("started")
    while not leaving.wait(HEARTBEAT_SECONDS / 2):
        receiver.check()
        members.report(assignment.member, incarnation)
    receiver.stop()
    members.leave(assignment.member, incarnation)
