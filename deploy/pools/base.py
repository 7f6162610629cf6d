"""A pool keeps as many processes of one service as it is told to, wherever they run."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Ended:
    """A process that ended by itself."""

    name: str
    code: int  # of the exit; negative: the signal that killed it
    last_words: str  # the end of what it wrote
    seconds: float  # how long it lived


class Pool(Protocol):
    """The processes of one service, by name."""

    def start(self, name: str) -> None:
        """Start the process of that name."""

    def names(self) -> list[str]:
        """Processes that are there."""

    def collect(self) -> list[Ended]:
        """Processes that ended since the last call."""

    def stop(self, seconds: float) -> None:
        """Ask all to end, insist after the deadline, and return when none is left."""
