"""Every version that becomes current was sent, whole, to each receiver that was there; no receiver can hold it up.

A thread beside the trainer owns a host copy of the newest version. For a sync it calls the receivers, seats those that
answer in an epoch (the communicator is reused while the same ones are there), sends bucket by bucket and waits for
their acknowledgements. Who does not answer, or is lost in mid-transfer, costs one deadline: the next epoch is without
it. Then the ledger makes the version current. A receiver that lacks the current version, for whatever reason, gets it
from the host copy, also while the trainer waits for data.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import redis
import torch

from buffer.errors import BufferUnavailable, DeadlineExceeded, Fenced, ForebayError
from buffer.ledger import Ledger
from buffer.members import Members
from weight_sync.communicators import transport
from weight_sync.communicators.base import Communicator, CommunicatorFailed, Transport
from weight_sync.manifest import Layout, Manifest, digest, layout_of, place
from weight_sync.registry import Current, Epoch, ReceiverRecord, Registry, Seat, local_address
from weight_sync.settings import WeightSyncSettings
from weight_sync.shadow import checksum, write_tensor

log = logging.getLogger("forebay.weight_sync")

IDLE_SECONDS = 0.25  # how often the thread looks for receivers that lack the current version
ALIVE_SECONDS = 0.5  # how often liveness is read while waiting for receivers
ATTEMPTS = 4  # epochs for one sync; receivers still without it get it as late joiners
LONGEST_PAUSE_SECONDS = 30.0

Event = Callable[[str, str, str], None]  # kind, who, text: Metrics.event


class Publication:
    """A version on its way."""

    def __init__(self, step: int, copy: "_HostCopy", probe: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
        self.step = step
        self.version = -1  # known once it is current
        self.waiting_for = "the publisher's thread"
        self._copy = copy
        self._probe = probe
        self._done = threading.Event()
        self._error: ForebayError | None = None

    def wait(self, seconds: float) -> int:
        """The version's number once it is current; raises DeadlineExceeded naming whom it waits for."""
        if not self._done.wait(seconds):
            raise DeadlineExceeded(
                f"the weights of step {self.step} were not published after {seconds:.0f} s: waiting for "
                f"{self.waiting_for}",
                cure="look at the log of whoever is named; `weight_sync.join_seconds` and `.transfer_seconds` bound "
                "what one of them can cost",
            )
        if self._error is not None:
            raise self._error
        return self.version

    def done(self) -> bool:
        """Whether it is current, or failed."""
        return self._done.is_set()

    def _finish(self, version: int = -1, error: ForebayError | None = None) -> None:
        self.version, self._error = version, error
        self._done.set()


