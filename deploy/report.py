"""A report is computed from what the run recorded, so that it is the same whoever asks and whenever; its shares of
time add up to one, and its sums are over recorded steps only (the newest ``buffer.metrics.HISTORY`` of them)."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import redis

from buffer.ledger import Ledger
from buffer.metrics import Metrics
from deploy.shown import Shown
from deploy.status import Evaluation, StepReward, number, read_evaluation
from weight_sync.registry import ProofRecord, Registry

Steps = Sequence[dict[str, float]]
Ending = Literal["finished", "stopped", "failed"]
TOTAL = "time/total"


class EvaluationReport(Shown):
    """Held-out accuracy over the run."""

    first: float | None
    """Accuracy of the first version evaluated."""
    last: float | None
    """Accuracy of the newest version evaluated."""
    history: list[Evaluation]
    """All evaluations by version."""


class RewardReport(Shown):
    """Mean reward over the run."""

    first: float | None
    """Of the first step recorded."""
    last: float | None
    """Of the newest step."""
    history: list[StepReward]
    """By step."""


class Proof(Shown):
    """What one replica proved of one version."""

    version: int
    """The policy version."""
    member: str
    """The replica."""
    probe_mean_abs: float | None
    """Mean difference of the trainer's and the engine's log-probs on the probe."""
    probe_max_abs: float | None
    """Largest such difference."""
    noise_floor: float | None
    """The mean difference on the initial weights: what kernels alone make."""
    tolerance: float | None
    """Mean difference above which the replica is quarantined."""
    checksums_ok: bool
    """Whether the bytes that arrived are those that were sent."""
    digest: str
    """Over the tensors that compute; equal among replicas of equal layout."""
    self_test_passed: bool
    """Whether the load-path self-test of the replica's start passed."""
    error: str
    """Why the proof failed; empty when it holds."""


class StalenessReport(Shown):
    """Current version minus the oldest that a trained token was sampled with, by group."""

    mean: float | None
    """Mean over all groups trained."""
    max: float | None
    """Largest."""


class MismatchReport(Shown):
    """Difference of the trainer's and the engine's log-probs on trained tokens."""

    mean_abs: float | None
    """Mean over steps, of tokens that the newest version sampled."""
    max: float | None
    """Largest of those."""
    all_mean_abs: float | None
    """Mean over steps, of all tokens: it includes what the policy has moved since they were sampled."""


class ThroughputReport(Shown):
    """What was trained in the time that steps took."""

    samples: int
    """Samples trained on."""
    tokens: int
    """Tokens trained on, prompts included."""
    tokens_per_second: float | None
    """Tokens trained on per second of the steps."""
    steps_per_second: float | None
    """Steps per second."""


class LedgerSummary(Shown):
    """The ledger, counted from the ground up."""

    counts: dict[str, int]
    """Prompts by state."""
    dropped: dict[str, int]
    """Dropped prompts by reason."""
    problems: list[str]
    """What does not add up; empty when the ledger holds."""


class Report(Shown):
    """The result of a run."""

    run: str
    """Name of the run."""
    status: Ending
    """How it ended."""
    reason: str
    """Why it stopped or failed; empty when it finished."""
    folder: str
    """The run folder."""
    checkpoint: str | None
    """The newest whole checkpoint, as a path in the run folder."""
    steps: int
    """Optimizer steps trained."""
    version: int | None
    """Newest published policy version."""
    seconds: float
    """Time since this `forebay run` was started; a resumed run counts anew."""
    eval: EvaluationReport
    reward: RewardReport
    proofs: list[Proof]
    """By version and member: the last word of each process, so that a failure after a probe is what counts."""
    staleness: StalenessReport
    mismatch: MismatchReport
    throughput: ThroughputReport
    time: dict[str, float]
    """Share of the steps' time by phase: wait (for groups), read, forward_backward, step, journal, publish,
    checkpoint, other."""
    ledger: LedgerSummary


