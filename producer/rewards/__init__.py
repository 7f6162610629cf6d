"""A reward is a score, *unscorable* (it cannot be judged), or *failed* (the scorer broke): never one for another.

A scorer is a function ``(completion, row, finish_reason, **options)`` that returns a number or ``UNSCORABLE``; one that
raises, hangs, or returns anything else (NaN too) has failed. ``row`` has the dataset's columns and, under the mapped
names, `question`, `answer` and `task`. Scorers run in processes of their own (``producer.rewards.processes``).
"""

import importlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Protocol

from buffer.errors import SpecError
from producer.settings import RewardSettings

KNOWN = ("math", "exact", "format")


class Unscorable(Enum):
    """The type of ``UNSCORABLE``."""

    UNSCORABLE = "unscorable"


UNSCORABLE: Literal[Unscorable.UNSCORABLE] = Unscorable.UNSCORABLE
"""What a scorer returns when the answer cannot be judged."""


class Scorer(Protocol):
    """Judges one completion."""

    def __call__(
        self, completion: str, row: Mapping[str, Any], finish_reason: str, **options: Any
    ) -> float | Unscorable: ...


def check_names(rewards: Sequence[RewardSettings]) -> None:
    """Raise SpecError when a reward's name cannot be one, or stands twice; imports no scorer."""
    if not rewards:
        raise SpecError("there is no reward", where="rewards", cure=f"name one of: {', '.join(KNOWN)}")
    names = [reward.name for reward in rewards]
    for name in names:
        if name not in KNOWN and not _is_entry_point(name):
            raise SpecError(
                f"there is no reward `{name}`",
                where="rewards",
                cure=f"use one of: {', '.join(KNOWN)}; or `package.module:function` for a function of your own",
            )
        if names.count(name) > 1:
            raise SpecError(f"the reward `{name}` stands twice", where="rewards", cure="name each reward once")


def resolve(name: str) -> Scorer:
    """The scorer of that name; raises SpecError when it cannot be imported."""
    module_name, _, function_name = name.partition(":")
    if name in KNOWN:
        module_name, function_name = f"producer.rewards.{name}", "score"
    try:
        scorer = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        raise SpecError(
            f"the reward `{name}` cannot be imported: {type(error).__name__}: {error}",
            where="rewards",
            cure="install its package in the producer's environment, or correct `package.module:function`",
        ) from error
    if not callable(scorer):
        raise SpecError(f"the reward `{name}` is not a function", where="rewards", cure="name a function")
    return scorer


def _is_entry_point(name: str) -> bool:
    module, colon, function = name.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))
