"""A run ends in one of three ways, finished, stopped or failed, and in each its folder holds all that a resume needs.

This process starts the embedded server (when no URL is given), the controller, the consumer and the producers, starts
again what dies, and is the last to end. It holds no state of its own: kill it and `forebay run --resume` goes on.

What an end of a process means:

    producer    told to drain, as fewer are desired: expected, whatever the code; killed when it does not end in time
                killed, its engine or the network failed, 0 untold: started again, at most `RESTARTS` times in a row
                its settings or its proof refused (exit codes 2, 6): not again; without any producer the run fails
    consumer    killed: started again with `resume`; an error of its own (NaN, deadline, ...): the run fails
    controller  started again, at most `RESTARTS` times; the run goes on without it
    server      started again on the same data and port
"""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import redis

from buffer import server
from buffer.client import connect
from buffer.errors import BufferUnavailable, ForebayError, LedgerBroken, ProofFailed, SpecError
from buffer.ledger import Ledger
from buffer.members import Members
from buffer.metrics import Control, EvaluationQueue, Metrics
from buffer.pools import Pools, member_names, pool_of
from deploy import run_folder
from deploy.controller.service import listen
from deploy.pools.base import Ended, Restarts, RunFailed
from deploy.pools.local import command, engine_on_this_machine, python_of
from deploy.pools.process import ProcessPool, adopt_orphans, end_descendants
from deploy.pools.replicas import INSIST_SECONDS, WHO, Replicas
from deploy.pools.silent import end_silent
from deploy.report import make_report
from deploy.run_folder import RunRecord
from deploy.spec import RunSpec
from deploy.status import Status, read_status

Ending = Literal["finished", "stopped", "failed"]

LOOK_SECONDS = 0.25  # between two looks at the processes
SHOW_SECONDS = 1.0  # between two looks at the status
CONTROLLER_SECONDS = 10.0
ASK_SECONDS = 3.0  # most that one call to Redis may retry: meanwhile nobody looks after the processes


