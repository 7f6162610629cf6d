"""The ledger against a small model of it, on the real server: random operations, each now and then sent twice.

The model knows only what the specification says: states, tickets, tokens, quota, budget and the order of plans.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from buffer.errors import Fenced, ForebayError
from buffer.ledger import Lease, Plan, Waiting
from buffer.records import encode_group
from tests.buffer.world import World, make_group

ROWS, PER_STEP, PASSES, RESERVE, BUDGET = 6, 2, 3, 1_000, 6_000
MEMBERS = ("p0", "p1", "p2")
_numbers = itertools.count()


@dataclass
class Prompt:
    """What the model knows of a prompt."""

    state: str = "pending"
    ticket: int = 0
    token: int = 0
    holder: str = ""
    size: int = 0
    step: int = 0


@dataclass
class Model:
    """The specification, in memory."""

    staleness: int
    prompts: dict[int, Prompt] = field(default_factory=dict)
    passes: int = 0
    tickets: int = 0
    planned: list[list[int]] = field(default_factory=list)
    trained: int = 0
    consumed: list[int] = field(default_factory=list)  # by version
    fence: int = 0

    def of(self, *states: str) -> list[int]:
        return [number for number, prompt in self.prompts.items() if prompt.state in states]

    def returned(self) -> list[int]:
        return sorted((n for n in self.of("pending") if self.prompts[n].ticket), key=lambda n: self.prompts[n].ticket)

    def next(self, version: int) -> int | str:
        """The prompt that the next lease gets, or why there is none."""
        accepted = len(self.of("generated", "planned", "trained"))
        running, returned = len(self.of("leased")), self.returned()
        free = self.consumed[version] + (self.staleness + 1) * PER_STEP - accepted - running
        if free <= 0:
            return "staleness"
        if returned:
            return returned[0]
        new = [number for number in self.of("pending")]
        if not new:
            return "exhausted" if self.passes >= PASSES else "no_pass"
        stored = sum(self.prompts[number].size for number in self.of("generated", "planned"))
        if stored + (running + 1) * RESERVE > BUDGET:
            return "budget"
        return min(new)


class LedgerMachine(RuleBasedStateMachine):
    """Operations in any order; `twice` repeats one as a client does whose answer was lost."""

    client: "redis.Redis"

    @initialize(staleness=st.integers(0, 2))
    def set_up(self, staleness: int) -> None:
        self.model = Model(staleness)
        self.world = World(self.client, f"model-{next(_numbers)}")
        self.world.rows, self.world.tasks = ROWS, ["default"] * ROWS
        self.ledger = self.world.ledger
        self.ledger.configure(
            groups_per_step=PER_STEP,
            max_staleness=staleness,
            budget_bytes=BUDGET,
            lease_seconds=600.0,
            reserve_bytes=RESERVE,
            passes=PASSES,
            data_digest="digest",
        )
        self.model.fence = self.world.fence = self.ledger.register_publisher()
        self.incarnations = {
            name: self.world.members.join(name, role="producer", pool="p", info={}) for name in MEMBERS
        }
        self.leases: list[Lease] = []  # every lease ever given, held or not
        self.open_pass()
        self.publish()

    # -- producers

    @precondition(lambda self: self.model.passes < PASSES)
    @rule()
    def open_pass(self) -> None:
        assert self.world.open_pass(self.model.passes)
        first = self.model.passes * ROWS
        self.model.prompts |= {number: Prompt() for number in range(first, first + ROWS)}
        self.model.passes += 1
        assert not self.world.open_pass(self.model.passes - 1)

    @rule(member=st.sampled_from(MEMBERS), count=st.integers(1, 5), twice=st.booleans())
    def lease(self, member: str, count: int, twice: bool) -> None:
        version = self.ledger.current_version()
        expected: list[int] = []
        refusal: str | None = None
        while len(expected) < count:
            found = self.model.next(version)
            if isinstance(found, str):
                refusal = found
                break
            prompt = self.model.prompts[found]
            if not prompt.ticket:
                self.model.tickets += 1
                prompt.ticket = self.model.tickets
            prompt.state, prompt.holder = "leased", member
            expected.append(found)
        with pytest.MonkeyPatch.context() as patch:
            if twice:
                ask = self.ledger._ask
                patch.setattr(self.ledger, "_ask", lambda *parts: (ask(*parts), ask(*parts))[1])
            answer = self.ledger.lease(member, count=count, version=version)
        assert [lease.prompt for lease in answer.leases] == expected
        assert answer.refusal == refusal or (answer.leases and answer.refusal is None)
        for lease in answer.leases:
            prompt = self.model.prompts[lease.prompt]
            assert lease.ticket == prompt.ticket
            assert lease.token > prompt.token
            prompt.token = lease.token
        self.leases += answer.leases

    def held(self, lease: Lease) -> bool:
        prompt = self.model.prompts[lease.prompt]
        return prompt.state == "leased" and prompt.token == lease.token

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), usable=st.integers(0, 9), length=st.integers(1, 30), twice=st.booleans())
    def commit(self, data: st.DataObject, usable: int, length: int, twice: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases[-12:]))
        prompt = self.model.prompts[lease.prompt]
        group = make_group(lease, length=length)
        held = self.held(lease)
        if not held and (prompt.token != lease.token or prompt.state in ("pending", "leased")):
            with pytest.raises(Fenced):
                self.ledger.commit(lease, group, usable=usable > 0)
            return
        assert self.ledger.commit(lease, group, usable=usable > 0, reason="no signal") is held
        if held:
            prompt.state = "generated" if usable else "dropped"
            prompt.size = len(encode_group(group)) if usable else 0
            if twice:
                assert self.ledger.commit(lease, group, usable=usable > 0) is False

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases[-6:]))
        if self.held(lease):
            self.ledger.drop(lease, "over-long prompt")
            self.ledger.drop(lease, "over-long prompt")
            self.model.prompts[lease.prompt].state = "dropped"

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), twice=st.booleans())
    def give_back(self, data: st.DataObject, twice: bool) -> None:
        leases = data.draw(st.lists(st.sampled_from(self.leases[-12:]), unique=True, max_size=4))
        for lease in leases:
            if self.held(lease):
                self.model.prompts[lease.prompt].state = "pending"
        for _ in range(1 + twice):
            self.ledger.give_back(leases)

    @rule(member=st.sampled_from(MEMBERS))
    def member_dies(self, member: str) -> None:
        gone = [n for n in self.model.of("leased") if self.model.prompts[n].holder == member]
        for number in gone:
            self.model.prompts[number].state = "pending"
        assert self.ledger.give_back_all(member) == len(gone)

    @precondition(lambda self: self.model.of("leased"))
    @rule(data=st.data())
    def lease_runs_out(self, data: st.DataObject) -> None:
        """The server's clock jumps past a deadline: the next lease or plan of anybody takes the prompt back."""
        number = data.draw(st.sampled_from(self.model.of("leased")))
        self.client.zadd(f"forebay:{{{self.world.run}}}:leases", {str(number): 1})
        self.model.prompts[number].state = "pending"
        self.ledger.lease(MEMBERS[0], count=0, version=self.ledger.current_version())

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        leases = data.draw(st.lists(st.sampled_from(self.leases[-12:]), unique=True, max_size=4))
        renewed = self.ledger.renew(leases)
        assert {lease.token for lease in renewed} == {lease.token for lease in leases if self.held(lease)}

    # -- the consumer

    @rule(twice=st.booleans())
    def plan(self, twice: bool) -> None:
        step = len(self.model.planned) + 1
        inplay = [
            n for n, p in self.model.prompts.items() if p.ticket and p.state in ("pending", "leased", "generated")
        ]
        due = sorted(inplay, key=lambda n: self.model.prompts[n].ticket)[:PER_STEP]
        ready = [n for n in due if self.model.prompts[n].state == "generated"]
        used_up = self.model.passes == PASSES and not self.model.of("pending", "leased")
        if len(due) < PER_STEP and used_up:
            with pytest.raises(ForebayError, match="used up"):
                self.ledger.plan(step, fence=self.model.fence, final=False)
            return
        plan = self.ledger.plan(step, fence=self.model.fence, final=False)
        if len(ready) < PER_STEP:
            assert isinstance(plan, Waiting)
            assert plan.missing == PER_STEP - len(ready)
            return
        assert isinstance(plan, Plan)
        assert list(plan.prompts) == due
        for number in due:
            self.model.prompts[number].state, self.model.prompts[number].step = "planned", step
        self.model.planned.append(due)
        if twice:
            assert self.ledger.plan(step, fence=self.model.fence, final=True) == plan
        assert [group.prompt for group in self.ledger.read_groups(plan.prompts)] == due

    @precondition(lambda self: self.model.trained < len(self.model.planned))
    @rule(twice=st.booleans())
    def retire(self, twice: bool) -> None:
        self.model.trained += 1
        for _ in range(1 + twice):
            self.ledger.retire(self.model.trained, fence=self.model.fence)
        for number in self.model.planned[self.model.trained - 1]:
            self.model.prompts[number].state = "trained"

    @rule()
    def publish(self) -> None:
        """A step's weights reach every producer."""
        version = self.ledger.publish(fence=self.model.fence, step=self.model.trained)
        self.model.consumed.append(self.model.trained * PER_STEP)
        assert version == len(self.model.consumed) - 1
        for name, incarnation in self.incarnations.items():
            self.world.members.set_state(name, incarnation, "serving", version=version)

    @rule()
    def consumer_restarts(self) -> None:
        old, self.model.fence = self.model.fence, self.ledger.register_publisher()
        with pytest.raises(Fenced):
            self.ledger.publish(fence=old, step=self.model.trained)
        with pytest.raises(Fenced):
            self.ledger.plan(len(self.model.planned) + 1, fence=old, final=False)
        assert self.ledger.last_planned_step() == len(self.model.planned)
        assert self.ledger.last_trained_step() == self.model.trained

    @rule()
    def orphans_are_collected(self) -> None:
        self.ledger.collect_orphans()

    # -- always

    @invariant()
    def the_ledger_is_what_the_model_says(self) -> None:
        report = self.ledger.verify()
        assert not report.problems, "\n".join(report.problems)
        for state, number in report.counts.items():
            assert number == len(self.model.of(state)), state
        assert sum(report.counts.values()) == len(self.model.prompts)


@pytest.fixture
def machine(client: "redis.Redis") -> Iterator[type[LedgerMachine]]:
    LedgerMachine.client = client
    yield LedgerMachine


@pytest.mark.slow
def test_the_ledger_does_what_its_model_says(machine: type[LedgerMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            phases=[
                Phase.explicit,
                Phase.generate,
            ],  # shrinking a failure takes minutes: do it by hand when there is one
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
