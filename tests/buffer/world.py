"""A run on a real server, set up in one line, and groups to commit to it."""

from collections.abc import Sequence

import redis

from buffer.ledger import Lease, LeaseAnswer, Ledger, Plan
from buffer.members import Members
from buffer.metrics import Control
from buffer.records import Group, Sample, Sampling, pack_float32, pack_int32


def make_group(lease: Lease, *, producer: str = "p0", version: int = 0, samples: int = 2, length: int = 3) -> Group:
    """A small group that answers a lease."""
    return Group(
        prompt=lease.prompt,
        row=lease.row,
        pass_number=lease.pass_number,
        task=lease.task,
        prompt_token_ids=pack_int32([1, 2]),
        samples=tuple(
            Sample(
                token_ids=pack_int32(range(length)),
                log_probs=pack_float32([-0.5] * length),
                versions=pack_int32([version] * length),
                finish_reason="stop",
                text="42",
                outcome="scored",
                reward=float(index % 2),
            )
            for index in range(samples)
        ),
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=8),
        producer=producer,
        pool="producer",
    )


class World:
    """One run: a ledger, its members and flags, and short ways to move it along."""

    def __init__(self, client: "redis.Redis", run: str) -> None:
        self.client, self.run = client, run
        self.ledger = Ledger(client, run)
        self.members = Members(client, run, heartbeat_seconds=0.2)
        self.control = Control(client, run)
        self.fence = 0

    def set_up(
        self,
        *,
        rows: int = 12,
        per_step: int = 3,
        staleness: int = 1,
        budget: int = 1_000_000,
        reserve: int = 1_000,
        lease_seconds: float = 30.0,
        passes: int | None = None,
        tasks: Sequence[str] | None = None,
        version: bool = True,
        producers: Sequence[str] = ("p0", "p1"),
    ) -> "World":
        """Configure, open pass 0, publish version 0 and register producers that serve it."""
        self.rows, self.tasks = rows, list(tasks or ["default"] * rows)
        self.ledger.configure(
            groups_per_step=per_step,
            max_staleness=staleness,
            budget_bytes=budget,
            lease_seconds=lease_seconds,
            reserve_bytes=reserve,
            passes=passes,
            data_digest="digest",
        )
        self.open_pass(0)
        self.fence = self.ledger.register_publisher()
        if version:
            self.publish(0)
            for name in producers:
                self.serve(name, 0)
        return self

    def open_pass(self, number: int) -> bool:
        return self.ledger.open_pass(number, list(reversed(range(self.rows))), self.tasks)

    def publish(self, step: int) -> int:
        return self.ledger.publish(fence=self.fence, step=step)

    def serve(self, name: str, version: int) -> None:
        incarnation = self.members.join(name, role="producer", pool="producer", info={})
        self.members.set_state(name, incarnation, "serving", version=version)

    def lease(self, name: str = "p0", count: int = 1, version: int = 0) -> LeaseAnswer:
        return self.ledger.lease(name, count=count, version=version)

    def commit(self, lease: Lease, **group: object) -> bool:
        return self.ledger.commit(lease, make_group(lease, **group), usable=True)  # type: ignore[arg-type]

    def generate(self, count: int, name: str = "p0", version: int = 0) -> list[Lease]:
        leases = list(self.lease(name, count, version).leases)
        for lease in leases:
            self.commit(lease, producer=name, version=version)
        return leases

    def plan(self, step: int, final: bool = False) -> Plan:
        plan = self.ledger.plan(step, fence=self.fence, final=final)
        assert isinstance(plan, Plan), plan
        return plan

    def train(self, step: int) -> Plan:
        plan = self.plan(step)
        self.ledger.retire(step, fence=self.fence)
        return plan

    def counts(self) -> dict[str, int]:
        counts = self.ledger.summary()["counts"]
        assert isinstance(counts, dict)
        return counts

    def holds(self) -> None:
        report = self.ledger.verify()
        assert not report.problems, "\n".join(report.problems)
