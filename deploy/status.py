"""A status is what Redis says at the moment: it can be read of any run, also one that has written nothing yet.

Numbers that nobody has measured are null, and so are numbers that are not finite.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from buffer.ledger import Ledger
from buffer.members import Member, Members
from buffer.metrics import Control, Metrics
from buffer.pools import Pools
from buffer.provenance import by_pool
from deploy.pool_status import PoolDetail, PoolStatus, pool_details, pool_statuses
from deploy.shown import Shown
from deploy.waiting import Situation, explain, is_generating

WINDOW = 60  # newest steps that a status is made of
ETA_WINDOW = 20  # newest steps whose duration says how long the rest will take
EVALUATIONS = 100  # newest ones shown, besides the first
EVENTS = 20


class Evaluation(Shown):
    """One held-out evaluation."""

    version: int
    """The policy version that was asked about."""
    step: int | None
    """The optimizer step that made the version."""
    accuracy: float | None
    """Share of the judged answers that are right."""
    mean_reward: float | None
    """Mean reward of the scored answers."""
    mean_length: float | None
    """Mean length of the answers in tokens."""
    truncated: float | None
    """Share of the answers that were cut at the limit."""
    problems: float | None
    """Number of answers."""
    failed: float | None
    """Answers that no scorer could judge because it broke."""
    unscorable: float | None
    """Answers that cannot be judged."""
    seconds: float | None
    """How long it took."""
    rewards: dict[str, float | None]
    """Mean of each part of the reward."""


class Accuracy(Shown):
    """The newest held-out accuracy."""

    version: int
    """The policy version evaluated."""
    step: int | None
    """The optimizer step that made it."""
    value: float | None
    """Share of the judged answers that are right."""


class StepReward(Shown):
    """Mean reward of the samples of one step."""

    step: int
    """The optimizer step."""
    reward: float | None
    """Mean over the samples that it trained on."""


class OldestLease(Shown):
    """The lease that ends first."""

    prompt: int
    """Number of the prompt."""
    holder: str
    """The producer that holds it."""
    seconds_left: float
    """Time until it ends unless it is renewed."""


class LedgerStatus(Shown):
    """Where the prompts are."""

    counts: dict[str, int]
    """Prompts by state: pending, leased, generated, planned, trained, dropped."""
    dropped: dict[str, int]
    """Dropped prompts by reason."""
    stored_bytes: int
    """Bytes of groups that wait for their step."""
    reserved_bytes: int
    """Bytes set aside for groups that are being generated."""
    budget_bytes: int | None
    """Most that both may be together; null until the run is configured."""
    accepted: int
    """Usable groups ever committed."""
    groups_per_step: int | None
    """Groups that one step trains on; null until the run is configured."""
    max_staleness: int | None
    """Bound of the staleness; null until the run is configured."""
    passes_opened: int
    """Passes over the data that have begun."""
    oldest_lease: OldestLease | None
    """The lease that ends first."""


class ProducerStatus(Shown):
    """One producer."""

    name: str
    """Its name in the run."""
    pool: str
    """Its pool."""
    state: str
    """joining, serving, draining or quarantined."""
    version: int | None
    """The version that it has proved and serves."""
    alive: bool
    """Whether it reports."""
    seconds_since_report: float
    """Time since its last report."""
    running: int | None
    """Prompts in flight."""
    tokens_per_second: float | None
    """Tokens that it generates per second."""
    waiting: str
    """Why it leases nothing; empty when it does."""
    last_error: str
    """Its last error; empty when there was none."""


class ConsumerStatus(Shown):
    """The consumer, seen as its rank 0."""

    state: str
    """joining, serving or draining."""
    version: int | None
    """The version of its weights."""
    alive: bool
    """Whether it reports."""
    seconds_since_report: float
    """Time since its last report."""
    last_error: str
    """Its last error; empty when there was none."""


class Event(Shown):
    """Something that a person wants to know."""

    time: float
    """The server's time, Unix seconds."""
    kind: str
    """join, leave, quarantine, failure, resume, checkpoint, evaluation, ..."""
    who: str
    """The member that tells it."""
    text: str
    """What happened."""


