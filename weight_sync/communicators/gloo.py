"""The gloo transport: host memory over TCP, in groups of its own beside any default group of the process.

Gloo cannot abort an operation, so each has its own deadline and ends by itself: closing leaves a running one to end in
the thread that runs it, and never waits for it.
"""

import secrets
import socket
import threading
import time
from datetime import timedelta

import msgspec
import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from weight_sync.communicators.base import CommunicatorFailed


class _Rendezvous(msgspec.Struct, frozen=True):
    """Where the publisher's store listens, and what nobody else's keys begin with."""

    host: str
    port: int
    nonce: str


class GlooCommunicator:
    """One process group over one store."""

    def __init__(self, group: ProcessGroupGloo, store: TCPStore, label: str) -> None:
        self._group: ProcessGroupGloo | None = group
        self._store: TCPStore | None = store
        self._label = label
        self._busy = threading.Lock()
        self._closed = False

    def broadcast(self, bucket: torch.Tensor, seconds: float) -> None:
        with self._busy:
            if self._closed or self._group is None:
                raise CommunicatorFailed(f"the {self._label} is closed")
            options = BroadcastOptions()
            options.rootRank = 0
            options.rootTensor = 0
            options.timeout = timedelta(seconds=max(seconds, 0.05))
            try:
                work = self._group.broadcast([bucket], options)
                # A little longer than the operation's own deadline: it must have ended before the group is freed.
                work.wait(timedelta(seconds=max(seconds, 0.05) + 5.0))
            except RuntimeError as error:
                self._closed = True
                raise CommunicatorFailed(f"broadcast in the {self._label} failed: {_first_line(error)}") from None
            finally:
                if self._closed:
                    self._free()

    def close(self) -> None:
        self._closed = True
        if self._busy.acquire(blocking=False):
            try:
                self._free()
            finally:
                self._busy.release()

    def _free(self) -> None:
        # The group's threads use the store: the order matters.
        self._group = None
        self._store = None


class GlooTransport:
    """Groups over a store that the publisher's process listens with, on ``host`` only."""

    name = "gloo"

    def __init__(self, host: str) -> None:
        self._host = host
        self._stores: dict[bytes, TCPStore] = {}

    def create_rendezvous(self) -> bytes:
        # Given a socket, the store listens on this address alone; by itself it would listen on all of them.
        listener = socket.create_server((self._host, 0), family=_family(self._host), backlog=512)
        port = int(listener.getsockname()[1])
        store = TCPStore(
            self._host,
            port,
            world_size=None,
            is_master=True,
            timeout=timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        rendezvous = msgspec.json.encode(_Rendezvous(self._host, port, secrets.token_hex(16)))
        # A rendezvous whose epoch never opened is dropped here.
        self._stores = {rendezvous: store}
        return rendezvous

    def connect(self, rendezvous: bytes, *, epoch: int, rank: int, size: int, seconds: float) -> GlooCommunicator:
        label = f"gloo epoch {epoch}"
        deadline = time.monotonic() + seconds
        try:
            place = msgspec.json.decode(rendezvous, type=_Rendezvous)
            store = self._stores.pop(rendezvous, None) if rank == 0 else None
            if store is None:
                store = TCPStore(
                    place.host,
                    place.port,
                    world_size=None,
                    is_master=False,
                    timeout=timedelta(seconds=seconds),
                    wait_for_workers=False,
                )
            _gather(store, place.nonce, rank, size, deadline, label)
            options = ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.5))
            options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
            options._threads = 1
            group = ProcessGroupGloo(PrefixStore(place.nonce, store), rank, size, options)
        except (RuntimeError, msgspec.DecodeError) as error:
            raise CommunicatorFailed(f"joining {label} as rank {rank} of {size}: {_first_line(error)}") from None
        return GlooCommunicator(group, store, label)


def _gather(store: TCPStore, nonce: str, rank: int, size: int, deadline: float, label: str) -> None:
    """Wait for every member before any connects: here a missing one can be named, and nothing has to be undone."""
    store.set(f"{nonce}/here/{rank}", b"1")
    missing = set(range(size)) - {rank}
    while True:
        missing = {other for other in missing if not store.check([f"{nonce}/here/{other}"])}
        if not missing:
            return
        if time.monotonic() > deadline:
            raise CommunicatorFailed(f"{label}: no answer from rank {', '.join(map(str, sorted(missing)))} of {size}")
        time.sleep(0.01)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
