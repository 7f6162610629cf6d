"""A producer leases nothing before its proof and leaves nothing behind: what it held is committed or given back.

It ends when it is drained, or by the error that ended it, which is in its member record then.
"""

import asyncio
import contextlib
import os
import platform
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import redis
import structlog

from buffer.client import connect
from buffer.errors import BufferUnavailable, Fenced, ForebayError, ProofFailed
from buffer.ledger import Ledger
from buffer.members import Members, State
from buffer.metrics import Control, EvaluationQueue, Metrics
from producer.activity import Activity
from producer.data import Dataset, load_dataset
from producer.engine.base import Engine
from producer.evaluation import evaluate
from producer.gate import Gate
from producer.heartbeat import Heartbeat
from producer.leasing import Rollouts, open_pass
from producer.prompts import Renderer, check_template, load_tokenizer
from producer.requests import Requests
from producer.rewards.processes import ScorerProcesses
from producer.rollout import Workshop
from producer.settings import ProducerSettings
from producer.sizes import group_bytes
from producer.updates import Updates, Weights
from weight_sync.manifest import Manifest
from weight_sync.shadow import ShadowReference

FIRST_WEIGHTS_SECONDS = 600.0  # the consumer may have a large model to read and checkpoints to restore
ENGINE_STOP_SECONDS = 60.0
END_SECONDS = 30.0  # most that any one part may take to end

log = structlog.get_logger()


class WeightSource(Weights, Protocol):
    """Where weights come from."""

    def start(self, on_ready: Callable[[Manifest, ShadowReference], None]) -> None:
        """Receive; ``on_ready`` is called in another thread with each whole version."""

    async def self_test(self, engine: Engine) -> None:
        """The load-path self-test; raises ProofFailed."""

    def check(self) -> None:
        """Raise what ended the receiving, if something did."""

    def stop(self) -> None:
        """Receive no more."""


MakeEngine = Callable[[ProducerSettings], Engine]
MakeWeights = Callable[["redis.Redis", ProducerSettings, int], WeightSource]


