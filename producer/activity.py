"""What a producer does with its time is counted as it happens, and why it waits is never a guess.

Generation and scoring seconds are wall time with at least one prompt in that phase, idle seconds are wall time with
none in either; all are sums since the start.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from buffer.records import Group


class Activity:
    """Counters of one producer; used from one event loop, read from any thread."""

    def __init__(self) -> None:
        self.waiting = "starting"  # a sentence: why no prompt is leased at the moment; "" when one was just leased
        self.tokens = 0
        self.groups = 0
        self.scored = 0
        self.failed = 0
        self.unscorable = 0
        self.reward_sum = 0.0
        self.dropped: Counter[str] = Counter()
        self.last_error = ""
        self._in: Counter[str] = Counter()
        self._seconds = {"generation": 0.0, "scoring": 0.0, "idle": 0.0}
        self._since = time.monotonic()
        self._reported = (self._since, 0)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around the generation of one prompt."""
        with self._phase("generation"):
            yield

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Around the scoring of one prompt."""
        with self._phase("scoring"):
            yield

    def count_dropped(self, reason: str) -> None:
        """A prompt ended without a group that trains."""
        self.dropped[reason] += 1

    def count_group(self, group: Group, reason: str) -> None:
        """A group was committed, usable when there is no reason against it."""
        self.groups += not reason
        if reason:
            self.count_dropped(reason)
        for sample in group.samples:
            self.scored += sample.outcome == "scored"
            self.failed += sample.outcome == "failed"
            self.unscorable += sample.outcome == "unscorable"
            self.reward_sum += sample.reward if sample.outcome == "scored" else 0.0

    def values(self, *, running: int, version: int) -> dict[str, float]:
        """The numbers of this producer; the rate of tokens is since the last call."""
        self._settle()
        now = time.monotonic()
        before, tokens = self._reported
        self._reported = (now, self.tokens)
        return {
            "tokens_per_second": (self.tokens - tokens) / max(now - before, 1e-9),
            "running": float(running),
            "version": float(version),
            "tokens": float(self.tokens),
            "groups": float(self.groups),
            "samples_scored": float(self.scored),
            "samples_failed": float(self.failed),
            "samples_unscorable": float(self.unscorable),
            "mean_reward": self.reward_sum / self.scored if self.scored else 0.0,
            "generation_seconds": self._seconds["generation"],
            "scoring_seconds": self._seconds["scoring"],
            "idle_seconds": self._seconds["idle"],
            **{f"dropped: {reason}": float(count) for reason, count in self.dropped.items()},
        }

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._settle()
        self._in[name] += 1
        try:
            yield
        finally:
            self._settle()
            self._in[name] -= 1

    def _settle(self) -> None:
        now = time.monotonic()
        busy = [name for name, count in self._in.items() if count]
        for name in busy or ["idle"]:
            self._seconds[name] += now - self._since
        self._since = now