class Status(Shown):
    """What a run is doing."""

    run: str
    """Name of the run."""
    phase: str | None
    """starting, running, draining, finished, stopped, or failed with the reason."""
    step: int | None
    """The last step that was trained."""
    steps: int
    """Steps that the run is to make."""
    version: int | None
    """The newest published policy version."""
    reward: float | None
    """Mean reward of the newest step."""
    accuracy: Accuracy | None
    """The newest held-out accuracy."""
    response_length: float | None
    """Mean length of the newest step's completions in tokens."""
    staleness: float | None
    """Mean staleness of the newest step's groups in versions."""
    mismatch: float | None
    """Mean difference of the trainer's and the engine's log-probs, over tokens of the newest version."""
    tokens_per_second: float | None
    """Tokens generated per second, over all living producers."""
    eta_seconds: float | None
    """Time that the remaining steps will take if they go like the newest ones."""
    waiting: str
    """Who waits on whom, and why: one sentence."""
    paused: bool
    """Whether people have paused the run."""
    stopping: bool
    """Whether people have asked the run to stop."""
    ledger: LedgerStatus
    pools: list[PoolStatus]
    """Pools of producers, what they are to have and what they have; empty until the run is started."""
    producers: list[ProducerStatus]
    consumer: ConsumerStatus | None
    evaluations: list[Evaluation]
    """The first and the newest evaluations, by version."""
    rewards: list[StepReward]
    """Rewards of the newest steps."""
    last_step: dict[str, float | None]
    """All numbers of the newest step, by the names that TensorBoard has too."""
    events: list[Event]
    """The newest events, oldest first."""


def read_status(
    client: "redis.Redis", *, run: str, steps: int, heartbeat_seconds: float, events: int = EVENTS
) -> Status:
    """Read it all; raises BufferUnavailable."""
    ledger, metrics, control = Ledger(client, run), Metrics(client, run), Control(client, run)
    summary: dict[str, Any] = ledger.summary()
    members = Members(client, run, heartbeat_seconds=heartbeat_seconds).all()
    consumer = next((member for member in members if member.role == "consumer"), None)
    producers = [member for member in members if member.role == "producer"]
    numbers = metrics.producers()
    trained: int = summary["last_trained_step"]
    newest = metrics.steps(since=max(0, trained - WINDOW))
    last = newest[-1] if newest else {}
    evaluations = [read_evaluation(values) for values in metrics.evaluations()]
    shown = [_producer(member, numbers.get(member.name, {})) for member in producers]
    rates = [producer.tokens_per_second for producer in shown if producer.tokens_per_second is not None]
    phase, stop, paused = control.get("phase"), control.get("stop"), bool(control.get("pause"))
    situation = Situation(
        phase=phase,
        stop=stop,
        paused=paused,
        steps=steps,
        version=summary["version"],
        planned=summary["last_planned_step"],
        trained=trained,
        due=ledger.due(),
        consumer=consumer,
        producers=producers,
        running={name: values.get("running", 0.0) for name, values in numbers.items()},
    )
    return Status(
        run=run,
        phase=phase or None,
        step=trained or None,
        steps=steps,
        version=_known(summary["version"]),
        reward=number(last, "reward/mean"),
        accuracy=_accuracy(evaluations),
        response_length=number(last, "response/length_mean"),
        staleness=number(last, "staleness/mean"),
        mismatch=_newest_known(newest, "mismatch/mean_abs"),
        tokens_per_second=sum(rates) if rates else None,
        eta_seconds=_eta(newest, steps - trained),
        waiting=explain(situation),
        paused=paused,
        stopping=bool(stop),
        ledger=_ledger(summary),
        pools=_pools(client, run, producers, shown),
        producers=shown,
        consumer=_consumer(consumer),
        evaluations=evaluations[:1] + evaluations[1:][-EVALUATIONS:],
        rewards=[StepReward(step=int(values["step"]), reward=number(values, "reward/mean")) for values in newest],
        last_step={name: number(last, name) for name in sorted(last)},
        events=[Event(**event) for event in metrics.events(events)] if events else [],
    )


