"""`exact`: 1 when the completion, or its final answer where it marks one, is the reference answer letter by letter."""

from collections.abc import Mapping
from typing import Any

from producer.rewards import UNSCORABLE, Unscorable
from producer.rewards.answers import last_boxed, last_tag, reference_text


def score(completion: str, row: Mapping[str, Any], finish_reason: str) -> float | Unscorable:
    """1.0 or 0.0; unscorable without a reference answer."""
    reference = reference_text(row["answer"])
    if reference is None:
        return UNSCORABLE
    tag = last_tag(completion)
    candidates = {completion.strip()} if tag is None else {tag, last_boxed(tag) or tag}
    return float(reference in candidates)
