"""Each step is planned, trained, journalled, retired, published, in this order: a crash loses none and repeats none.

What a restart with `resume` finds, by the point at which the process ended (k: the step at hand):

- before the plan of k is written: nothing of k exists; it is planned anew.
- after the plan, before the journal: the plan and its groups are in Redis; the same plan is answered and trained.
- after the journal, before the ledger's retirement: k is replayed from the journal and retired then, without being
  planned again, since retiring comes before the next plan.
- after the retirement, before or during the publication: k is replayed; the weights are published once, at the end of
  the replay, as the next version. A version whose sending was cut off never became current.
- in a checkpoint: it has no final name, so the one before it and the journal since then are used; the journal is cut
  only at the oldest checkpoint that is kept.

Weights change only in memory until the journal is written, so a step that fails (NaN, a full disk) changes nothing.
Rank 0 alone talks to the ledger's publisher side; the other ranks follow its decisions and read the same groups.

Run by torchrun, which `python -m consumer.launch --settings FILE` starts.
"""

import argparse
import hashlib
import os
import platform
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import colossalai
import structlog
import torch.distributed as dist

from buffer import journal
from buffer.client import connect
from buffer.errors import BufferUnavailable, DeadlineExceeded, Fenced, ForebayError
from buffer.ledger import Ledger, Plan, Waiting
from buffer.logs import log_to
from buffer.members import Members
from buffer.metrics import Control, EvaluationQueue, Metrics
from buffer.settings import read_settings
from consumer import checkpoint, recovery
from consumer.accelerator import prepare
from consumer.agreement import Agreement, Decision
from consumer.presence import Presence
from consumer.publication import Publications
from consumer.report import Report
from consumer.settings import ConsumerSettings
from consumer.training import Trainer, set_threads

MEMBER = "consumer-0"
FIRST_POLL, LONGEST_POLL = 0.02, 0.2  # seconds between two questions for the plan
WORD_EVERY = 1.0  # seconds after which rank 0 says that it still waits


def settings_digest(settings: ConsumerSettings) -> str:
    """Digest of what decides the course of training."""
    chosen = settings.model_dump_json(
        include={"seed", "model_path", "steps", "groups_per_step", "group_size", "algorithm", "settings"}
    )
    return hashlib.sha256(chosen.encode()).hexdigest()


class StopAsked:
    """Whether somebody asked the run to stop: by the flag `stop`, or by SIGTERM or SIGINT."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._signalled = False

    def listen(self) -> None:
        """Take the signals that ask for an end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._signalled = True

    def __call__(self) -> bool:
        return self._signalled or bool(self._control.get("stop"))


