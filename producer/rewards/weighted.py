"""The reward of a sample is the weighted sum of its parts, or no number at all.

One part that failed makes the sample failed, one that is unscorable makes it unscorable: a sum over the remaining parts
would be a reward that nobody asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from buffer.records import Outcome
from producer.settings import RewardSettings


@dataclass(frozen=True)
class Part:
    """What one scorer said of one sample."""

    outcome: Outcome
    value: float = 0.0  # meaningful only when scored
    error: str = ""  # why it failed


@dataclass(frozen=True)
class Reward:
    """The outcome of one sample."""

    outcome: Outcome
    value: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)  # the scored ones, unweighted
    error: str = ""


def weighted_sum(rewards: Sequence[RewardSettings], parts: Mapping[str, Part]) -> Reward:
    """The reward of one sample from its parts by name."""
    values = {name: part.value for name, part in parts.items() if part.outcome == "scored"}
    failed = [f"{name}: {part.error}" for name, part in parts.items() if part.outcome == "failed"]
    if failed:
        return Reward("failed", parts=values, error="; ".join(failed))
    if len(values) < len(parts):
        return Reward("unscorable", parts=values)
    return Reward("scored", sum(reward.weight * values[reward.name] for reward in rewards), values)
