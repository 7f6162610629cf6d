"""Metrics, events and flags of a run are in Redis, so that the controller can die and lose nothing.

The history is bounded by a stated number of entries (the newest are kept); TensorBoard has all of it.
"""

from typing import Any

import msgspec
import redis

from buffer.scripts import Scripts, decode, pairs, prefix

HISTORY = 10_000  # entries kept of each stream


class Metrics:
    """Numbers by step, rollout numbers by producer, evaluations, events."""

    def __init__(self, client: "redis.Redis", run: str) -> None:
        self._client = client
        self._prefix = prefix(run)

    def record_step(self, step: int, values: dict[str, float]) -> None:
        """Numbers of one optimizer step (idempotent: the last call for a step counts)."""
        self._record("steps", step, {**values, "step": step})

    def steps(self, since: int = 0) -> list[dict[str, float]]:
        """Recorded steps above ``since``, each with the key `step`, in order."""
        return self._read("steps", f"({since}")

    def record_producer(self, member: str, values: dict[str, float]) -> None:
        """Latest numbers of a producer (tokens_per_second, running, version, ...), overwritten."""
        self._client.hset(f"{self._prefix}metrics:producers", member, msgspec.msgpack.encode(values))

    def producers(self) -> dict[str, dict[str, float]]:
        """Latest numbers by producer."""
        found: Any = self._client.hgetall(f"{self._prefix}metrics:producers")
        return {decode(name): msgspec.msgpack.decode(values) for name, values in found.items()}

    def record_evaluation(self, version: int, values: dict[str, float]) -> None:
        """Result of an evaluation at a version: accuracy, problems, mean_length, seconds, step."""
        self._record("evaluations", version, {**values, "version": version})

    def evaluations(self) -> list[dict[str, float]]:
        """All evaluations by version, each with the key `version`."""
        return self._read("evaluations", "-inf")

    def event(self, kind: str, who: str, text: str) -> None:
        """Something a person wants to know: a join, a quarantine, an epoch, a failure. One may be listed twice when
        the server's answer was lost."""
        entry: dict[Any, Any] = {"kind": kind, "who": who, "text": text}
        self._client.xadd(f"{self._prefix}events", entry, maxlen=HISTORY, approximate=False)

    def events(self, count: int = 100) -> list[dict[str, Any]]:
        """Newest events, oldest first: kind, who, text, time (server seconds)."""
        newest: Any = self._client.xrevrange(f"{self._prefix}events", count=count)
        return [
            {**pairs(entry), "time": int(decode(number).split("-")[0]) / 1000} for number, entry in reversed(newest)
        ]

    def _record(self, name: str, place: int, values: dict[str, float]) -> None:
        key = f"{self._prefix}metrics:{name}"
        pipeline = self._client.pipeline(transaction=True)
        pipeline.zremrangebyscore(key, place, place)
        pipeline.zadd(key, {msgspec.msgpack.encode(values): place})
        pipeline.zremrangebyrank(key, 0, -HISTORY - 1)
        pipeline.execute()

    def _read(self, name: str, lowest: str) -> list[dict[str, float]]:
        found: Any = self._client.zrangebyscore(f"{self._prefix}metrics:{name}", lowest, "+inf")
        return [msgspec.msgpack.decode(values) for values in found]


class Control:
    """Flags that people set and services obey."""

    def __init__(self, client: "redis.Redis", run: str) -> None:
        self._client = client
        self._key = f"{prefix(run)}control"

    def set(self, flag: str, value: str) -> None:
        """Flags: `stop` ("drain"), `pause` ("1"/""), `checkpoint` ("1"; the next plan takes it with it), `phase`
        (starting, running, draining, finished, failed: text)."""
        if value:
            self._client.hset(self._key, flag, value)
        else:
            self._client.hdel(self._key, flag)

    def get(self, flag: str) -> str:
        """The flag's value, "" when unset."""
        return decode(self._client.hget(self._key, flag))


class EvaluationQueue:
    """Evaluations that are due; a producer claims one, with a deadline, and a claim that runs out is claimed anew."""

    def __init__(self, client: "redis.Redis", run: str) -> None:
        self._client = client
        self._scripts = Scripts(client, run)
        self._open = f"{prefix(run)}evaluations:open"

    def request(self, version: int, step: int) -> None:
        """Ask for an evaluation of ``version`` (idempotent)."""
        self._scripts.call("request_evaluation", str(version), str(step))

    def claim(self, member: str, *, version: int, seconds: float) -> tuple[int, int] | None:
        """(version asked for, step) of the oldest open request for ``version`` or an older one, or None. A member
        that has a claim already gets it again."""
        answer = self._scripts.call("claim_evaluation", member, str(version), str(int(seconds * 1000)))
        return (int(answer[0]), int(answer[1])) if answer else None

    def release(self, member: str) -> int:
        """Let others claim what a member that is known to be gone has claimed; number of requests."""
        return int(self._scripts.call("release_evaluations", member))

    def done(self, version: int) -> None:
        """The result is recorded."""
        self._client.zrem(self._open, str(version))

    def open(self) -> list[int]:
        """Versions asked for and not done."""
        versions: Any = self._client.zrange(self._open, 0, -1)
        return [int(version) for version in versions]
