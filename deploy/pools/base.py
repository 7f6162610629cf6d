"""A pool keeps as many processes of one service as it is told to, wherever they run."""

import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from buffer.errors import ForebayError

RESTARTS = 4  # of one name in a row
LIVED_SECONDS = 120.0  # a process that lived longer has not failed in a row


@dataclass(frozen=True)
class Ended:
    """A process that ended by itself."""

    name: str
    code: int  # of the exit; negative: the signal that killed it
    last_words: str  # the end of what it wrote
    seconds: float  # how long it lived

    @property
    def killed(self) -> bool:
        """Whether a signal ended it."""
        return self.code < 0 or self.code > 128

    def how(self) -> str:
        """How it ended, with its last words."""
        if self.killed:
            number = -self.code if self.code < 0 else self.code - 128
            how = f"was killed by {signal.Signals(number).name}" if number in list(signal.Signals) else f"got {number}"
        else:
            how = f"ended with code {self.code}"
        return f"{how} after {self.seconds:.0f} s" + (f":\n{self.last_words}" if self.last_words else "")


class RunFailed(ForebayError):
    """A service ended with an error that a new start would not cure; its exit code is passed on."""

    def __init__(self, what: str, code: int, *, where: str = "", cure: str = "") -> None:
        super().__init__(what, where=where, cure=cure)
        self.code = code

    @classmethod
    def because(cls, ended: Ended, who: str, log: Path) -> "RunFailed":
        """The failure of a run whose process has ended."""
        return cls(
            f"{who} {ended.how()}",
            ended.code if 0 < ended.code < 128 else 1,
            where=str(log),
            cure="" if "cure:" in ended.last_words else "read its log, then go on with --resume",
        )


class Restarts:
    """How often a process may be started again: `RESTARTS` times in a row, where one that lived long begins anew."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()

    def allow(self, ended: Ended) -> bool:
        """Count an end; whether the process may be started again."""
        if ended.seconds > LIVED_SECONDS:
            self._failures[ended.name] = 0
        self._failures[ended.name] += 1
        return self._failures[ended.name] <= RESTARTS

    def forget(self, name: str) -> None:
        """The next process of that name begins anew."""
        del self._failures[name]


class Pool(Protocol):
    """The processes of one service, by name."""

    def start(self, name: str) -> None:
        """Start the process of that name."""

    def names(self) -> list[str]:
        """Processes that are there."""

    def collect(self) -> list[Ended]:
        """Processes that ended since the last call."""

    def ask_to_end(self, *names: str) -> None:
        """Ask the named ones, or all, to drain and leave."""

    def kill(self, *names: str) -> None:
        """End the named ones, or all, at once."""

    def stop(self, seconds: float) -> None:
        """Ask all to end, insist after the deadline, and return when none is left."""
