"""`math`: 1 when the final answer equals the reference mathematically (math-verify), else 0.

A completion without an answer, or with one that cannot be read, is wrong (0). A reference that cannot be read makes the
sample unscorable: no completion could be right. math-verify's own time limits are signals and stay off: this runs in a
scorer process, which is killed when it takes too long.
"""

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import sympy
from math_verify import parse, verify

from producer.rewards import UNSCORABLE, Unscorable
from producer.rewards.answers import last_boxed, last_tag, reference_text

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off


def score(completion: str, row: Mapping[str, Any], finish_reason: str) -> float | Unscorable:
    """1.0 or 0.0; unscorable without a readable reference answer."""
    reference = reference_text(row["answer"])
    if reference is None:
        return UNSCORABLE
    gold = _reference(reference)
    if not gold:
        return UNSCORABLE
    tag = last_tag(completion)
    boxed = last_boxed(completion if tag is None else tag)
    if boxed is not None:
        answers = [f"\\boxed{{{boxed}}}"]
    elif tag:
        answers = [f"\\boxed{{{tag}}}", tag]
    else:
        return 0.0
    return float(any(_equal(gold, parse(answer, parsing_timeout=None)) for answer in answers))


@lru_cache(maxsize=1024)
def _reference(text: str) -> tuple[Any, ...]:
    """What math-verify reads in the reference; empty when it reads nothing but the text itself."""
    found = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    if any(isinstance(item, sympy.Basic | sympy.MatrixBase) for item in found):
        return tuple(found)
    return ()


def _equal(gold: tuple[Any, ...], answer: list[Any]) -> bool:
    return bool(answer) and bool(verify(list(gold), answer, timeout_seconds=None))
