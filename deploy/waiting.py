"""Who waits on whom, and why, is one sentence, made of what the members and the ledger say of themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buffer.ledger import Waiting
from buffer.members import Member

REFUSALS = {  # of the ledger, as a producer reports them
    "budget": "the byte budget is used up",
    "staleness": "more groups would be too stale",
    "exhausted": "no prompts are left",
    "paused": "the run is paused",
    "stopping": "the run is stopping",
    "quarantined": "the proof of the weights failed",
    "not_proved": "the version is not proved",
    "no_version": "no version is published",
    "no_pass": "the next pass is not open",
}


@dataclass(frozen=True)
class Situation:
    """What the sentence is made of."""

    phase: str  # the flag, "" when unset
    stop: str
    paused: bool
    steps: int
    version: int  # newest published; -1: none
    planned: int  # last step with a plan
    trained: int  # last step trained
    due: Waiting | None
    consumer: Member | None
    producers: Sequence[Member]
    running: Mapping[str, float]  # prompts in flight by producer


def explain(situation: Situation) -> str:
    """The sentence."""
    if has_ended(situation.phase):
        return f"nobody works: the run has {situation.phase.replace('stopped', 'been stopped', 1)}"
    consumer, producers = _consumer(situation), _producers(situation)
    if situation.stop or situation.phase == "draining":
        return f"the run is stopping, so nobody gets new prompts; {consumer}"
    if situation.paused:
        return f"producers wait for people: the run is paused; {consumer}"
    return f"{consumer}; {producers}"


def has_ended(phase: str) -> bool:
    """Whether nobody works for the run any more: finished, stopped, or failed with the reason."""
    return phase in ("finished", "stopped") or phase.startswith("failed")


def is_generating(member: Member, running: float) -> bool:
    """Whether prompts are in flight; numbers of an earlier process of the name do not count."""
    return member.alive and member.state in ("serving", "draining") and running > 0


def _consumer(situation: Situation) -> str:
    member, due = situation.consumer, situation.due
    if member is None:
        return "the consumer has left" if situation.trained else "the consumer has not joined"
    if not member.alive:
        return _dead(member)
    if member.version < 0:
        return f"{member.name} starts and has published no version yet"
    if situation.trained >= situation.steps:
        return f"{member.name} has made all {situation.steps} steps and waits for the last evaluations"
    if situation.planned > situation.trained:
        return f"{member.name} trains step {situation.planned}"
    if due is None:
        return f"{member.name} is about to plan step {situation.planned + 1}"
    groups = "1 group" if due.missing == 1 else f"{due.missing} groups"
    return f"{member.name} waits for {groups} of step {situation.planned + 1} {_held(due, situation.producers)}"


def _held(due: Waiting, producers: Sequence[Member]) -> str:
    alive = {member.name for member in producers if member.alive}
    names = [holder for holder in due.holders if holder != "pending again"]
    if names:
        named = [name if name in alive else f"{name} (gone: its leases have to run out)" for name in names]
        return f"from {_listed(named)}"
    if due.holders:
        return "that were given back and are not leased again yet"
    return "that nobody has leased yet"


def _producers(situation: Situation) -> str:
    if not situation.producers:
        return "nobody generates: no producer has joined"
    alive = [member for member in situation.producers if member.alive]
    if not alive:
        return "nobody generates: " + ", ".join(_dead(member) for member in situation.producers)
    busy = [m.name for m in alive if is_generating(m, situation.running.get(m.name, 0.0))]
    if busy:
        return f"{_listed(busy)} {'generates' if len(busy) == 1 else 'generate'}"
    reasons: dict[str, tuple[str, list[str]]] = {}
    for member in alive:
        kind, told = _reason(member)
        reasons.setdefault(kind, (told, []))[1].append(member.name)  # details differ a little; the first one's do
    return "nobody generates: " + ", ".join(_told(told, names) for told, names in reasons.values())


def _told(reason: str, names: Sequence[str]) -> str:
    if reason.startswith("no lease"):
        return reason.replace("no lease", f"no lease for {_listed(names)}", 1)
    return f"{_listed(names)} {reason}"


def _reason(member: Member) -> tuple[str, str]:
    """Kind of the reason, and the reason."""
    waiting = member.info.get("waiting", "")
    if member.state == "quarantined":
        error = _first_line(member.info.get("last_error", "")) or "its weights failed their proof"
        return error, f"quarantined: {error}"
    if member.state == "draining":
        return "draining", "draining"
    if member.state == "joining":
        return waiting, f"joining ({waiting or 'nothing is known of it yet'})"
    refusal, _, detail = waiting.partition(": ")
    if refusal in REFUSALS:
        return refusal, f"no lease, {REFUSALS[refusal]}" + (f" ({detail})" if detail else "")
    return waiting, f"waiting for {waiting}" if waiting else "without a prompt in flight"


def _dead(member: Member) -> str:
    error = _first_line(member.info.get("last_error", ""))
    why = f": {error}" if error else ""
    return f"{member.name} has not reported for {member.seconds_since_report:.0f} s{why}"


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _listed(names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} others"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
