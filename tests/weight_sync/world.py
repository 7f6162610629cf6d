"""A run with a real publisher in the test's process and real receivers in processes of their own."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import redis

from buffer import server
from buffer.ledger import Ledger
from buffer.members import Members
from tests.weight_sync.material import Named
from tests.weight_sync.receiving import HEARTBEAT_SECONDS, Arrival, Assignment, Fault, receive
from weight_sync.publisher import Publication, Publisher
from weight_sync.registry import Registry
from weight_sync.settings import WeightSyncSettings
from weight_sync.shadow import SHARED_MEMORY

# Torch takes seconds to import: it is imported once, by a process that the receivers are forked from.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.weight_sync.receiving"])


class ReceiverProcess:
    """A receiver that was started."""

    def __init__(self, process: BaseProcess, reports: Connection, member: str) -> None:
        self.process, self.member = process, member
        self._reports = reports

    def next(self, seconds: float = 20.0) -> Any:
        """What it reports next."""
        assert self._reports.poll(seconds), f"{self.member} reported nothing for {seconds} s"
        return self._reports.recv()

    def arrival(self, version: int, seconds: float = 20.0) -> Arrival:
        """The hand-over of a version; an older one may come before it."""
        deadline = time.monotonic() + seconds
        while True:
            arrival = self.next(deadline - time.monotonic())
            assert arrival.version <= version, f"{self.member} was handed {arrival.version} instead of {version}"
            if arrival.version == version:
                return arrival

    def silent(self) -> bool:
        """Whether nothing was reported since."""
        return not self._reports.poll(0)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """kill -9"""
        self.process.kill()
        self.process.join(10)

    def leave(self) -> None:
        """Ask it to end in order, and see that it does."""
        self.process.terminate()
        self.process.join(10)
        assert self.process.exitcode == 0

    def shadows(self) -> list[Path]:
        """Its files in shared memory."""
        return list(SHARED_MEMORY.glob(f"forebay-{self.member}-*"))


class World:
    """One run."""

    def __init__(self, running: server.EmbeddedServer, client: "redis.Redis", run: str, folder: Path) -> None:
        self.running, self.client, self.run, self.folder = running, client, run, folder
        self.ledger = Ledger(client, run)
        self.registry = Registry(client, run)
        self.settings = WeightSyncSettings(bucket_bytes=1024, join_seconds=10, transfer_seconds=10)
        self.events: list[str] = []
        self._publishers: list[Publisher] = []
        self._receivers: list[ReceiverProcess] = []

    def publisher(self, **options: Any) -> Publisher:
        """A publisher that has started, newer than those before it."""
        publisher = Publisher(
            self.client,
            self.run,
            fence=self.ledger.register_publisher(),
            transports=["gloo"],
            settings=self.settings,
            ledger=self.ledger,
            members=Members(self.client, self.run, heartbeat_seconds=HEARTBEAT_SECONDS),
            event=lambda kind, who, text: self.events.append(text),
            **options,
        )
        publisher.start()
        self._publishers.append(publisher)
        return publisher

    def receiver(self, name: str, fault: tuple[Fault, int] | None = None) -> ReceiverProcess:
        """A receiver that has signed in."""
        member = f"{self.run}-{name}"
        assignment = Assignment(
            url=self.running.url,
            password=self.running.password,
            run=self.run,
            member=member,
            settings=self.settings,
            folder=str(self.folder / "shadows"),
            fault=fault,
        )
        here, there = processes.Pipe(duplex=False)
        process = processes.Process(target=receive, args=(assignment, there), daemon=True)
        process.start()
        there.close()
        started = ReceiverProcess(process, here, member)
        self._receivers.append(started)
        assert started.next() == "started"
        return started

    def epoch(self) -> int:
        """Number of the newest epoch."""
        epoch = self.registry.epoch("gloo")
        return epoch.number if epoch else 0

    def close(self) -> None:
        """End everything; what a killed receiver left in shared memory goes too."""
        for publisher in self._publishers:
            publisher.stop()
        for receiver in self._receivers:
            receiver.kill()
            for path in receiver.shadows():
                path.unlink(missing_ok=True)


def publish(publisher: Publisher, step: int, tensors: Named) -> Publication:
    """Publish with a probe that nobody computes."""
    return publisher.publish(step, tensors, [1, 2, 3], [-1.0, -2.0])


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
