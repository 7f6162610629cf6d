"""A restart stands where the run stood: the newest whole checkpoint, plus every journalled step after it.

A replay trains the same groups in the same order from the same state, so it gives the same weights (bit-equal on the
CPU with the same ranks). It publishes nothing and asks nothing about staleness.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from buffer import journal
from buffer.errors import LedgerBroken, SpecError, TrainingFailed
from buffer.ledger import Ledger
from consumer import checkpoint
from consumer.training import Trainer


@dataclass(frozen=True)
class Start:
    """From where to go on; the same on all ranks."""

    checkpoint: int  # step of the checkpoint to load, 0: the initial model
    journalled: int  # last step to replay; equal to ``checkpoint`` when there is nothing to replay


def find_start(run_folder: Path, journal_folder: Path, *, resume: bool, report: Callable[[str], None]) -> Start:
    """The newest checkpoint from which the journal leads on without a gap. Called on rank 0."""
    folder = checkpoint.checkpoints_folder(run_folder)
    steps = journal.steps(journal_folder)
    if not resume:
        if steps or checkpoint.finished(folder):
            raise SpecError(
                "the run folder holds a run that has trained already",
                where=str(run_folder),
                cure="start with --resume to go on, or choose another run folder",
            )
        return Start(0, 0)
    known = set(steps)
    last = max([*steps, *(step for step, _ in checkpoint.finished(folder))], default=0)
    for step in (*(step for step, _ in checkpoint.whole(folder, report)), 0):
        if all(between in known for between in range(step + 1, last + 1)):
            return Start(step, last)
    raise TrainingFailed(
        "no whole checkpoint is left from which the journal leads on without a gap",
        where=str(run_folder),
        cure="put back the checkpoint that was removed, or start a new run from one of the models in checkpoints/",
    )


def replay(trainer: Trainer, journal_folder: Path, start: Start) -> Iterator[tuple[int, dict[str, float]]]:
    """Train the journalled steps on every rank; step and its numbers."""
    for step in range(start.checkpoint + 1, start.journalled + 1):
        plan, groups = journal.read(journal_folder, step)
        yield step, trainer.train(step, groups, planned_version=plan.version, newest=plan.version)


def load(trainer: Trainer, run_folder: Path, start: Start) -> checkpoint.State | None:
    """Load the checkpoint of ``start`` on every rank."""
    if not start.checkpoint:
        return None
    path = checkpoint.checkpoints_folder(run_folder) / f"step-{start.checkpoint:08d}"
    return checkpoint.load(trainer, path)


def bring_ledger_up(ledger: Ledger, start: Start, *, fence: int, where: Path) -> None:
    """Retire the step that was journalled but not retired when the process ended; refuse another run's ledger."""
    trained = ledger.last_trained_step()
    if trained > start.journalled:
        raise LedgerBroken(
            f"the ledger has trained step {trained}, checkpoints and journal end at step {start.journalled}",
            where=str(where),
            cure="resume in the run folder that belongs to this server's data",
        )
    for step in range(trained + 1, start.journalled + 1):
        ledger.retire(step, fence=fence)