class _HostCopy:
    """The bytes of one version in host memory, which is kept from one version to the next."""

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None) -> None:
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._memory: list[torch.Tensor] = []
        self.layout = Layout(tensors=(), bucket_sizes=())

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors one by one, as they are gathered; their checksums are in ``layout``."""
        given: list[torch.Tensor] = []

        def describe() -> Iterator[tuple[str, str, Sequence[int]]]:
            for name, tensor in tensors:
                given[:] = [tensor]
                yield name, self._wire_dtype(tensor), tuple(tensor.shape)

        entries = []
        for entry in place(describe(), self._bucket_bytes):
            self._reserve(entry.bucket, entry.offset + entry.size)
            write_tensor(self._memory, entry, entry.name, given[0])
            entries.append(msgspec.structs.replace(entry, checksum=checksum(self._memory, entry)))
        self.layout = layout_of(entries)

    def buckets(self) -> Iterator[torch.Tensor]:
        """What travels, in order."""
        for memory, size in zip(self._memory, self.layout.bucket_sizes, strict=False):
            yield memory[:size]

    def _wire_dtype(self, tensor: torch.Tensor) -> str:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        return str(dtype).removeprefix("torch.")

    def _reserve(self, bucket: int, size: int) -> None:
        if bucket == len(self._memory):
            self._memory.append(torch.zeros(max(self._bucket_bytes, size), dtype=torch.uint8))
        elif self._memory[bucket].numel() < size:
            self._memory[bucket] = torch.zeros(size, dtype=torch.uint8)


class Publisher:
    """Sends versions, from the trainer's rank 0."""

    def __init__(
        self,
        client: "redis.Redis",
        run: str,
        *,
        fence: int,
        transports: Sequence[str | Transport],
        settings: WeightSyncSettings,
        ledger: Ledger,
        members: Members,
        dtype: str | None = None,
        event: Event | None = None,
    ) -> None:
        """``transports``: names of communicators, or transports; each has epochs of its own. ``dtype``: the type that
        floating-point weights travel in (none: as they are given)."""
        wire: torch.dtype | None = getattr(torch, dtype) if dtype else None
        self._registry = Registry(client, run)
        self._fence = fence
        self._settings = settings
        self._ledger = ledger
        self._channels = [
            _Channel(
                transport(kind, host=local_address(client)) if isinstance(kind, str) else kind,
                self._registry,
                fence,
                settings,
                members,
                event or _log_event,
            )
            for kind in transports
        ]
        self._copies = [_HostCopy(settings.bucket_bytes, wire) for _ in range(2)]
        self._change = threading.Condition()
        self._pending: Publication | None = None
        self._active: Publication | None = None  # what the thread is at
        self._sending: _HostCopy | None = None
        self._current: tuple[_HostCopy, Manifest] | None = None
        self._failure: ForebayError | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="forebay-publisher", daemon=True)

    def start(self) -> None:
        """Begin to serve receivers."""
        self._registry.check_fence(self._fence)
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """End the thread and the epochs; a broadcast that runs is left to its own deadline."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)
        for channel in self._channels:
            channel.close()

    def longest_seconds(self) -> float:
        """What a sync can take at most: each of its epochs costs two joins and a transfer for each transport."""
        one = 2 * self._settings.join_seconds + self._settings.transfer_seconds
        return ATTEMPTS * one * len(self._channels)

    def publish(
        self,
        step: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        probe_token_ids: Sequence[int],
        probe_log_probs: Sequence[float],
    ) -> Publication:
        """Copy the weights (they may change as soon as this returns) and hand them to the thread."""
        copy = self._free_copy()
        copy.fill(tensors)
        probe = (tuple(map(int, probe_token_ids)), tuple(map(float, probe_log_probs)))
        publication = Publication(step, copy, probe)
        with self._change:
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                raise ForebayError("the publisher was stopped before it sent the weights")
            self._pending = publication
            self._change.notify_all()
        return publication

    def _free_copy(self) -> _HostCopy:
        """A copy that is neither being sent nor waiting to be; the older one when both are free."""
        # The sync that runs may be one for late joiners.
        seconds = 2 * self.longest_seconds()
        with self._change:

            def free() -> bool:
                return self._pending is None or self._failure is not None or self._stopping

            if not self._change.wait_for(free, seconds):
                assert self._pending is not None
                raise DeadlineExceeded(
                    f"the weights of step {self._pending.step} were not on their way after {seconds:.0f} s",
                    cure="look at the publisher's log for whom it waits for",
                )
            if self._failure is not None:
                raise self._failure
            current = self._current[0] if self._current else None
            choice = [copy for copy in self._copies if copy is not self._sending]
            copy = next((copy for copy in choice if copy is not current), choice[0])
            if copy is current:
                self._current = None  # a newer version is on its way already
            return copy

    # -- the thread
    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except ForebayError as error:
            log.error("the publisher has ended: %s", error)
            self._fail(error)
        except Exception as error:
            self._fail(ForebayError(f"the publisher's thread broke: {error!r}", cure="report this with the log"))
            raise
        finally:
            for channel in self._channels:
                channel.close()

    def _turn(self) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._pending is not None or self._stopping, IDLE_SECONDS)
            if self._stopping:
                if self._pending is not None:
                    self._pending._finish(error=ForebayError("the publisher was stopped before it sent the weights"))
                return False
            publication, self._pending = self._pending, None
            self._active = publication
            held = self._current
            self._sending = publication._copy if publication else held[0] if held else None
            self._change.notify_all()
        try:
            if publication is not None:
                self._publish(publication)
            elif held is not None:
                for channel in self._channels:
                    channel.serve_late(held[1], held[0])
        except BufferUnavailable as error:  # it has waited for the server's return; the next turn tries anew
            log.warning("the publisher cannot reach Redis: %s", error)
            if publication is not None:
                publication._finish(error=error)
        finally:
            with self._change:
                self._sending = None
        self._active = None
        return True

    def _publish(self, publication: Publication) -> None:
        copy = publication._copy
        manifest = Manifest(
            version=self._ledger.next_version(),
            step=publication.step,
            fence=self._fence,
            tensors=copy.layout.tensors,
            bucket_sizes=copy.layout.bucket_sizes,
            probe_token_ids=publication._probe[0],
            probe_log_probs=publication._probe[1],
        )

        def waiting(text: str) -> None:
            publication.waiting_for = text

        for channel in self._channels:
            channel.send(manifest, copy, waiting)
        waiting("the ledger")
        version = self._ledger.publish(fence=self._fence, step=publication.step)
        if version != manifest.version:
            raise Fenced(
                f"the weights of step {publication.step} were sent as version {manifest.version}, but the ledger made "
                f"version {version} current",
                cure="another publisher is at work on this run: end one of them",
            )
        self._registry.write_current(
            Current(fence=self._fence, version=version, step=publication.step, manifest=digest(manifest))
        )
        with self._change:
            self._current = (copy, manifest)
        publication._finish(version)

    def _fail(self, error: ForebayError) -> None:
        with self._change:
            self._failure = error
            for publication in (self._active, self._pending):
                if publication is not None:
                    publication._finish(error=error)
            self._change.notify_all()


class _Channel:
    """One transport: its receivers, its epoch, its communicator."""

    def __init__(
        self,
        transport: Transport,
        registry: Registry,
        fence: int,
        settings: WeightSyncSettings,
        members: Members,
        event: Event,
    ) -> None:
        self._transport = transport
        self._registry = registry
        self._fence = fence
        self._settings = settings
        self._members = members
        self._event = event
        self._epoch: Epoch | None = None
        self._communicator: Communicator | None = None
        self._silent: dict[Seat, int] = {}  # did not answer; their beat then
        self._pause = 0.0
        self._not_before = 0.0

    def send(self, manifest: Manifest, copy: _HostCopy, waiting: Callable[[str], None]) -> None:
        """Send a version to all receivers that are there, in as many epochs as it takes (at most ATTEMPTS)."""
        self._registry.write_manifest(manifest)
        for _ in range(ATTEMPTS):
            wanted = self._wanted()
            if not wanted or not self._lacking(wanted, manifest):
                return
            try:
                self._open(list(wanted), waiting)
                if self._epoch is None:
                    return
                self._transfer(manifest, copy, waiting)
            except CommunicatorFailed as error:
                self._event("epoch", "publisher", f"version {manifest.version}: {error}; the next epoch follows")
                self.close()
        left = self._lacking(self._wanted(), manifest)
        if left:
            self._event("weights", "publisher", f"version {manifest.version} did not reach {_names(left)}")

    def serve_late(self, manifest: Manifest, copy: _HostCopy) -> None:
        """Send the current version again when a receiver lacks it."""
        if time.monotonic() < self._not_before or not self._lacking(self._wanted(), manifest):
            return
        self.send(manifest, copy, _ignore)
        if self._lacking(self._wanted(), manifest):
            self._pause = min(max(2 * self._pause, 1.0), LONGEST_PAUSE_SECONDS)
            self._not_before = time.monotonic() + self._pause
        else:
            self._pause = 0.0

    def close(self) -> None:
        """End the epoch."""
        if self._communicator is not None:
            self._communicator.close()
        self._communicator, self._epoch = None, None

    def _wanted(self) -> dict[Seat, ReceiverRecord]:
        """Receivers of this transport whose process is alive and stays."""
        incarnations = {
            member.name: member.incarnation
            for member in self._members.all(role="producer")
            if member.alive and member.state != "draining"
        }
        wanted = {}
        for record in self._registry.receivers().values():
            seat = Seat(record.member, record.incarnation)
            alive = incarnations.get(record.member) == record.incarnation
            if alive and record.transport == self._transport.name and record.beat > self._silent.get(seat, -1):
                self._silent.pop(seat, None)
                wanted[seat] = record
        return wanted

    def _lacking(self, receivers: Mapping[Seat, ReceiverRecord], manifest: Manifest) -> list[Seat]:
        wanted = digest(manifest)
        return [seat for seat, record in receivers.items() if record.manifest != wanted]

    def _open(self, wanted: list[Seat], waiting: Callable[[str], None]) -> None:
        """Have an epoch with the wanted receivers: the standing one if they are its members, else a new one."""
        if self._communicator is not None and self._epoch is not None and set(self._epoch.seats) == set(wanted):
            return
        self.close()
        epoch = Epoch(
            fence=self._fence,
            number=self._registry.next_epoch(self._fence),
            transport=self._transport.name,
            phase="calling",
            seats=tuple(wanted),
        )
        self._registry.write_epoch(epoch)
        seats = self._await_answers(epoch, waiting)
        if not seats:
            return
        rendezvous = self._transport.create_rendezvous()
        epoch = msgspec.structs.replace(epoch, phase="open", seats=seats, rendezvous=rendezvous)
        self._registry.write_epoch(epoch)
        waiting(f"{_names(seats)} to join epoch {epoch.number}")
        self._communicator = self._transport.connect(
            rendezvous, epoch=epoch.number, rank=0, size=len(seats) + 1, seconds=self._settings.join_seconds
        )
        self._epoch = epoch
        self._event("epoch", "publisher", f"epoch {epoch.number} over {self._transport.name} with {_names(seats)}")

    def _await_answers(self, epoch: Epoch, waiting: Callable[[str], None]) -> tuple[Seat, ...]:
        """The called receivers that answer in time, in order."""

        def answered(record: ReceiverRecord) -> bool:
            return record.answered == epoch.number

        missing = self._await(epoch.seats, answered, self._settings.join_seconds, waiting)
        if missing:
            self._event("epoch", "publisher", f"epoch {epoch.number} goes on without {_names(missing)}: no answer")
        return tuple(seat for seat in epoch.seats if seat not in missing)

    def _transfer(self, manifest: Manifest, copy: _HostCopy, waiting: Callable[[str], None]) -> None:
        """One sync in the open epoch."""
        assert self._epoch is not None and self._communicator is not None
        deadline = time.monotonic() + self._settings.transfer_seconds
        self._epoch = msgspec.structs.replace(self._epoch, sync=self._epoch.sync + 1, version=manifest.version)
        self._registry.write_epoch(self._epoch)
        number, sync, seats = self._epoch.number, self._epoch.sync, self._epoch.seats
        waiting(f"{_names(seats)} to receive version {manifest.version} in epoch {number}")
        for bucket in copy.buckets():
            self._communicator.broadcast(bucket, deadline - time.monotonic())

        def went_through(record: ReceiverRecord) -> bool:
            return record.epoch == number and record.sync >= sync

        missing = self._await(seats, went_through, deadline - time.monotonic(), waiting)
        if missing:
            raise CommunicatorFailed(f"no acknowledgement from {_names(missing)} in epoch {number}")

    def _await(
        self,
        seats: Sequence[Seat],
        fulfilled: Callable[[ReceiverRecord], bool],
        seconds: float,
        waiting: Callable[[str], None],
    ) -> list[Seat]:
        """Wait until the receivers' records fulfil something; returns those that did not, which are silent from now
        on until they report again. One that is dead or has left is not waited for."""
        deadline = time.monotonic() + seconds
        missing = list(seats)
        gone: list[Seat] = []
        look = time.monotonic() + ALIVE_SECONDS
        seen = self._registry.last_report()
        while True:
            records = self._registry.receivers()
            still = []
            for seat in missing:
                record = records.get(seat.member)
                if record is None or record.incarnation != seat.incarnation:
                    gone.append(seat)
                elif not fulfilled(record):
                    still.append(seat)
            missing = still
            if missing and time.monotonic() > look:
                alive = {Seat(member.name, member.incarnation) for member in self._members.all() if member.alive}
                gone += [seat for seat in missing if seat not in alive]
                missing = [seat for seat in missing if seat in alive]
                look = time.monotonic() + ALIVE_SECONDS
            if not missing:
                return gone
            waiting(_names(missing))
            left = deadline - time.monotonic()
            if left <= 0:
                self._silent.update({seat: records[seat.member].beat for seat in missing})
                return gone + missing
            seen = self._registry.wait_report(seen, min(left, ALIVE_SECONDS))


def _names(seats: Iterable[Seat]) -> str:
    return ", ".join(seat.member for seat in seats)


def _ignore(_text: str) -> None:
    """Nobody waits for a late joiner."""


def _log_event(kind: str, who: str, text: str) -> None:
    log.info("%s: %s: %s", kind, who, text)
