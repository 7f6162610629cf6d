"""Nothing that a version not yet proved here has touched is committed, and nobody leases while nothing is proved."""

import asyncio

from buffer.errors import DeadlineExceeded, ProofFailed


class Gate:
    """The newest proved version; a quarantine closes the gate for good. Used from one event loop."""

    def __init__(self) -> None:
        self.proved = -1
        self.step = 0  # of the optimizer, that made the proved version
        self.fault: ProofFailed | None = None
        self._changed = asyncio.Condition()

    @property
    def open(self) -> bool:
        """Whether this producer may lease."""
        return self.proved >= 0 and self.fault is None

    async def prove(self, version: int, step: int) -> None:
        """``version``, which optimizer step ``step`` made, computes as the trainer's does."""
        async with self._changed:
            self.proved, self.step = version, step
            self._changed.notify_all()

    async def close(self, fault: ProofFailed) -> None:
        """A proof failed."""
        async with self._changed:
            self.fault = fault
            self._changed.notify_all()

    async def passed(self, version: int, seconds: float) -> None:
        """Wait until ``version`` (or a newer one, whose load went over it) is proved; raises ProofFailed when it never
        will be."""
        if self.fault is None and version <= self.proved:
            return
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.fault is not None or version <= self.proved)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the proof of version {version} was not there after {seconds:.0f} s",
                where="the update of this producer",
                cure="look at the producer's log; raise `weight_sync.transfer_seconds` for a slow engine",
            ) from None
        if self.fault is not None:
            raise self.fault