class Service:
    """One rank of the consumer."""

    def __init__(self, settings: ConsumerSettings, log: Any) -> None:
        self.settings = settings
        self.log = log
        self.folder = Path(settings.folder)
        self.journal = self.folder / "journal"
        self.rank = dist.get_rank()
        client = connect(
            settings.redis_url,
            password=os.environ.get(settings.buffer.password_env),
            tls_ca_file=settings.buffer.tls_ca_file,
            timeout_seconds=settings.buffer.timeout_seconds,
        )
        self.client = client
        self.ledger = Ledger(client, settings.run)
        self.members = Members(client, settings.run, heartbeat_seconds=settings.buffer.heartbeat_seconds)
        self.metrics = Metrics(client, settings.run)
        self.control = Control(client, settings.run)
        self.stop_asked = StopAsked(self.control)
        # One rank may be behind by a step, a checkpoint or a publication, all bounded by what a step may take.
        self.agreement = Agreement(settings.settings.no_progress_seconds + 60.0)
        self.trainer = Trainer(settings)
        self.trainer.refuse_broken_weights("in the initial model")
        self.saved_step = -1

    # -- every rank

    def run(self) -> None:
        """Train to the end, a stop or a failure."""
        self.stop_asked.listen()
        if self.rank != 0:
            self._train_steps(self._restore(None), None)
            return
        info = {"pid": str(os.getpid()), "host": socket.gethostname(), "platform": platform.machine()}
        info |= {"ranks": str(dist.get_world_size())}
        beat = self.settings.buffer.heartbeat_seconds
        with Presence(self.members, MEMBER, "consumer", info, seconds=beat) as presence:
            chief = Chief(self, presence)
            try:
                with Publications(self, fence=chief.fence) as publications:
                    chief.publications = publications
                    self._train_steps(self._restore(chief), chief)
                    chief.finish()
            except ForebayError as error:
                if not isinstance(error, (Fenced, BufferUnavailable)):
                    self.metrics.event("failure", MEMBER, str(error))
                raise

    def _restore(self, chief: "Chief | None") -> int:
        """Load and replay; the number of steps that are done."""
        found = chief.find_start() if chief else None
        start = recovery.Start(*self.agreement.share([found.checkpoint, found.journalled] if found else None, 2))
        state = recovery.load(self.trainer, self.folder, start)
        if state is not None:
            self.saved_step = state.step
        if chief:
            chief.begin(start, state)
        for step, values in recovery.replay(self.trainer, self.journal, start):
            if chief:
                chief.replayed(step, values)
        if chief:
            chief.publish(start.journalled)
        return start.journalled

    def _train_steps(self, done: int, chief: "Chief | None") -> None:
        while done < self.settings.steps:
            decision = self.agreement.decide(chief.decide(done + 1) if chief else None)
            if decision.kind == "wait":
                continue
            if decision.kind == "train":
                self._one_step(decision, chief)
                done = decision.step
                if decision.last:
                    break
                continue
            if decision.checkpoint:
                self._save(done, chief)
            if decision.kind == "failed":
                raise chief.failure if chief and chief.failure else RankZeroFailed(decision.exit_code)
            return

    def _one_step(self, decision: Decision, chief: "Chief | None") -> None:
        started = time.monotonic()
        plan = chief.plan if chief else self._read_plan(decision.step)
        assert plan is not None
        groups = self.ledger.read_groups(plan.prompts)
        read = time.monotonic()
        newest = chief.version if chief else plan.version
        values = self.trainer.train(decision.step, groups, planned_version=plan.version, newest=newest)
        if chief:
            trained = time.monotonic()
            journal.write(self.journal, plan, groups)
            self.ledger.retire(plan.step, fence=chief.fence)
            journalled = time.monotonic()
            chief.publish(plan.step)
            values |= {
                "time/wait": chief.waited,
                "time/read": read - started,
                "time/journal": journalled - trained,
                "time/publish": time.monotonic() - journalled,
            }
        before = time.monotonic()
        if decision.checkpoint:
            self._save(decision.step, chief)
        if chief:
            values |= {"time/checkpoint": time.monotonic() - before}
            values |= {"time/total": time.monotonic() - started + chief.waited}
            chief.record(plan, values)

    def _read_plan(self, step: int) -> Plan:
        plan = self.ledger.read_plan(step)
        if plan is None:
            raise DeadlineExceeded(
                f"rank {self.rank} cannot read the plan of step {step}, which rank 0 has written",
                where=self.settings.redis_url,
                cure="give all ranks the same server, not a replica that lags behind",
            )
        return plan

    def _save(self, step: int, chief: "Chief | None") -> None:
        if step == self.saved_step or step == 0:
            return
        state = checkpoint.State(
            step=step,
            version=chief.version if chief else 0,
            settings_digest=settings_digest(self.settings),
            world_size=dist.get_world_size(),
            ledger=self.ledger.summary() if chief else {},
        )
        options = self.settings.settings.checkpoint
        folder = checkpoint.checkpoints_folder(self.folder)
        path = checkpoint.save(
            self.trainer, self.agreement, folder, state, keep=options.keep, tokenizer=chief and chief.tokenizer
        )
        self.saved_step = step
        if chief:
            kept = checkpoint.finished(folder)
            # With fewer than `keep`, the way back past the oldest one is still the initial model.
            if len(kept) >= options.keep:
                journal.prune(self.journal, kept[0][0] + 1)
            self.log.info("checkpoint", step=step, path=str(path))


class RankZeroFailed(ForebayError):
    """Another rank has the error and tells it; this one only ends."""

    def __init__(self, code: int) -> None:
        super().__init__("rank 0 failed")
        self.code = code


