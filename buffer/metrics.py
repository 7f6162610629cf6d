"""Metrics, events and flags of a run are in Redis, so that the controller can die and lose nothing.

The history is bounded by a stated number of entries (the newest are kept); TensorBoard has all of it.
"""

from typing import Any

import redis

HISTORY = 10_000  # entries kept of each stream


class Metrics:
    """Numbers by step, rollout numbers by producer, evaluations, events."""

    def __init__(self, client: "redis.Redis", run: str) -> None:
        raise NotImplementedError

    def record_step(self, step: int, values: dict[str, float]) -> None:
        """Numbers of one optimizer step (idempotent: the last call for a step counts)."""

    def steps(self, since: int = 0) -> list[dict[str, float]]:
        """Recorded steps above ``since``, each with the key `step`, in order."""

    def record_producer(self, member: str, values: dict[str, float]) -> None:
        """Latest numbers of a producer (tokens_per_second, running, version, ...), overwritten."""

    def producers(self) -> dict[str, dict[str, float]]:
        """Latest numbers by producer."""

    def record_evaluation(self, version: int, values: dict[str, float]) -> None:
        """Result of an evaluation at a version: accuracy, problems, mean_length, seconds, step."""

    def evaluations(self) -> list[dict[str, float]]:
        """All evaluations by version, each with the key `version`."""

    def event(self, kind: str, who: str, text: str) -> None:
        """Something a person wants to know: a join, a quarantine, an epoch, a failure."""

    def events(self, count: int = 100) -> list[dict[str, Any]]:
        """Newest events, oldest first: kind, who, text, time (server seconds)."""


class Control:
    """Flags that people set and services obey."""

    def __init__(self, client: "redis.Redis", run: str) -> None:
        raise NotImplementedError

    def set(self, flag: str, value: str) -> None:
        """Flags: `stop` ("drain"), `pause` ("1"/""), `checkpoint` ("1"), `phase` (starting, running, draining,
        finished, failed: text)."""

    def get(self, flag: str) -> str:
        """The flag's value, "" when unset."""


class EvaluationQueue:
    """Evaluations that are due; a producer claims one, with a deadline, and a claim that runs out is claimed anew."""

    def __init__(self, client: "redis.Redis", run: str) -> None:
        raise NotImplementedError

    def request(self, version: int, step: int) -> None:
        """Ask for an evaluation of ``version`` (idempotent)."""

    def claim(self, member: str, *, version: int, seconds: float) -> tuple[int, int] | None:
        """(version asked for, step) of the oldest open request for ``version`` or an older one, or None."""

    def done(self, version: int) -> None:
        """The result is recorded."""

    def open(self) -> list[int]:
        """Versions asked for and not done."""
