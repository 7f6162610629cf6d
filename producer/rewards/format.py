"""`format`: 1 when the whole completion is one <think>...</think> followed by one <answer>...</answer>, else 0."""

import re
from collections.abc import Mapping
from typing import Any

_PATTERN = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")


def score(completion: str, row: Mapping[str, Any], finish_reason: str) -> float:
    """1.0 or 0.0."""
    match = _PATTERN.fullmatch(completion)
    return float(match is not None and not any(_TAG.search(part) or not part.strip() for part in match.groups()))