@dataclass
class Replica:
    """One producer, from its settings to its end."""

    settings: ProducerSettings
    make_engine: MakeEngine
    make_weights: MakeWeights
    activity: Activity = field(default_factory=Activity)
    gate: Gate = field(default_factory=Gate)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _not_evaluating: asyncio.Event = field(default_factory=asyncio.Event)
    _lost: "asyncio.Future[None] | None" = None
    _incarnation: int = 0
    _client: Any = None

    def drain(self, why: str) -> None:
        """Lease no more, finish what runs, leave."""
        if not self._stop.is_set():
            log.info("draining", why=why)
            self._stop.set()

    async def run(self) -> None:
        """Serve until drained; raises the ForebayError that ended it otherwise."""
        settings = self.settings
        self._lost = asyncio.get_running_loop().create_future()
        self._not_evaluating.set()
        # What can be wrong in the spec is found before anything is started, and cheap things before slow ones.
        scorers = ScorerProcesses(settings.rewards)
        check_template(settings.prompt)
        dataset = await asyncio.to_thread(load_dataset, settings.data)
        held_out = await asyncio.to_thread(load_dataset, settings.evaluation.data) if settings.evaluation else None
        self._client = client = await asyncio.to_thread(
            connect,
            settings.redis_url,
            password=os.environ.get(settings.buffer.password_env),
            tls_ca_file=settings.buffer.tls_ca_file,
            timeout_seconds=settings.buffer.timeout_seconds,
        )
        tokenizer = await asyncio.to_thread(load_tokenizer, settings.model.path)
        renderer = Renderer(settings.prompt, tokenizer, settings.model.path)
        renderer.render(dataset.rows[0])
        ledger = Ledger(client, settings.run)
        await asyncio.to_thread(
            ledger.configure,
            groups_per_step=settings.groups_per_step,
            max_staleness=settings.max_staleness,
            budget_bytes=settings.buffer.budget_bytes,
            lease_seconds=settings.buffer.lease_seconds,
            reserve_bytes=group_bytes(
                group_size=settings.group_size,
                prompt_tokens=settings.prompt.max_tokens,
                completion_tokens=settings.sampling.max_tokens,
            ),
            passes=settings.passes,
            data_digest=dataset.digest,
        )
        metrics = Metrics(client, settings.run)
        members = Members(client, settings.run, heartbeat_seconds=settings.buffer.heartbeat_seconds)
        self._incarnation = await asyncio.to_thread(
            members.join, settings.member, role="producer", pool=settings.pool, info=self._info()
        )
        await asyncio.to_thread(ledger.give_back_all, settings.member)  # of an earlier process of this name
        heartbeat = self._heartbeat(members, Control(client, settings.run))
        heartbeat.start()
        await asyncio.to_thread(metrics.event, "join", settings.member, f"pool {settings.pool}, {self._info()['host']}")
        engine = self.make_engine(settings)
        weights = self.make_weights(client, settings, self._incarnation)
        requests = Requests(engine, renderer.decode)
        shop = Workshop(settings, engine, requests, scorers, renderer, dataset, ledger, self.gate, self.activity)
        rollouts = Rollouts(shop, metrics)
        fault: BaseException | None = None
        try:
            await open_pass(shop, 0)
            await scorers.start()
            await self._serve(shop, rollouts, members, metrics, weights, held_out)
        except BaseException as error:
            fault = error
            raise
        finally:
            await self._end(fault, shop, rollouts, members, metrics, weights, heartbeat)

    async def _serve(
        self,
        shop: Workshop,
        rollouts: Rollouts,
        members: Members,
        metrics: Metrics,
        weights: WeightSource,
        held_out: Dataset | None,
    ) -> None:
        settings, loop = self.settings, asyncio.get_running_loop()
        queue = EvaluationQueue(self._client, settings.run)

        async def proved(version: int) -> None:
            state: State = "draining" if self._stop.is_set() else "serving"
            await asyncio.to_thread(members.set_state, settings.member, self._incarnation, state, version=version)

        async def fault(error: ProofFailed) -> None:
            await asyncio.to_thread(members.set_state, settings.member, self._incarnation, "quarantined")
            await asyncio.to_thread(metrics.event, "quarantine", settings.member, str(error))
            self.activity.last_error = error.what
            await rollouts.give_back_all()

        async def evaluate_what_is_due() -> None:
            if held_out is not None:
                await self._evaluate(queue, metrics, shop, held_out)

        pool = settings.settings
        updates = Updates(
            shop.engine,
            shop.requests,
            pool.update_mode,
            pool.drain_seconds,
            weights,
            self.gate,
            proved,
            fault,
            evaluate_what_is_due,
        )

        def ready(manifest: Manifest, reference: ShadowReference) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending
                loop.call_soon_threadsafe(updates.offer, manifest, reference)

        async def start() -> None:
            self.activity.waiting = "the engine starts"
            await shop.engine.start()
            weights.start(ready)
            self.activity.waiting = "the load-path self-test"
            try:
                await weights.self_test(shop.engine)
            except ProofFailed as error:
                await fault(error)
                raise
            self.activity.waiting = "the first policy version"
            await updates.first(FIRST_WEIGHTS_SECONDS)

        if not await self._unless_stopped(start()):
            return
        background = [
            asyncio.create_task(updates.run(), name="updates"),
            asyncio.create_task(rollouts.renew(settings.buffer.lease_seconds), name="renewal"),
            asyncio.create_task(self._report(shop, rollouts, members, metrics, weights, updates), name="metrics"),
        ]
        work = asyncio.create_task(self._work(rollouts, members), name="work")
        try:
            done, _ = await asyncio.wait([work, *background, self._must_lost()], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (work, *background):
                task.cancel()
            await asyncio.gather(work, *background, return_exceptions=True)

    async def _work(self, rollouts: Rollouts, members: Members) -> None:
        """Keep prompts in flight until told to stop, then let them end."""
        running = asyncio.create_task(rollouts.run())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
            rollouts.drain()
            await running
        finally:
            stopped.cancel()
            running.cancel()
        await asyncio.to_thread(
            members.set_state, self.settings.member, self._incarnation, "quarantined" if self.gate.fault else "draining"
        )
        seconds = self.settings.settings.drain_seconds
        deadline = asyncio.get_running_loop().time() + seconds
        await rollouts.finish(seconds)
        with contextlib.suppress(TimeoutError):  # an evaluation that does not end in time is claimed by another
            await asyncio.wait_for(self._not_evaluating.wait(), deadline - asyncio.get_running_loop().time())

    async def _evaluate(self, queue: EvaluationQueue, metrics: Metrics, shop: Workshop, held_out: Dataset) -> None:
        assert self.settings.evaluation is not None
        seconds = self.settings.evaluation.timeout_seconds
        claimed = await asyncio.to_thread(queue.claim, self.settings.member, version=self.gate.proved, seconds=seconds)
        if claimed is None:
            return
        asked, _ = claimed
        # What was asked for may have been overtaken; a record is of the version that answers, which stays meanwhile.
        version, step = self.gate.proved, self.gate.step
        log.info("evaluation", version=version, asked=asked, prompts=len(held_out.rows))
        self._not_evaluating.clear()
        try:
            values = await asyncio.wait_for(
                evaluate(
                    self.settings,
                    engine=shop.engine,
                    scorers=shop.scorers,
                    renderer=shop.renderer,
                    dataset=held_out,
                    name=f"{version}-{self._incarnation}",
                ),
                seconds,
            )
        except TimeoutError:
            text = (
                f"the evaluation of version {version} took more than {seconds:.0f} s and is asked of another producer"
            )
            log.error("evaluation too slow", version=version, seconds=seconds)
            await asyncio.to_thread(metrics.event, "evaluation", self.settings.member, text)
            return
        finally:
            self._not_evaluating.set()
        values |= {"step": float(step), "asked": float(asked)}
        await asyncio.to_thread(metrics.record_evaluation, version, values)
        await asyncio.to_thread(queue.done, asked)
        log.info("evaluated", version=version, accuracy=values["accuracy"], seconds=round(values["seconds"], 2))

    async def _report(
        self,
        shop: Workshop,
        rollouts: Rollouts,
        members: Members,
        metrics: Metrics,
        weights: WeightSource,
        updates: Updates,
    ) -> None:
        """Numbers for people and for the autoscaler; also how many producers share the prompts."""
        while True:
            await shop.engine.check()
            weights.check()
            serving = [
                member
                for member in await asyncio.to_thread(members.all, "producer")
                if member.alive and member.state == "serving"
            ]
            rollouts.producers = max(1, len(serving))
            values = self.activity.values(running=rollouts.count, version=self.gate.proved)
            values |= {
                "update_seconds": updates.seconds,
                "updates": float(updates.count),
                "scorers_replaced": float(shop.scorers.replaced),
            }
            await asyncio.to_thread(metrics.record_producer, self.settings.member, values)
            await asyncio.sleep(self.settings.buffer.heartbeat_seconds)

    async def _unless_stopped(self, action: Awaitable[None]) -> bool:
        """Run ``action`` to its end; False when a stop came first."""
        task = asyncio.ensure_future(action)
        stopped = asyncio.create_task(self._stop.wait())
        lost = self._must_lost()
        watched: set[asyncio.Future[Any]] = {task, stopped, lost}
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                lost.result()
            if task.done():
                task.result()
                return True
            return False
        finally:
            stopped.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _must_lost(self) -> "asyncio.Future[None]":
        assert self._lost is not None
        return self._lost

    def _heartbeat(self, members: Members, control: Control) -> Heartbeat:
        loop = asyncio.get_running_loop()

        def lost(error: ForebayError) -> None:
            def tell() -> None:
                if not self._must_lost().done():
                    self._must_lost().set_exception(error)

            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(tell)

        def stop(flag: str) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.drain, f"the flag `stop` is `{flag}`")

        return Heartbeat(
            members,
            control,
            name=self.settings.member,
            incarnation=self._incarnation,
            seconds=self.settings.buffer.heartbeat_seconds,
            info=self._info,
            on_stop=stop,
            on_error=lost,
        )

    def _info(self) -> dict[str, str]:
        return {
            "pid": str(os.getpid()),
            "host": socket.gethostname(),
            "machine": platform.machine(),
            "waiting": self.activity.waiting,
            "last_error": self.activity.last_error,
        }

    async def _end(
        self,
        fault: BaseException | None,
        shop: Workshop,
        rollouts: Rollouts,
        members: Members,
        metrics: Metrics,
        weights: WeightSource,
        heartbeat: Heartbeat,
    ) -> None:
        """End every part whatever state it is in; what fails here is logged and hides no earlier error."""
        reachable = not isinstance(fault, BufferUnavailable)
        member = self.settings.member
        await _attempt("give prompts back", rollouts.give_back_all(reachable=reachable))
        await _attempt("stop receiving", asyncio.to_thread(weights.stop))
        await _attempt("stop the scorers", shop.scorers.stop())
        await _attempt("stop the engine", shop.engine.stop(), ENGINE_STOP_SECONDS)
        await asyncio.to_thread(heartbeat.stop)
        if not reachable:
            return
        if fault is not None:
            self.activity.last_error = str(fault)
            await _attempt("report the error", asyncio.to_thread(metrics.event, "failure", member, str(fault)))
            await _attempt("report", asyncio.to_thread(members.report, member, self._incarnation, self._info()))
        if isinstance(fault, Fenced):
            return  # a newer process has the name: its prompts are not ours to give back
        await _attempt("give back what is left", asyncio.to_thread(shop.ledger.give_back_all, member))
        if fault is None:  # the record of one that failed stays: it has the error
            await _attempt("leave", asyncio.to_thread(members.leave, member, self._incarnation))
            await _attempt("say so", asyncio.to_thread(metrics.event, "leave", member, "drained"))


async def _attempt(what: str, action: Awaitable[object], seconds: float = END_SECONDS) -> None:
    try:
        await asyncio.wait_for(action, seconds)
    except Exception as error:  # noqa: BLE001 - the next part has to end too
        log.error("could not end cleanly", what=what, error=f"{type(error).__name__}: {error}")