def read_pools(client: "redis.Redis", *, run: str, heartbeat_seconds: float) -> list[PoolDetail]:
    """Every pool with its replicas; raises BufferUnavailable."""
    members = Members(client, run, heartbeat_seconds=heartbeat_seconds).all("producer")
    numbers = Metrics(client, run).producers()
    shown = [_producer(member, numbers.get(member.name, {})) for member in members]
    return pool_details(_pools(client, run, members, shown), members=members, draining=Pools(client, run).draining())


def _newest_known(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Of the newest step that has it: a step without samples of the newest version shows no mismatch."""
    return next((value for values in reversed(steps) if (value := number(values, name)) is not None), None)


def number(values: Mapping[str, float], name: str) -> float | None:
    """A number that is there and finite, else None: JSON knows no NaN."""
    value = values.get(name)
    return float(value) if value is not None and math.isfinite(value) else None


def read_evaluation(values: Mapping[str, float]) -> Evaluation:
    """An evaluation as producers record it."""
    step = number(values, "step")
    return Evaluation(
        version=int(values["version"]),
        step=None if step is None else int(step),
        accuracy=number(values, "accuracy"),
        mean_reward=number(values, "mean_reward"),
        mean_length=number(values, "mean_length"),
        truncated=number(values, "truncated"),
        problems=number(values, "problems"),
        failed=number(values, "failed"),
        unscorable=number(values, "unscorable"),
        seconds=number(values, "seconds"),
        rewards={
            name.removeprefix("reward/"): number(values, name) for name in sorted(values) if name.startswith("reward/")
        },
    )


def _accuracy(evaluations: list[Evaluation]) -> Accuracy | None:
    if not evaluations:
        return None
    newest = evaluations[-1]
    return Accuracy(version=newest.version, step=newest.step, value=newest.accuracy)


def _eta(steps: list[dict[str, float]], left: int) -> float | None:
    durations = [number(values, "time/total") for values in steps[-ETA_WINDOW:]]
    known = [duration for duration in durations if duration is not None]
    return max(0, left) * sum(known) / len(known) if known else None


def _known(version: int) -> int | None:
    return version if version >= 0 else None


def _pools(client: "redis.Redis", run: str, members: list[Member], shown: list[ProducerStatus]) -> list[PoolStatus]:
    pools = Pools(client, run)
    return pool_statuses(
        pools.desired(),
        members=members,
        draining=pools.draining(),
        rates={producer.name: producer.tokens_per_second for producer in shown},
        shares=by_pool(client, run),
    )


def _producer(member: Member, numbers: Mapping[str, float]) -> ProducerStatus:
    # Numbers are overwritten by the next report: those of a process that is gone say nothing of now.
    current = numbers if member.alive and member.state in ("serving", "draining") else {}
    running = number(current, "running")
    return ProducerStatus(
        name=member.name,
        pool=member.pool,
        state=member.state,
        version=_known(member.version),
        alive=member.alive,
        seconds_since_report=round(member.seconds_since_report, 3),
        running=None if running is None else int(running),
        tokens_per_second=number(current, "tokens_per_second"),
        waiting="" if is_generating(member, running or 0.0) else member.info.get("waiting", ""),
        last_error=member.info.get("last_error", ""),
    )


def _consumer(member: Member | None) -> ConsumerStatus | None:
    if member is None:
        return None
    return ConsumerStatus(
        state=member.state,
        version=_known(member.version),
        alive=member.alive,
        seconds_since_report=round(member.seconds_since_report, 3),
        last_error=member.info.get("last_error", ""),
    )


def _ledger(summary: Mapping[str, Any]) -> LedgerStatus:
    configured = summary["groups_per_step"] > 0
    return LedgerStatus(
        counts=summary["counts"],
        dropped=summary["dropped"],
        stored_bytes=summary["stored_bytes"],
        reserved_bytes=summary["reserved_bytes"],
        budget_bytes=summary["budget_bytes"] if configured else None,
        accepted=summary["accepted"],
        groups_per_step=summary["groups_per_step"] if configured else None,
        max_staleness=summary["max_staleness"] if configured else None,
        passes_opened=summary["passes_opened"],
        oldest_lease=OldestLease(**summary["oldest_lease"]) if summary["oldest_lease"] else None,
    )
