"""This replica runs one version at a time, says so only after its proof, and after a failed proof says nothing more.

The sequence: deal with what runs as the pool's mode says, pause, load, resume, probe. What was sampled between the swap
and the proof waits at the gate.
An evaluation runs between two updates, so that its version stays.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from buffer.errors import DeadlineExceeded, ProofFailed
from producer.engine.base import Engine
from producer.gate import Gate
from producer.requests import Requests
from weight_sync.manifest import Manifest
from weight_sync.settings import UpdateMode
from weight_sync.shadow import ShadowReference

LOOK_SECONDS = 0.5  # between two looks for an evaluation that is due
PAUSE_SECONDS = 120.0  # most that a pause or a resume may take
LOAD_SECONDS = 600.0  # most that a load may take, from the shadow in this machine's memory

log = structlog.get_logger()


class Weights(Protocol):
    """What an update needs of weight_sync (``producer.weights`` is the real one)."""

    async def probe(self, engine: Engine, manifest: Manifest) -> None:
        """Compare the engine's log-probs with the trainer's and record it; raises ProofFailed."""

    def release(self, reference: ShadowReference) -> None:
        """The shadow's memory may be used again."""


@dataclass
class Updates:
    """The versions that arrive for one engine."""

    engine: Engine
    requests: Requests
    mode: UpdateMode
    drain_seconds: float
    weights: Weights
    gate: Gate
    on_proved: Callable[[int], Awaitable[None]]
    on_fault: Callable[[ProofFailed], Awaitable[None]]
    between: Callable[[], Awaitable[None]]
    """Called while nothing is updated: evaluations that are due."""
    seconds: float = 0.0  # of the last update, pause to resume
    count: int = 0
    _newest: tuple[Manifest, ShadowReference] | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def offer(self, manifest: Manifest, reference: ShadowReference) -> None:
        """A whole, verified version is there (called in the event loop); an older one not yet loaded is skipped."""
        if self._newest is not None:
            self.weights.release(self._newest[1])
        self._newest = (manifest, reference)
        self._arrived.set()

    async def first(self, seconds: float) -> None:
        """Wait for the first version, load and prove it."""
        try:
            await asyncio.wait_for(self._arrived.wait(), seconds)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no weights came from the consumer within {seconds:.0f} s",
                where="the first policy version",
                cure="look at the consumer's log: is it up, and can it reach Redis and this machine?",
            ) from None
        await self._apply()

    async def run(self) -> None:
        """Load and prove what arrives, for ever."""
        while True:
            if self.gate.fault is None:
                await self.between()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), LOOK_SECONDS)
            await self._apply()

    async def _apply(self) -> None:
        self._arrived.clear()
        if self._newest is None:
            return
        if self.gate.fault is not None:  # quarantined: it stays in the broadcasts, so that others get their weights
            self.weights.release(self._take()[1])
            return
        try:
            await self._settle()
            manifest, reference = self._take()  # only now: a newer one may have come meanwhile
            started = time.monotonic()
            try:
                await _within(self.engine.pause(), PAUSE_SECONDS, "pause")
                await _within(self.engine.load(reference, manifest.version), LOAD_SECONDS, "load weights")
                await _within(self.engine.resume(), PAUSE_SECONDS, "resume")
            finally:
                self.weights.release(reference)
        finally:
            self.requests.open_door()
        self.seconds = time.monotonic() - started
        self.count += 1
        try:
            await self.weights.probe(self.engine, manifest)
        except ProofFailed as fault:
            log.error("quarantined", version=manifest.version, error=str(fault))
            await self.gate.close(fault)
            await self.on_fault(fault)
            return
        # The ledger first: it must know what is proved before anybody leases with it.
        await self.on_proved(manifest.version)
        await self.gate.prove(manifest.version, manifest.step)
        log.info("version proved", version=manifest.version, step=manifest.step, seconds=round(self.seconds, 4))

    def _take(self) -> tuple[Manifest, ShadowReference]:
        assert self._newest is not None
        newest, self._newest = self._newest, None
        return newest

    async def _settle(self) -> None:
        """Bring what runs where the mode wants it at a load."""
        if self.mode == "in_flight":
            return
        self.requests.close_door()
        if self.mode == "abort_resume":
            await self.requests.abort(PAUSE_SECONDS, go_on=True)
        elif not await self.requests.ended(self.drain_seconds):
            log.warning("prompts did not end in time for an update", seconds=self.drain_seconds)
            await self.requests.abort(PAUSE_SECONDS, go_on=False)


async def _within(action: Awaitable[None], seconds: float, what: str) -> None:
    try:
        await asyncio.wait_for(action, seconds)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the engine did not {what} within {seconds:.0f} s",
            where="the update of the weights",
            cure="the engine is stuck: see its log; this producer ends and its prompts go back",
        ) from None
