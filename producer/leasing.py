"""Every lease that this producer holds is being answered, renewed, or on its way back; none is kept for later.

Prompts are leased in small bites, and no producer takes more than its share of what may run, so that several share a
short supply fairly. A refusal is waited out, with its reason kept for whoever asks why nothing is generated.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import structlog

from buffer.errors import Fenced, ProofFailed
from buffer.ledger import Lease
from buffer.metrics import Metrics
from producer.data import pass_order
from producer.rollout import Aborted, Workshop, roll_out

FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.2
BITES = 8  # a producer takes at most this part of its concurrency at once

log = structlog.get_logger()


@dataclass(frozen=True)
class _Running:
    lease: Lease
    task: "asyncio.Task[None]"


@dataclass
class Rollouts:
    """The prompts in flight of one producer."""

    shop: Workshop
    metrics: Metrics
    producers: int = 1  # that serve now, this one included
    _running: dict[int, _Running] = field(default_factory=dict)  # by fencing token
    _draining: asyncio.Event = field(default_factory=asyncio.Event)
    _failed: asyncio.Future[None] | None = None
    _reachable: bool = True

    @property
    def count(self) -> int:
        """Prompts in flight."""
        return len(self._running)

    def drain(self) -> None:
        """Lease no more."""
        self._draining.set()

    async def run(self) -> None:
        """Keep prompts in flight until drained; raises what a rollout raises that it cannot answer for itself."""
        self._failed = asyncio.get_running_loop().create_future()
        pause = FIRST_PAUSE_SECONDS
        while not self._draining.is_set():
            leased = await self._lease_bite()
            pause = FIRST_PAUSE_SECONDS if leased else min(pause * 2, LONGEST_PAUSE_SECONDS)
            await self._wait(0 if leased else pause)
        self.shop.activity.waiting = "draining"

    async def finish(self, seconds: float) -> None:
        """Let what runs end within ``seconds``, then give the rest back."""
        tasks = [running.task for running in self._running.values()]
        if tasks and self._failed is not None and not self._failed.done():
            ended: asyncio.Future[Any] = asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait({ended, self._failed}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        await self.give_back_all()
        if self._failed is not None and self._failed.done():
            self._failed.result()

    async def give_back_all(self, *, reachable: bool = True) -> None:
        """End every rollout and return its prompt (when Redis cannot be reached, the lease's end returns it)."""
        self._reachable = reachable
        running = list(self._running.values())
        for one in running:
            one.task.cancel()
        if running:
            await asyncio.gather(*(one.task for one in running), return_exceptions=True)

    async def renew(self, lease_seconds: float) -> None:
        """Extend the leases of what runs, for ever; what is no longer held is aborted."""
        while True:
            await asyncio.sleep(lease_seconds / 3)
            before = dict(self._running)
            if not before:
                continue
            leases = [one.lease for one in before.values()]
            held = {lease.token for lease in await asyncio.to_thread(self.shop.ledger.renew, leases)}
            for token in before.keys() - held:
                if token in self._running:  # not finished meanwhile
                    await self._event("lease lost", f"prompt {before[token].lease.prompt} is answered by another now")
                    before[token].task.cancel()

    def _room(self) -> int:
        settings = self.shop.settings
        concurrency = settings.settings.engine.concurrency
        most = concurrency
        if self.producers > 1:
            window = (settings.max_staleness + 1) * settings.groups_per_step
            most = min(most, -(-window // self.producers))
        return min(most - self.count, max(1, concurrency // BITES))

    async def _lease_bite(self) -> bool:
        """Whether something was leased, or a pass opened."""
        shop, room = self.shop, self._room()
        if not shop.gate.open:
            shop.activity.waiting = "quarantined" if shop.gate.fault else "no proved version"
            return False
        if not shop.requests.open:
            shop.activity.waiting = "running prompts end before an update"
            return False
        if room <= 0:
            shop.activity.waiting = ""
            return False
        answer = await asyncio.to_thread(
            shop.ledger.lease,
            shop.settings.member,
            count=room,
            version=shop.gate.proved,
            tasks=shop.settings.settings.tasks,
        )
        for lease in answer.leases:
            task = asyncio.create_task(self._answer(lease), name=f"prompt {lease.prompt}")
            self._running[lease.token] = _Running(lease, task)
        if answer.refusal == "no_pass":
            return await self._open_next_pass()
        shop.activity.waiting = "" if answer.leases else f"{answer.refusal}: {answer.detail}"
        return bool(answer.leases)

    async def _open_next_pass(self) -> bool:
        number = await asyncio.to_thread(self.shop.ledger.passes_opened)
        await open_pass(self.shop, number)
        return True

    async def _wait(self, seconds: float) -> None:
        """Until the time is over, a rollout has ended in an error, or draining begins."""
        assert self._failed is not None
        if seconds:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), seconds)
        if self._failed.done():
            self._failed.result()

    async def _answer(self, lease: Lease) -> None:
        """Run one rollout to its end; whatever ends it without a commit gives the prompt back."""
        committed = False
        try:
            await roll_out(self.shop, lease)
            committed = True
        except Fenced as error:
            committed = True  # somebody else's now
            await self._event("fenced", error.what)
        except Aborted as error:
            await self._event("aborted", str(error))
        except ProofFailed:
            pass  # told once, by the update
        except asyncio.CancelledError:
            pass  # a drain or a lost lease: this task's only caller is here
        except Exception as error:  # noqa: BLE001 - raised again by `run`, in the service's own task
            if self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)
        finally:
            if not committed and self._reachable:
                await asyncio.to_thread(self.shop.ledger.give_back, [lease])
            self._running.pop(lease.token, None)

    async def _event(self, kind: str, text: str) -> None:
        log.warning(kind, text=text)
        await asyncio.to_thread(self.metrics.event, kind, self.shop.settings.member, text)


async def open_pass(shop: Workshop, number: int) -> None:
    """Open a pass, or find it open: every producer would open it with the same order."""
    order = pass_order(len(shop.dataset.rows), shop.settings.seed, number)
    if await asyncio.to_thread(shop.ledger.open_pass, number, order, shop.dataset.tasks()):
        log.info("pass opened", pass_number=number, prompts=len(order))