class Chief:
    """What rank 0 does besides training: decide, publish, report."""

    def __init__(self, service: Service, presence: Presence) -> None:
        self.service, self.presence = service, presence
        self.settings, self.ledger = service.settings, service.ledger
        self.fence = service.ledger.register_publisher()
        self.tokenizer = load_tokenizer(Path(service.settings.model_path))
        self.evaluations = EvaluationQueue(service.client, service.settings.run)
        self.publications: Publications
        self.report: Report
        self.plan: Plan | None = None
        self.version = -1  # of the trainer's weights
        self.failure: ForebayError | None = None
        self.waited = 0.0
        self._waiting_since: float | None = None
        self._poll = FIRST_POLL
        self._recorded: set[int] = set()

    def find_start(self) -> recovery.Start:
        """From where to go on."""
        return recovery.find_start(
            self.service.folder,
            self.service.journal,
            resume=self.settings.resume,
            report=lambda text: self.service.metrics.event("checkpoint", MEMBER, text),
        )

    def begin(self, start: recovery.Start, state: checkpoint.State | None) -> None:
        """Bring the ledger to the start and open the report."""
        recovery.bring_ledger_up(self.ledger, start, fence=self.fence, where=self.service.folder)
        metrics = self.service.metrics
        if state is not None and state.settings_digest != settings_digest(self.settings):
            metrics.event("resume", MEMBER, "the settings differ from those of the checkpoint")
        if self.settings.resume:
            replayed = start.journalled - start.checkpoint
            metrics.event(
                "resume", MEMBER, f"from the checkpoint of step {start.checkpoint}, {replayed} steps replayed"
            )
        self._recorded = {int(values["step"]) for values in metrics.steps(start.checkpoint)}
        first = min(s for s in range(start.checkpoint + 1, start.journalled + 2) if s not in self._recorded)
        self.report = Report(metrics, self.service.folder, first_step=first)

    def replayed(self, step: int, values: dict[str, float]) -> None:
        """A replayed step is reported only if the process ended before it was."""
        if step not in self._recorded:
            self.report.step(step, values)

    def decide(self, step: int) -> Decision:
        """Look for the plan of ``step`` for about a second."""
        self.presence.check()
        if self._waiting_since is None:
            self._waiting_since, self._poll = time.monotonic(), FIRST_POLL
        until = time.monotonic() + WORD_EVERY
        try:
            while True:
                if self.service.stop_asked():
                    self.presence.draining()
                    return Decision("leave", checkpoint=True)
                answer = self.ledger.plan(step, fence=self.fence, final=step == self.settings.steps)
                if isinstance(answer, Plan):
                    self.plan, self.waited = answer, time.monotonic() - self._waiting_since
                    self._waiting_since = None
                    last = step == self.settings.steps
                    due = step % self.settings.settings.checkpoint.every == 0
                    return Decision("train", step, last, last or due or answer.checkpoint)
                self._refuse_no_progress(step, answer)
                if time.monotonic() > until:
                    return Decision("wait", step)
                time.sleep(self._poll)
                self._poll = min(LONGEST_POLL, 1.5 * self._poll)
        except ForebayError as error:
            self.failure = error
            keeps = not isinstance(error, (Fenced, BufferUnavailable))
            return Decision("failed", step, checkpoint=keeps, exit_code=error.exit_code)

    def _refuse_no_progress(self, step: int, waiting: Waiting) -> None:
        assert self._waiting_since is not None
        allowed = self.settings.settings.no_progress_seconds
        if time.monotonic() - self._waiting_since < allowed:
            return
        if self.service.control.get("pause"):  # people may take their time
            self._waiting_since = time.monotonic()
            return
        producers = [m for m in self.service.members.all("producer") if m.alive]
        names = ", ".join(f"{m.name} ({m.state}, version {m.version})" for m in producers) or "none"
        raise DeadlineExceeded(
            f"step {step} waited {allowed:g} s for {waiting.missing} groups of "
            f"{', '.join(waiting.holders) or 'nobody'}; {waiting.detail}",
            where=f"producers alive: {names}",
            cure="look at the logs of these producers, start more, or raise consumer.no_progress_seconds",
        )

    def publish(self, step: int) -> None:
        """Hand the weights to the publisher, after the version before has arrived."""
        self.publications.wait()
        every, version = self.settings.evaluation_every, self.publications.next_version
        if every is not None and (version % every == 0 or step == self.settings.steps):
            # Before anybody has it: a producer evaluates a version between loading it and loading the next.
            self.evaluations.request(version, step)
        self.version = self.publications.hand_over(step)
        self.presence.serving(self.version)
        self.service.log.info("publish", step=step, version=self.version)

    def record(self, plan: Plan, values: dict[str, float]) -> None:
        """Report a trained step."""
        self.report.step(plan.step, values)
        self.service.log.info("step", **{"step": plan.step, **values})

    def finish(self) -> None:
        """Wait for the last publication, and at the end of the run for the evaluations, which need the publisher: a
        producer that joins late gets the last version from it."""
        self.publications.wait()
        deadline = time.monotonic() + self.settings.settings.no_progress_seconds
        finished = self.service.saved_step == self.settings.steps
        while finished and self.evaluations.open() and not self.service.stop_asked():
            self.presence.check()
            if not any(member.alive for member in self.service.members.all("producer")):
                self.service.metrics.event("evaluation", MEMBER, "no producer is left to evaluate the last version")
                break
            if time.monotonic() > deadline:
                self.service.metrics.event(
                    "evaluation", MEMBER, f"evaluations of versions {self.evaluations.open()} did not end in time"
                )
                break
            time.sleep(LONGEST_POLL)
        self.report.close()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer that checkpoints carry along; None when the model folder has none."""
    if not (folder / "tokenizer.json").is_file():
        return None
    from transformers.models.auto import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def main(arguments: list[str] | None = None) -> int:
    """Run one rank; the exit code is the error's."""
    parser = argparse.ArgumentParser(description="One rank of the consumer, started by torchrun.")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of the consumer's settings")
    log: Any = None
    try:
        settings = read_settings(ConsumerSettings, parser.parse_args(arguments).settings)
        rank = int(os.environ.get("RANK", "0"))
        log_to(Path(settings.folder) / "logs" / f"consumer-{rank}.log")
        log = structlog.get_logger(rank=rank)
        set_threads(settings.settings.threads)
        prepare(settings.settings.platform)
        colossalai.launch_from_torch(seed=settings.seed, verbose=False)
        Service(settings, log).run()
    except RankZeroFailed as error:
        return error.code
    except ForebayError as error:
        if log is not None:
            log.error("failed", error=str(error))
        print(error, file=sys.stderr)
        return error.exit_code
    except Exception as error:  # the last stop: people get a sentence, the log gets the rest
        if log is None:
            raise
        log.exception("ended by an unexpected error")
        print(
            f"unexpected {type(error).__name__}: {error}\n  cure: see consumer-{rank}.log in the run folder's logs",
            file=sys.stderr,
        )
        return 1
    dist.destroy_process_group()
    return 0