class Run:
    """One `forebay run`, from the empty folder to the report."""

    def __init__(self, spec: RunSpec, *, resume: bool, show: Callable[[Status], None]) -> None:
        self.spec = spec
        self.resume = resume
        self.folder = spec.path
        self._show = show
        self._started = time.time()
        self._signals: list[int] = []
        self._restarts = Restarts()
        self._server: server.EmbeddedServer | None = None
        self._client: redis.Redis
        self._replicas: Replicas
        self._redis_url = ""
        self._port = 0
        self._consumer_done = False
        self.producers = ProcessPool(self.folder, self._producer_command)
        self.consumer = ProcessPool(self.folder, self._consumer_command)
        self.controller = ProcessPool(self.folder, self._controller_command)

    # -- what the processes are started with

    def _producer_command(self, name: str) -> Any:
        settings = self.spec.producer_settings(pool_of(name), name, self._redis_url)
        own = settings.settings
        engine = engine_on_this_machine(self.spec, own.engine)
        settings = settings.model_copy(update={"settings": own.model_copy(update={"engine": engine})})
        return command("producer", "producer.service", settings, name, self.folder)

    def _consumer_command(self, name: str) -> Any:
        settings = self.spec.consumer_settings(self._redis_url, resume=self.resume)
        return command("consumer", "consumer.launch", settings, name, self.folder)

    def _controller_command(self, name: str) -> Any:
        settings = self.spec.controller_settings(self._redis_url, port=self._port)
        return command("controller", "deploy.controller.service", settings, name, self.folder)

    # -- the whole

    def run(self) -> tuple[Ending, int, dict[str, Any]]:
        """Run to an end; how it ended, the exit code and the report. Raises ForebayError when nothing was started."""
        for service in ("producer", "consumer"):
            python_of(service)
        adopt_orphans()
        with ExitStack() as stack:
            before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
            stack.callback(lambda: [signal.signal(number, handler) for number, handler in before.items()])
            run_folder.make(self.folder)
            stack.enter_context(run_folder.hold(self.folder))
            self._refuse_wrong_folder()
            self._port = self._choose_port()
            stack.callback(end_descendants, 10.0)
            self._open_buffer(stack)
            self._write_record()
            return self._supervise()

    def _refuse_wrong_folder(self) -> None:
        exists = (self.folder / run_folder.RECORD_FILE).exists()
        if exists and not self.resume:
            raise SpecError(
                "the run folder holds a run already",
                where=str(self.folder),
                cure="go on with --resume, keep it aside with --restart, or choose another `folder`",
            )
        if self.resume and not exists:
            raise SpecError(
                "there is nothing to resume: the folder holds no run",
                where=str(self.folder),
                cure="start without --resume, or name the folder of the run in the spec",
            )
        if self.resume and (known := run_folder.read_record(self.folder).run) != self.spec.name:
            raise SpecError(
                f"the folder holds the run `{known}`, the spec is of `{self.spec.name}`",
                where=str(self.folder),
                cure="give the spec the run's own `name`, or another `folder`",
            )

    def _refuse_lost_data(self) -> None:
        trained = any((self.folder / "journal").glob("step-*")) or any((self.folder / "checkpoints").glob("step-*"))
        if self.resume and trained and not Ledger(self._client, self.spec.name).passes_opened():
            raise LedgerBroken(
                "the run has trained, but the server knows nothing of it: its data are gone",
                where=self._redis_url,
                cure="give the server its data back; else start a new run from the model in the newest checkpoint",
            )

    def _choose_port(self) -> int:
        """The controller's port, free at this moment; raises ForebayError when the spec's is in use."""
        with listen(self.spec.controller.host, self.spec.controller.port or 0) as listener:
            return int(listener.getsockname()[1])

    def _open_buffer(self, stack: ExitStack) -> None:
        buffer = self.spec.buffer
        if buffer.url is None:
            self._server = server.start(self.folder / "redis")
            stack.callback(self._stop_server)
            os.environ[buffer.password_env] = self._server.password
            self._redis_url = self._server.url
        else:
            self._redis_url = buffer.url
        self._client = connect(
            self._redis_url,
            password=run_folder.redis_password(self.folder, buffer),
            tls_ca_file=buffer.tls_ca_file,
            timeout_seconds=ASK_SECONDS,
        )
        self._refuse_lost_data()
        if not self.resume and Ledger(self._client, self.spec.name).passes_opened():
            raise SpecError(
                f"the server holds a run named `{self.spec.name}` already",
                where=self._redis_url,
                cure="give this run another `name`, or resume the other one in its folder",
            )
        control = Control(self._client, self.spec.name)
        for flag in ("stop", "pause", "checkpoint"):
            control.set(flag, "")
        control.set("phase", "starting")
        self._replicas = self._open_pools()

    def _open_pools(self) -> Replicas:
        run = self.spec.name
        pools = Pools(self._client, run)
        pools.declare(self.spec.pools())
        members = Members(self._client, run, heartbeat_seconds=self.spec.buffer.heartbeat_seconds)
        wanted = {name for pool, has in pools.desired().items() for name in member_names(pool, has.replicas)}
        for member in members.all("producer"):  # that died with an earlier `forebay run` and are not to come again
            if member.name not in wanted:
                members.leave(member.name, member.incarnation)
        return Replicas(
            self.producers,
            pools=pools,
            ledger=Ledger(self._client, run),
            members=members,
            metrics=Metrics(self._client, run),
            evaluations=EvaluationQueue(self._client, run),
            drain_seconds={name: pool.drain_seconds for name, pool in self.spec.producers.items()},
            folder=self.folder,
        )

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.stop()

    def _write_record(self) -> None:
        host = self.spec.controller.host
        record = RunRecord(
            run=self.spec.name,
            steps=self.spec.steps,
            buffer=self.spec.buffer,
            redis_url=self._redis_url,
            controller_url=f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self._port}",
            token_env=self.spec.controller.token_env,
        )
        run_folder.write_record(self.folder, record)

    def _supervise(self) -> tuple[Ending, int, dict[str, Any]]:
        ending: Ending
        try:
            self.controller.start("controller")
            self.consumer.start("consumer")
            self._watch()  # its first look starts the producers
            trained = Ledger(self._client, self.spec.name).last_trained_step()
            ending, code = ("finished", 0) if trained >= self.spec.steps else ("stopped", 0)
            reason = "all steps are made" if ending == "finished" else "the flag `stop` was set"
            if self._signals:
                reason, code = f"{signal.Signals(self._signals[0]).name} was received", 128 + self._signals[0]
            failure: ForebayError | None = None
        except ForebayError as error:
            ending, reason, failure = "failed", str(error), error
            code = error.code if isinstance(error, RunFailed) else error.exit_code
        report = self._wind_up(ending, reason, failure)
        return ending, code, report

    def _on_signal(self, number: int, _: object) -> None:
        self._signals.append(number)

    def _watch(self) -> None:
        """Until the consumer has ended well; raises ForebayError when the run cannot go on."""
        shown = 0.0
        stopping_since: float | None = None
        unreachable_since: float | None = None
        control, metrics = Control(self._client, self.spec.name), Metrics(self._client, self.spec.name)
        while not self._consumer_done:
            if len(self._signals) > 1:
                raise RunFailed("the run was told twice to stop, so it was killed", 128 + self._signals[0])
            if stopping_since is not None and time.monotonic() - stopping_since > self._stop_seconds():
                raise RunFailed(
                    f"the consumer did not end within {self._stop_seconds():g} s of being told to stop",
                    1,
                    where=str(self.folder / "logs"),
                    cure="go on with --resume: nothing that was journalled is lost",
                )
            try:
                self._restart_dead_server(metrics)
                if self._signals:
                    control.set("stop", "drain")
                if stopping_since is None and control.get("stop"):  # set here, or by the controller
                    stopping_since = time.monotonic()
                    self._set_phase("draining")
                self._look(metrics, stopping=stopping_since is not None)
                if time.monotonic() - shown > SHOW_SECONDS:
                    shown = time.monotonic()
                    self._show_status()
                    self._end_silent(metrics)
                unreachable_since = None
            except BufferUnavailable:
                # The services wait as long; a server that died is started again in the next round.
                unreachable_since = unreachable_since or time.monotonic()
                if time.monotonic() - unreachable_since > self.spec.buffer.timeout_seconds:
                    raise
            time.sleep(LOOK_SECONDS)

    def _stop_seconds(self) -> float:
        """What a step, its checkpoint and the publication may take."""
        sync = self.spec.weight_sync
        return 60.0 + sync.join_seconds + sync.transfer_seconds

    def _restart_dead_server(self, metrics: Metrics) -> None:
        """Before anything else is asked of Redis: a call that fails must not keep the server from being started."""
        if self._server is not None and not self._server.alive():
            self._server = server.start(self.folder / "redis", port=self._server.port)
            metrics.event("restart", WHO, "the embedded server ended and was started again on its data")

    def _end_silent(self, metrics: Metrics) -> None:
        beat = self.spec.buffer.heartbeat_seconds
        members = Members(self._client, self.spec.name, heartbeat_seconds=beat)
        for member in end_silent([m for m in members.all() if m.role in ("producer", "consumer")]):
            metrics.event("failure", member.name, f"it said nothing for {member.seconds_since_report:.0f} s: killed")

    def _look(self, metrics: Metrics, *, stopping: bool) -> None:
        for ended in self.consumer.collect():
            self._consumer_ended(ended, metrics, stopping=stopping)
        for ended in self.controller.collect():
            again = self._restarts.allow(ended)
            if again and not stopping:
                self.controller.start(ended.name)
            metrics.event("restart" if again else "failure", "controller", ended.how())
        self._replicas.look(stopping=stopping or self._consumer_done)

    def _consumer_ended(self, ended: Ended, metrics: Metrics, *, stopping: bool) -> None:
        if ended.code == 0:
            self._consumer_done = True
            return
        if not self._restarts.allow(ended) or not ended.killed or stopping:
            raise RunFailed.because(ended, "the consumer", self.folder / "logs" / "consumer.out")
        self.resume = True
        self.consumer.start(ended.name)
        metrics.event("restart", "consumer", f"it {ended.how()} and is started again")

    def _show_status(self) -> None:
        status = self._status()
        if status.phase in (None, "", "starting") and status.step:
            self._set_phase("running")
        quarantined = [p.name for p in status.producers if p.alive and p.state == "quarantined"]
        if quarantined and len(quarantined) == len(self.producers.names()):
            raise RunFailed(
                f"every producer is quarantined: {', '.join(quarantined)}",
                ProofFailed.exit_code,
                where=str(self.folder / "logs"),
                cure="read the events in `forebay status`; replicas that fail their proof must not generate",
            )
        self._show(status)

    def _status(self) -> Status:
        return read_status(
            self._client,
            run=self.spec.name,
            steps=self.spec.steps,
            heartbeat_seconds=self.spec.buffer.heartbeat_seconds,
        )

    def _set_phase(self, phase: str) -> None:
        Control(self._client, self.spec.name).set("phase", phase)

    # -- the end

    def _wind_up(self, ending: Ending, reason: str, failure: ForebayError | None) -> dict[str, Any]:
        """Drain what is left, write the report; the buffer is closed by the caller's stack."""
        reachable = self._tell_end(ending, reason)
        drain = max(pool.drain_seconds for pool in self.spec.producers.values())
        self.producers.ask_to_end()
        if failure is not None:
            self.consumer.stop(INSIST_SECONDS if len(self._signals) < 2 else 0.0)
        if not self.producers.wait(drain + INSIST_SECONDS if len(self._signals) < 2 else 0.0):
            self.producers.kill()
        for name in self.producers.names():
            if reachable:
                Ledger(self._client, self.spec.name).give_back_all(name)
        report: dict[str, Any] = {"run": self.spec.name, "status": ending, "reason": reason}
        if reachable:
            report = make_report(
                self._client,
                run=self.spec.name,
                status=ending,
                reason=reason,
                started=self._started,
                folder=self.folder,
            )
            self._show(self._status())
        run_folder.replace_file(self.folder / run_folder.REPORT_FILE, _json(report))
        self.controller.stop(CONTROLLER_SECONDS)
        return report

    def _tell_end(self, ending: Ending, reason: str) -> bool:
        """Leave word in Redis; whether it could be reached."""
        try:
            control = Control(self._client, self.spec.name)
            control.set("stop", "drain")
            control.set("phase", ending if ending != "failed" else f"failed: {reason.splitlines()[0]}")
        except BufferUnavailable:
            return False
        return True


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def set_aside(folder: Path) -> Path | None:
    """Move an ended run's folder to the first free `FOLDER.n`; None when there is nothing to move."""
    if not (folder / run_folder.RECORD_FILE).exists():
        return None
    with run_folder.hold(folder):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
    return aside