def make_report(
    client: "redis.Redis", *, run: str, status: Ending, reason: str, started: float, folder: str | Path
) -> dict[str, Any]:
    """The content of report.json. ``started``: ``time.time()`` at the start of this `forebay run`."""
    ledger, metrics = Ledger(client, run), Metrics(client, run)
    steps = metrics.steps()
    evaluations = [read_evaluation(values) for values in metrics.evaluations()]
    verified = ledger.verify()
    version = ledger.current_version()
    return Report(
        run=run,
        status=status,
        reason=reason,
        folder=str(folder),
        checkpoint=_newest_checkpoint(Path(folder)),
        steps=ledger.last_trained_step(),
        version=version if version >= 0 else None,
        seconds=round(max(0.0, time.time() - started), 3),
        eval=EvaluationReport(
            first=evaluations[0].accuracy if evaluations else None,
            last=evaluations[-1].accuracy if evaluations else None,
            history=evaluations,
        ),
        reward=_reward(steps),
        proofs=_proofs(Registry(client, run).proof_history()),
        staleness=StalenessReport(
            mean=_mean(steps, "staleness/mean", weight="groups"), max=_largest(steps, "staleness/max")
        ),
        mismatch=MismatchReport(
            mean_abs=_mean(steps, "mismatch/mean_abs"),
            max=_largest(steps, "mismatch/max"),
            all_mean_abs=_mean(steps, "mismatch/all_mean_abs"),
        ),
        throughput=_throughput(steps),
        time=_shares(steps),
        ledger=LedgerSummary(counts=verified.counts, dropped=verified.dropped, problems=list(verified.problems)),
    ).model_dump(mode="json")


def _newest_checkpoint(folder: Path) -> str | None:
    whole = sorted((folder / "checkpoints").glob("step-*/COMPLETE"))
    return str(whole[-1].parent.relative_to(folder)) if whole else None


def _reward(steps: Steps) -> RewardReport:
    history = [StepReward(step=int(values["step"]), reward=number(values, "reward/mean")) for values in steps]
    return RewardReport(
        first=history[0].reward if history else None, last=history[-1].reward if history else None, history=history
    )


def _proofs(records: Iterable[ProofRecord]) -> list[Proof]:
    newest = {(record.version, record.member, record.incarnation): record for record in records}
    proofs = []
    for _, record in sorted(newest.items()):
        probe = {
            "mean": record.probe_mean,
            "max": record.probe_max,
            "floor": record.noise_floor,
            "tolerance": record.tolerance,
        }
        proofs.append(
            Proof(
                version=record.version,
                member=record.member,
                probe_mean_abs=number(probe, "mean"),
                probe_max_abs=number(probe, "max"),
                noise_floor=number(probe, "floor"),
                tolerance=number(probe, "tolerance"),
                checksums_ok=record.checksums_ok,
                digest=record.digest,
                self_test_passed=record.self_test == "passed",
                error=record.error,
            )
        )
    return proofs


def _values(steps: Steps, name: str) -> list[float]:
    return [value for values in steps if (value := number(values, name)) is not None]


def _mean(steps: Steps, name: str, *, weight: str | None = None) -> float | None:
    weighted = [
        (value, (number(values, weight) or 0.0) if weight else 1.0)
        for values in steps
        if (value := number(values, name)) is not None
    ]
    total = sum(share for _, share in weighted)
    return sum(value * share for value, share in weighted) / total if total else None


def _largest(steps: Steps, name: str) -> float | None:
    return max(_values(steps, name), default=None)


def _throughput(steps: Steps) -> ThroughputReport:
    timed = [values for values in steps if number(values, TOTAL) is not None]
    seconds = sum(_values(timed, TOTAL))
    return ThroughputReport(
        samples=int(sum(_values(steps, "samples"))),
        tokens=int(sum(_values(steps, "tokens"))),
        tokens_per_second=sum(_values(timed, "tokens")) / seconds if seconds else None,
        steps_per_second=len(timed) / seconds if seconds else None,
    )


def _shares(steps: Steps) -> dict[str, float]:
    """Replayed steps have no total and are left out."""
    timed = [values for values in steps if number(values, TOTAL) is not None]
    total = sum(_values(timed, TOTAL))
    if not total:
        return {}
    names = sorted({name for values in timed for name in values if name.startswith("time/") and name != TOTAL})
    shares = {name.removeprefix("time/"): sum(_values(timed, name)) / total for name in names}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    return shares
