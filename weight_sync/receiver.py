"""A receiver hands over only versions that arrived whole, checked, from the newest publisher, and that are current.

It runs in a thread outside the engine's loop and fills a shadow in host memory while the engine generates. A broken
epoch costs it nothing but the half-filled shadow: it keeps what it has and waits for the next call.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import redis
import torch

from buffer.errors import BufferUnavailable, ForebayError
from weight_sync.communicators import transport
from weight_sync.communicators.base import Communicator, CommunicatorFailed
from weight_sync.manifest import Manifest, digest
from weight_sync.registry import Epoch, ReceiverRecord, Registry, Seat, local_address
from weight_sync.settings import WeightSyncSettings
from weight_sync.shadow import Shadow, ShadowBroken, ShadowReference, create_shadow, verify_tensor

log = logging.getLogger("forebay.weight_sync")

BEAT_SECONDS = 1.0
RELEASE_SECONDS = 5.0  # how long a sync may wait for a shadow that is in use
SHADOWS = 2


@dataclass
class _Slot:
    """A shadow and what it is for: `free`, `filling`, `held` (whole, not current yet), `given` (handed over)."""

    shadow: Shadow
    state: Literal["free", "filling", "held", "given"] = "free"
    manifest: Manifest | None = None


class Receiver:
    """Receives for one producer."""

    def __init__(
        self,
        client: "redis.Redis",
        run: str,
        member: str,
        incarnation: int,
        transport_name: str,
        settings: WeightSyncSettings,
        shadow_folder: str | Path,
        on_ready: Callable[[Manifest, ShadowReference], None],
    ) -> None:
        """``on_ready`` is called in the receiver's thread with a version that became current; it must return soon, and
        whoever gets the reference gives it back by ``release``, also when a newer one came before it was used."""
        self._registry = Registry(client, run)
        self._transport = transport(transport_name, host=local_address(client))
        self._settings = settings
        self._folder = Path(shadow_folder)
        self._on_ready = on_ready
        self._seat = Seat(member, incarnation)
        self._record = ReceiverRecord(member=member, incarnation=incarnation, transport=transport_name, beat=0)
        self._next_beat = 0.0
        self._fence = 0
        self._broken_epoch = 0
        self._communicator: Communicator | None = None
        self._epoch = 0
        self._slots: list[_Slot] = []
        self._released = threading.Condition()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="forebay-checksums")
        self._stopping = threading.Event()
        self._failure: ForebayError | None = None
        self._thread = threading.Thread(target=self._run, name="forebay-receiver", daemon=True)

    def start(self) -> None:
        """Sign in and begin to answer calls."""
        self._report()
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """Sign out, leave the epoch, remove the shadows; a broadcast that runs is left to its own deadline."""
        self._stopping.set()
        if self._communicator is not None:
            self._communicator.close()
        if self._thread.is_alive():
            self._thread.join(seconds)
        self._checker.shutdown(wait=False, cancel_futures=True)
        for slot in self._slots:
            slot.shadow.close()
        try:
            self._registry.remove_receiver(self._seat.member, self._seat.incarnation)
        except BufferUnavailable as error:
            log.warning("%s could not sign out: %s", self._seat.member, error)

    def release(self, reference: ShadowReference) -> None:
        """The shadow may be filled again."""
        with self._released:
            for slot in self._slots:
                if str(slot.shadow.path) == reference.path and slot.state == "given":
                    slot.state, slot.manifest = "free", None
            self._released.notify_all()

    def check(self) -> None:
        """Raise what ended the thread, if something did."""
        if self._failure is not None:
            raise self._failure

    # -- the thread
    def _run(self) -> None:
        try:
            seen = self._registry.last_change()
            while not self._stopping.is_set():
                try:
                    if time.monotonic() >= self._next_beat:
                        self._report()
                    self._follow()
                    self._hand_over()
                    seen = self._registry.wait_change(seen, 0.5)
                except BufferUnavailable as error:  # it has waited for the server's return; weights are not lost
                    log.warning("%s cannot reach Redis: %s", self._seat.member, error)
                    self._stopping.wait(1.0)
        except ForebayError as error:
            log.error("the receiver of %s has ended: %s", self._seat.member, error)
            self._failure = error
        except Exception as error:
            self._failure = ForebayError(f"the receiver's thread broke: {error!r}", cure="report this with the log")
            raise
        finally:
            self._leave()

    def _report(self, **changes: object) -> None:
        """Write this receiver's record; each report also shows that the thread runs."""
        self._record = msgspec.structs.replace(self._record, beat=self._record.beat + 1, **changes)
        self._registry.write_receiver(self._record)
        self._next_beat = time.monotonic() + BEAT_SECONDS

    def _follow(self) -> None:
        """Do what the publisher's epoch asks for."""
        epoch = self._registry.epoch(self._record.transport)
        if epoch is None:
            return
        if epoch.number != self._epoch:
            self._leave()
        if self._seat not in epoch.seats or epoch.number == self._broken_epoch:
            return
        if epoch.fence < self._fence:
            self._broken_epoch = epoch.number
            self._report(error=f"epoch {epoch.number} of an older publisher (fence {epoch.fence}) is refused")
            return
        try:
            if epoch.phase == "calling":
                if self._record.answered != epoch.number:
                    self._report(answered=epoch.number)
                return
            if self._communicator is None:
                self._join(epoch)
            if epoch.sync > self._done(epoch):
                self._receive(epoch)
        except CommunicatorFailed as error:
            log.warning("%s: %s", self._seat.member, error)
            self._broken_epoch = epoch.number
            self._leave()
            self._report(error=str(error))

    def _done(self, epoch: Epoch) -> int:
        return self._record.sync if self._record.epoch == epoch.number else 0

    def _join(self, epoch: Epoch) -> None:
        self._communicator = self._transport.connect(
            epoch.rendezvous,
            epoch=epoch.number,
            rank=epoch.seats.index(self._seat) + 1,
            size=len(epoch.seats) + 1,
            seconds=self._settings.join_seconds,
        )
        self._epoch = epoch.number

    def _leave(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
        self._communicator, self._epoch = None, 0
        for slot in self._slots:
            if slot.state == "filling":
                slot.state, slot.manifest = "free", None

    def _receive(self, epoch: Epoch) -> None:
        """Take part in one sync; what arrives is held if it is new and whole."""
        assert self._communicator is not None
        deadline = time.monotonic() + self._settings.transfer_seconds
        manifest = self._registry.manifest()
        if manifest is None or manifest.version != epoch.version or manifest.fence != epoch.fence:
            raise CommunicatorFailed(f"the manifest of version {epoch.version} was replaced before it was read")
        self._fence = max(self._fence, manifest.fence)
        slot = self._slot_for(manifest, deadline)
        checks: list[Future[None]] = []
        for number, size in enumerate(manifest.bucket_sizes):
            bucket = slot.shadow.buckets[number] if slot else self._discard(size)
            self._communicator.broadcast(bucket, deadline - time.monotonic())
            if slot:
                # While the next bucket arrives.
                checks.append(self._checker.submit(_check_bucket, slot.shadow, manifest, number))
        self._conclude(epoch, manifest, slot, checks, deadline)

    def _conclude(
        self, epoch: Epoch, manifest: Manifest, slot: _Slot | None, checks: list[Future[None]], deadline: float
    ) -> None:
        """Acknowledge the sync with what came of it."""
        if slot is None:
            error = "" if self._holds(manifest) else f"both shadows were in use when version {manifest.version} came"
            self._report(epoch=epoch.number, sync=epoch.sync, error=error)
            return
        try:
            for check in checks:
                check.result(max(deadline - time.monotonic(), 0.0))
        except (ShadowBroken, TimeoutError) as error:
            slot.state, slot.manifest = "free", None
            log.error("%s: %s", self._seat.member, error)
            self._report(epoch=epoch.number, sync=epoch.sync, error=str(error) or "checksums took too long")
            return
        for older in self._slots:
            if older.state == "held":
                older.state, older.manifest = "free", None  # it never became current, or this one is newer
        slot.state = "held"
        self._report(epoch=epoch.number, sync=epoch.sync, version=manifest.version, manifest=digest(manifest), error="")

    def _holds(self, manifest: Manifest) -> bool:
        return self._record.manifest == digest(manifest)

    def _slot_for(self, manifest: Manifest, deadline: float) -> _Slot | None:
        """A shadow to fill; None when the version is here already or every shadow is in use."""
        if self._holds(manifest):
            return None
        layout = manifest.layout()
        with self._released:

            def usable() -> list[_Slot]:
                # What is held but never became current is older than what comes now.
                return [slot for slot in self._slots if slot.state in ("free", "held")]

            if not usable() and len(self._slots) >= SHADOWS:
                self._released.wait_for(
                    lambda: bool(usable()), min(RELEASE_SECONDS, max(deadline - time.monotonic(), 0) / 2)
                )
            slot = min(usable(), key=lambda slot: slot.state != "free", default=None)
            if slot is not None and slot.shadow.layout != layout:
                slot.shadow.close()
                self._slots.remove(slot)
                slot = None
            if slot is None:
                if len(self._slots) >= SHADOWS:
                    return None
                slot = _Slot(create_shadow(layout, self._folder, self._seat.member))
                self._slots.append(slot)
            slot.state, slot.manifest = "filling", manifest
            return slot

    def _discard(self, size: int) -> torch.Tensor:
        """Memory for a bucket that nobody here needs."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size]

    def _hand_over(self) -> None:
        """Give the held version away once it is current."""
        slot = next((slot for slot in self._slots if slot.state == "held"), None)
        if slot is None or slot.manifest is None:
            return
        current = self._registry.current()
        if current is None or current.manifest != digest(slot.manifest):
            return
        slot.state = "given"
        self._on_ready(slot.manifest, slot.shadow.reference(slot.manifest))


def _check_bucket(shadow: Shadow, manifest: Manifest, number: int) -> None:
    for entry in manifest.tensors:
        if entry.bucket == number:
            verify_tensor(shadow.buckets, entry, manifest.version)
