"""What runs becomes what is desired: a replica too few is started, one too many drains, and only its end is expected.

The replicas of a pool are always the lowest numbers, `NAME-0` to `NAME-(n-1)`: the highest one goes first, and a name
that is desired again while its process still drains is started when that has ended. So a machine never has more
processes of a pool than were desired at once. Nothing is kept here that another start would need: it is in Redis.
"""

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from buffer.errors import ProofFailed, SpecError
from buffer.ledger import Ledger
from buffer.members import Members
from buffer.metrics import EvaluationQueue, Metrics
from buffer.pools import Pools, member_names, pool_of
from deploy.pools.base import Ended, Pool, Restarts, RunFailed

INSIST_SECONDS = 15.0  # between the end of the time to drain and killing
WHO = "forebay run"


class Replicas:
    """The producers of one run, whatever kind of processes they are."""

    def __init__(
        self,
        processes: Pool,
        *,
        pools: Pools,
        ledger: Ledger,
        members: Members,
        metrics: Metrics,
        evaluations: EvaluationQueue,
        drain_seconds: Mapping[str, float],
        folder: Path,
    ) -> None:
        """``drain_seconds``: of each pool that these processes belong to."""
        self._processes = processes
        self._pools, self._ledger, self._members, self._metrics = pools, ledger, members, metrics
        self._evaluations = evaluations
        self._drain_seconds = drain_seconds
        self._folder = folder
        self._restarts = Restarts()
        self._leaving: dict[str, float] = {}  # told to drain; when they are killed
        self._killed: set[str] = set()
        self._unnoted: deque[Ended] = deque()
        self._given_up: dict[str, Ended] = {}

    def look(self, *, stopping: bool) -> None:
        """Take note of what ended, then start and drain what differs; raises RunFailed when nobody can generate."""
        self._unnoted += self._processes.collect()
        while self._unnoted:  # an end is forgotten only when it is noted: the server may be away meanwhile
            self._ended(self._unnoted[0], stopping=stopping)
            self._unnoted.popleft()
        self._insist()
        if not stopping:
            self._reconcile()
            if self._given_up and not self._processes.names():
                raise self._failed(next(iter(self._given_up.values())))

    def _reconcile(self) -> None:
        # A pool that the server does not know keeps what it has: a server without data is no order to end everything.
        desired = {name: pool.replicas for name, pool in self._pools.desired().items() if name in self._drain_seconds}
        wanted = [name for pool, replicas in desired.items() for name in member_names(pool, replicas)]
        running = self._processes.names()
        for name in sorted(set(running) - set(wanted) - self._leaving.keys(), key=_number, reverse=True):
            if pool_of(name) in desired:
                self._drain(name)
        # Who takes a replica away and asks for it again gives it a new chance.
        self._given_up = {name: end for name, end in self._given_up.items() if name in wanted}
        for name in wanted:
            if name not in running and name not in self._given_up:
                self._processes.start(name)

    def _drain(self, name: str) -> None:
        seconds = self._drain_seconds[pool_of(name)]
        self._pools.told_to_drain(name)
        self._processes.ask_to_end(name)
        self._leaving[name] = time.monotonic() + seconds + INSIST_SECONDS
        self._metrics.event("scale", WHO, f"{name} was told to drain within {seconds:g} s")

    def _insist(self) -> None:
        now = time.monotonic()
        late = [name for name, deadline in self._leaving.items() if now > deadline and name not in self._killed]
        if late:
            self._processes.kill(*late)
            self._killed.update(late)

    def _ended(self, ended: Ended, *, stopping: bool) -> None:
        # What it had leased or claimed goes back at once, not only when its time runs out.
        left = self._ledger.give_back_all(ended.name)
        self._evaluations.release(ended.name)
        if ended.name in self._leaving:
            self._left(ended, left)
            return
        if stopping:
            return
        hopeless = ended.code in (SpecError.exit_code, ProofFailed.exit_code)
        again = self._restarts.allow(ended) and not hopeless
        if again:  # by the next look, if it is still desired
            self._metrics.event("restart", ended.name, f"it {ended.how()} and is started again")
            return
        self._given_up[ended.name] = ended
        self._metrics.event("failure", ended.name, f"it {ended.how()} and is not started again")
        if ended.code == SpecError.exit_code:
            raise self._failed(ended)

    def _left(self, ended: Ended, left: int) -> None:
        """One that was told to drain has ended, and however it did, it is gone for good."""
        del self._leaving[ended.name]
        self._restarts.forget(ended.name)
        how = "has drained and left"
        if ended.name in self._killed:
            self._killed.discard(ended.name)
            how = "did not drain in time and was killed"
        elif ended.code != 0:
            how = f"{ended.how()} while it drained"
        for member in self._members.all("producer"):
            if member.name == ended.name:  # it did not come to say goodbye
                self._members.leave(member.name, member.incarnation)
        self._pools.ended(ended.name)
        self._metrics.event("scale", WHO, f"{ended.name} {how}; {left} prompts went back from it")

    def _failed(self, ended: Ended) -> RunFailed:
        log = self._folder / "logs" / f"{ended.name}.out"
        return RunFailed.because(ended, f"the producer {ended.name}", log)


def _number(name: str) -> int:
    return int(name.rsplit("-", 1)[1])
