"""One scorer process: it judges what it reads, answers in order, and dies with its producer.

Lines of JSON in (a batch each) and out (one answer for each item); nothing but answers leaves on the pipe: what a
scorer prints goes to the error stream. The producer measures the time and kills this process when it runs out.
"""

import math
import os
import sys
from numbers import Real
from typing import Any, BinaryIO, Literal

import msgspec

from buffer.errors import SpecError
from buffer.processes import die_with_parent
from producer.rewards import Scorer, Unscorable, resolve

LONGEST_ERROR = 500


class Item(msgspec.Struct, frozen=True):
    """One completion to be judged by one scorer."""

    scorer: int  # place in the list of scorers
    completion: str
    row: dict[str, Any]
    finish_reason: str


class Answer(msgspec.Struct, frozen=True):
    """What came of an item."""

    outcome: Literal["scored", "unscorable", "failed"]
    value: float = 0.0
    error: str = ""


class ScorerChoice(msgspec.Struct, frozen=True):
    """A scorer's name and options: the first line is the list of them."""

    name: str
    options: dict[str, Any]


class Ready(msgspec.Struct, frozen=True):
    """The first answer: the scorers are imported, or why not."""

    error: str = ""


def judge(scorer: Scorer, item: Item, options: dict[str, Any]) -> Answer:
    """Run one scorer on one item; whatever goes wrong in a user's function is an answer, not an end."""
    try:
        value: object = scorer(item.completion, item.row, item.finish_reason, **options)
    except Exception as error:  # noqa: BLE001 - a scorer may be anybody's code
        return Answer("failed", error=f"{type(error).__name__}: {error}"[:LONGEST_ERROR])
    if isinstance(value, Unscorable):
        return Answer("unscorable")
    if not isinstance(value, Real):
        return Answer("failed", error=f"returned {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        return Answer("failed", error="returned a number that no float can hold")
    if not math.isfinite(number):
        return Answer("failed", error=f"returned {number}")
    return Answer("scored", number)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Read the scorers' names, say that they are ready, then judge batches until the pipe is closed."""

    def write(record: msgspec.Struct) -> None:
        answers.write(msgspec.json.encode(record) + b"\n")
        answers.flush()

    choices = msgspec.json.decode(requests.readline(), type=list[ScorerChoice])
    try:
        scorers = [resolve(choice.name) for choice in choices]
    except SpecError as error:
        write(Ready(f"{error.what}"))
        return
    write(Ready())
    decoder = msgspec.json.Decoder(list[Item])
    for line in requests:
        for item in decoder.decode(line):
            write(judge(scorers[item.scorer], item, choices[item.scorer].options))


def main() -> None:
    """Entry point: ``python -m producer.rewards.worker PARENT``."""
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb", buffering=1 << 16)
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
