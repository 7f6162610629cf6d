"""The ledger knows each prompt of each pass, and each of its transitions is one atomic, idempotent server operation.

    pending -> leased -> generated -> planned -> trained
       ^         |           |
       +---------+           +-> dropped (why)      leased -> dropped (why); leased -> pending when a lease ends

A prompt gets a *ticket* at its first lease and keeps it when it goes back: groups are planned in ticket order.
"""

import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import redis

from buffer import audit
from buffer.errors import Fenced, ForebayError, LedgerBroken, SpecError
from buffer.records import Group, decode_group, encode_group
from buffer.scripts import Scripts, decode, pairs, prefix

Refusal = Literal[
    "budget", "staleness", "exhausted", "paused", "stopping", "quarantined", "not_proved", "no_version", "no_pass"
]


@dataclass(frozen=True)
class Lease:
    """The right to answer one prompt, until ``deadline_ms`` (the server's clock) unless renewed."""

    prompt: int
    ticket: int
    token: int  # fencing: whoever holds a later token holds the prompt
    row: int
    pass_number: int
    task: str
    deadline_ms: int


@dataclass(frozen=True)
class LeaseAnswer:
    """Leases, or the reason why there are none."""

    leases: tuple[Lease, ...]
    refusal: Refusal | None
    detail: str = ""  # a sentence for people: "12 of 12 groups allowed at version 3 are running or stored"


@dataclass(frozen=True)
class Plan:
    """The groups of one step, in order; written once, read by all ranks."""

    step: int
    prompts: tuple[int, ...]
    version: int  # newest published version when it was planned
    final: bool = False  # the run ends after this step
    checkpoint: bool = False  # a checkpoint was asked for


@dataclass(frozen=True)
class Waiting:
    """Why a step cannot be planned yet: how many groups are due and who holds them."""

    missing: int
    holders: tuple[str, ...]
    detail: str


@dataclass(frozen=True)
class LedgerReport:
    """Result of a verification: counts by state, and each thing that does not add up."""

    counts: dict[str, int]
    dropped: dict[str, int]  # reason -> count
    problems: tuple[str, ...]


CHUNK = 10_000  # rows of a pass that one operation adds
MOST_LEASES = 500  # of one call


class Ledger:
    """All operations on the ledger of one run. Every method may be retried; raises BufferUnavailable after the
    client's deadline, Fenced when the caller's lease or fence is no longer valid. Steps count from 1."""

    def __init__(self, client: "redis.Redis", run: str, *, shards: int = 1) -> None:
        self._client = client
        self._run = run
        self._shards = shards
        self._prefix = prefix(run)
        self._scripts = Scripts(client, run)

    # -- set-up
    def configure(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        budget_bytes: int,
        lease_seconds: float,
        reserve_bytes: int,
        passes: int | None,
        data_digest: str,
    ) -> None:
        """Fix the run's numbers (first caller writes, a later caller with other numbers or data is refused).
        ``reserve_bytes``: upper bound of one group's bytes, reserved at its lease."""
        if reserve_bytes > budget_bytes:
            raise SpecError(
                f"one group may take {reserve_bytes} bytes, the budget is {budget_bytes}: no prompt could be leased",
                where="buffer.budget_bytes",
                cure="raise the budget, or make groups smaller (samples per group, tokens per completion)",
            )
        numbers: dict[str, object] = {
            "groups_per_step": groups_per_step,
            "max_staleness": max_staleness,
            "budget_bytes": budget_bytes,
            "lease_ms": int(lease_seconds * 1000),
            "reserve_bytes": reserve_bytes,
            "passes": passes or 0,
            "data_digest": data_digest,
            "shards": self._shards,
        }
        answer = self._ask("configure", *(str(part) for pair in numbers.items() for part in pair))
        if answer[0] == "differs":
            raise SpecError(
                f"the run {self._run} has {answer[1]} = {answer[2]}, this process asks for {answer[3]}",
                where="the ledger's configuration",
                cure="go on with the spec and the data that the run was started with, or start a run of another name",
            )

    def open_pass(self, pass_number: int, order: Sequence[int], tasks: Sequence[str]) -> bool:
        """Add a pass: ``order[i]`` is the row of prompt ``pass_number * len(order) + i``, ``tasks[row]`` its task.
        False when the pass is open already. Large passes go in by chunks: leases may begin with the first."""
        if not order:
            raise SpecError("the data has no rows", where="data.path", cure="give a data set with at least one row")
        names = sorted({tasks[row] for row in order})
        index = {name: place for place, name in enumerate(names, start=1)}
        opener = secrets.token_hex(8)
        for offset in range(0, len(order), CHUNK):
            rows = order[offset : offset + CHUNK]
            answer = self._ask(
                "open_pass",
                str(pass_number),
                str(len(order)),
                str(offset),
                opener,
                struct.pack(f"<{len(rows)}i", *rows),
                struct.pack(f"<{len(rows)}i", *(index[tasks[row]] for row in rows)),
                *names,
            )
            if answer[0] == "open":
                return answer[1] == opener
            if answer[0] != "ok":
                raise _pass_refused(pass_number, len(order), answer)
        return decode(self._client.hget(f"{self._prefix}openers", str(pass_number))) == opener

    def passes_opened(self) -> int:
        """How many passes are open: the number of the next one to open."""
        return self._counter("passes")

    # -- producers
    def lease(self, member: str, *, count: int, version: int, tasks: Sequence[str] = ()) -> LeaseAnswer:
        """Up to ``count`` leases for a member that serves ``version`` (proved), of ``tasks`` only when given. Expired
        leases of others are taken back first. Granted while (max_staleness + 1) x groups_per_step +
        consumed(version) - accepted - running > 0, where consumed(version) is the groups trained when that version
        was published, accepted the usable groups ever committed and running the leased prompts; and while stored +
        reserved bytes stay in the budget. Prompts that went back come first; room is always kept for them."""
        request = secrets.token_hex(8)  # a repeated call is answered with the same leases
        wanted = str(max(0, min(count, MOST_LEASES)))
        refusal, detail, *values = self._ask("lease", member, wanted, str(version), request, *tasks)
        leases = tuple(
            Lease(
                prompt=int(prompt),
                ticket=int(ticket),
                token=int(token),
                row=int(row),
                pass_number=int(pass_number),
                task=task,
                deadline_ms=int(deadline),
            )
            for prompt, ticket, token, row, pass_number, task, deadline in zip(*[iter(values)] * 7, strict=True)
        )
        return LeaseAnswer(leases, cast(Refusal, refusal) if refusal else None, detail)

    def renew(self, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Extend leases; those that are no longer held are missing from the answer."""
        deadline, *held = self._ask("renew", *_held(leases))
        still = set(held)
        return tuple(
            Lease(
                prompt=lease.prompt,
                ticket=lease.ticket,
                token=lease.token,
                row=lease.row,
                pass_number=lease.pass_number,
                task=lease.task,
                deadline_ms=int(deadline),
            )
            for lease in leases
            if str(lease.token) in still
        )

    def give_back(self, leases: Sequence[Lease]) -> None:
        """Return prompts to pending (a drain); leases no longer held are ignored."""
        self._scripts.call("give_back", "given back", *_held(leases))

    def give_back_all(self, member: str) -> int:
        """Return all prompts leased by a member that is known to be gone; number returned."""
        return int(self._scripts.call("give_back_all", member))

    def drop(self, lease: Lease, reason: str) -> None:
        """End a prompt without a group (over-long prompt, scorer failed, ...)."""
        self._finish(lease, "dropped", reason, 0, {})

    def commit(self, lease: Lease, group: Group, *, usable: bool, reason: str = "") -> bool:
        """Store the group's payload, then make it real: prompt *generated* (or, when not usable, *dropped* with
        ``reason``). False when this very commit was made before (a retry). Raises Fenced when the lease is not held."""
        if group.prompt != lease.prompt:
            raise LedgerBroken(f"a group of prompt {group.prompt} cannot be committed under a lease of {lease.prompt}")
        fields = _group_fields(group)
        if not usable:
            return self._finish(lease, "dropped", reason or "not usable", 0, fields) == "done"
        payload = encode_group(group)
        key = self.blob_key(lease.prompt, lease.token)
        if not self._client.set(key, payload, nx=True):
            # Something is there under this lease. It may be replaced only as long as it is not real: a commit made
            # again, with other samples, must not change what is counted or planned already.
            state, token = self._client.hmget(f"{self._prefix}prompt:{lease.prompt}", "state", "token")
            if decode(state) == "leased" and decode(token) == str(lease.token):
                self._client.set(key, payload)
        try:
            outcome = self._finish(lease, "generated", "", len(payload), fields)
        except Fenced:
            self._client.unlink(key)  # nobody can make it real any more: its token is void
            raise
        if outcome in ("trained", "dropped"):
            self._client.unlink(key)  # a late repetition wrote again what had gone already
        return outcome == "done"

    def _finish(self, lease: Lease, state: str, reason: str, size: int, fields: dict[str, str]) -> str:
        """`done`, or the state that the prompt reached when this lease ended it before."""
        flat = [part for pair in fields.items() for part in pair]
        answer = self._ask("finish", str(lease.prompt), str(lease.token), state, reason, str(size), *flat)
        if answer[0] == "fenced":
            raise Fenced(answer[1], where=f"prompt {lease.prompt}", cure="drop the group; the prompt is answered again")
        return answer[0] if answer[0] == "done" else answer[1]

    # -- consumers
    def register_publisher(self) -> int:
        """A fencing token for a new incarnation of the publisher; older ones can no longer plan, retire or publish."""
        return int(self._client.hincrby(f"{self._prefix}counters", "fence", 1))

    def plan(self, step: int, *, fence: int, final: bool) -> Plan | Waiting:
        """The plan of ``step``: the one written before if there is one, else the groups_per_step lowest tickets in
        play once all of them are generated. A new plan takes the flag `checkpoint` with it, and is final also when
        the flag `stop` is set. Raises ForebayError when the passes are used up and hold no further step."""
        answer = self._ask("plan", str(step), str(fence), "1" if final else "0")
        if answer[0] == "plan":
            return _plan(step, answer[1:])
        if answer[0] == "waiting":
            return _waiting(step, int(answer[1]), answer[2:])
        if answer[0] == "no_data":
            return Waiting(0, (), f"step {step} waits for the first producer: none has brought the data yet")
        if answer[0] == "used_up":
            raise ForebayError(
                f"the data is used up: {answer[1]} groups are left, step {step} needs more",
                where=f"the ledger of run {self._run}",
                cure="start the run with more passes (`passes`), more data or fewer steps",
            )
        raise _publisher_refused(f"step {step} cannot be planned", answer)

    def read_plan(self, step: int) -> Plan | None:
        """The plan of a step if it is written (other ranks poll this)."""
        found = self._client.hmget(f"{self._prefix}plan:{step}", "prompts", "version", "final", "checkpoint")
        if found[0] is None:
            return None
        return _plan(step, [decode(value) for value in found])

    def read_groups(self, prompts: Sequence[int]) -> list[Group]:
        """The stored groups, in the order asked for; raises LedgerBroken naming a group that is not there."""
        if not prompts:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for prompt in prompts:
            pipeline.hmget(f"{self._prefix}prompt:{prompt}", "state", "token")
        known = [(decode(state), decode(token)) for state, token in pipeline.execute()]
        for prompt, (state, _) in zip(prompts, known, strict=True):
            if state not in ("generated", "planned"):
                raise LedgerBroken(
                    f"prompt {prompt} has no stored group: it is {state or 'pending'}",
                    where=f"the ledger of run {self._run}",
                    cure="a trained group is in the journal beside the checkpoints",
                )
        keys = [self.blob_key(prompt, int(token)) for prompt, (_, token) in zip(prompts, known, strict=True)]
        payloads: Any = self._client.mget(keys)
        groups = []
        for prompt, key, payload in zip(prompts, keys, payloads, strict=True):
            if payload is None:
                raise LedgerBroken(
                    f"the payload of prompt {prompt} is gone from the server",
                    where=key,
                    cure="the server lost writes or somebody deleted keys: resume from the last checkpoint",
                )
            groups.append(decode_group(payload))
        return groups

    def retire(self, step: int, *, fence: int) -> None:
        """The step's groups are in the durable journal: mark them trained at ``step``, delete payloads, free bytes."""
        answer = self._ask("retire", str(step), str(fence))
        if answer[0] != "ok":
            raise _publisher_refused(f"step {step} cannot be retired", answer)
        keys = [self.blob_key(int(prompt), int(token)) for prompt, token in _twos(answer[1:])]
        if keys:
            self._client.unlink(*keys)

    def publish(self, *, fence: int, step: int) -> int:
        """Make the next version current, after its weights were sent; returns it. The first version of a run is 0."""
        answer = self._ask("publish", str(fence), str(step), secrets.token_hex(8))
        if answer[0] != "ok":
            raise _publisher_refused(f"the weights of step {step} cannot be published", answer)
        return int(answer[1])

    def next_version(self) -> int:
        """The number that the next publish will give."""
        return self.current_version() + 1

    def current_version(self) -> int:
        """The newest published version; -1 before the first."""
        return self._counter("version", -1)

    def last_planned_step(self) -> int:
        """The newest step whose plan is written; 0: none."""
        return self._counter("last_planned")

    def last_trained_step(self) -> int:
        """The newest step whose groups are retired; 0: none."""
        return self._counter("last_trained")

    # -- everyone
    def due(self) -> Waiting | None:
        """What the next plan waits for, None when nothing is missing; reads only, for people who ask."""
        config, planned = f"{self._prefix}config", self.last_planned_step()
        per_step = int(self._client.hget(config, "groups_per_step") or 0)
        if not per_step:
            return None
        prompts = [decode(prompt) for prompt in self._client.zrange(f"{self._prefix}inplay", 0, per_step - 1)]
        pipeline = self._client.pipeline(transaction=True)
        pipeline.time()
        for prompt in prompts:
            pipeline.hmget(f"{self._prefix}prompt:{prompt}", "state", "holder", "leased_at")
        (seconds, micros), *lives = pipeline.execute()
        now = int(seconds) * 1000 + int(micros) // 1000
        values: list[str] = []
        for prompt, life in zip(prompts, lives, strict=True):
            state, holder, leased_at = (decode(value) for value in life)
            if state in ("leased", "pending"):
                values += [prompt, state, holder, str(now - int(leased_at))]
        missing = per_step - len(prompts) + len(values) // 4
        return _waiting(planned + 1, missing, values) if missing else None

    def summary(self) -> dict[str, object]:
        """Counts by state, bytes stored and reserved, accepted, running, current version, last planned and trained
        step, oldest lease; for status and `why is nobody generating?`."""
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hgetall(f"{self._prefix}counters")
        pipeline.hgetall(f"{self._prefix}config")
        pipeline.hgetall(f"{self._prefix}dropped")
        pipeline.zrange(f"{self._prefix}leases", 0, 0, withscores=True)
        pipeline.time()
        counters, config, dropped, oldest, now = pipeline.execute()
        number = {key: int(value) for key, value in pairs(counters).items() if value.lstrip("-").isdigit()}
        settings = pairs(config)
        found: dict[str, object] = {
            "counts": {state: number.get(state, 0) for state in audit.STATES},
            "dropped": {reason: int(value) for reason, value in pairs(dropped).items()},
            "returned": number.get("returned", 0),
            "stored_bytes": number.get("stored", 0),
            "reserved_bytes": number.get("reserved", 0),
            "budget_bytes": int(settings.get("budget_bytes", 0)),
            "accepted": number.get("accepted", 0),
            "running": number.get("leased", 0),
            "groups_per_step": int(settings.get("groups_per_step", 0)),
            "max_staleness": int(settings.get("max_staleness", 0)),
            "passes_opened": number.get("passes", 0),
            "passes": int(settings.get("passes", 0)) or None,
            "version": number.get("version", -1),
            "last_planned_step": number.get("last_planned", 0),
            "last_trained_step": number.get("last_trained", 0),
            "oldest_lease": None,
        }
        if oldest:
            prompt, deadline = decode(oldest[0][0]), int(oldest[0][1])
            holder = decode(self._client.hget(f"{self._prefix}prompt:{prompt}", "holder"))
            left = (deadline - (int(now[0]) * 1000 + int(now[1]) // 1000)) / 1000
            found["oldest_lease"] = {"prompt": int(prompt), "holder": holder, "seconds_left": round(left, 3)}
        return found

    def history(self, prompt: int) -> dict[str, object] | None:
        """One prompt's life: state, row, holder, attempts, producer, versions, rewards, step or reason."""
        return audit.history(self._client, self._run, prompt)

    def first_leases(self) -> dict[tuple[str, int], float]:
        """When each process was first given a lease (server seconds), by member and incarnation."""
        found = pairs(self._client.hgetall(f"{self._prefix}first_leases"))
        return {(who.rsplit(" ", 1)[0], int(who.rsplit(" ", 1)[1])): int(ms) / 1000 for who, ms in found.items()}

    def verify(self) -> LedgerReport:
        """Count everything from the ground up and compare with the counters."""
        counts, dropped, problems = audit.verify(self._client, self._scripts, self.blob_key)
        return LedgerReport(counts, dropped, tuple(problems))

    def collect_orphans(self) -> int:
        """Delete payloads that nothing can make real any more (their writer died between the two writes, or was
        fenced); number deleted. Payloads of a lease that still runs stay."""
        return audit.collect_orphans(self._client, self._run)

    def blob_key(self, prompt: int, token: int) -> str:
        """Where the payload of a prompt's lease lies; the shard is a slot of its own."""
        return f"forebay:{{{self._run}:{prompt % self._shards}}}:group:{prompt}:{token}"

    def _ask(self, operation: str, *arguments: str | bytes) -> list[str]:
        return [decode(part) for part in self._scripts.call(operation, *arguments)]

    def _counter(self, name: str, default: int = 0) -> int:
        found = self._client.hget(f"{self._prefix}counters", name)
        return default if found is None else int(found)


def _held(leases: Iterable[Lease]) -> list[str]:
    return [str(part) for lease in leases for part in (lease.prompt, lease.token)]


def _twos(values: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _group_fields(group: Group) -> dict[str, str]:
    """What the ledger itself keeps of a group, so that its history outlives its payload."""
    versions = [sample.token_versions() for sample in group.samples if sample.versions]
    scored = group.trained_samples()
    return {
        "producer": group.producer,
        "pool": group.pool,
        "oldest_version": str(group.oldest_version()),
        "newest_version": str(max((int(v.max()) for v in versions), default=-1)),
        "lengths": " ".join(str(len(sample.token_ids) // 4) for sample in group.samples),
        "rewards": " ".join(f"{s.reward:.6g}" if s.outcome == "scored" else s.outcome for s in group.samples),
        "mean_reward": f"{sum(sample.reward for sample in scored) / len(scored):.6g}" if scored else "",
    }


def _plan(step: int, parts: Sequence[str]) -> Plan:
    prompts, version, final, checkpoint = parts
    return Plan(
        step=step,
        prompts=tuple(int(prompt) for prompt in prompts.split()),
        version=int(version),
        final=final == "1",
        checkpoint=checkpoint == "1",
    )


def _waiting(step: int, missing: int, values: Sequence[str]) -> Waiting:
    """Who holds the prompts that a step waits for."""
    holders: dict[str, None] = {}
    named = []
    for prompt, state, holder, age in zip(*[iter(values)] * 4, strict=True):
        if state == "leased":
            holders[holder] = None
            named.append(f"prompt {prompt} is leased by {holder} for {int(age) / 1000:.1f} s")
        else:
            holders["pending again"] = None
            named.append(f"prompt {prompt} is pending again (last held by {holder})")
    unleased = missing - len(named)
    if unleased > 0 and len(named) < 16:
        named.append(f"{unleased} are not leased yet")
    return Waiting(missing, tuple(holders), f"step {step} waits for {missing} groups: " + "; ".join(named))


def _pass_refused(pass_number: int, rows: int, answer: Sequence[str]) -> ForebayError:
    if answer[0] == "rows":
        return SpecError(
            f"pass {pass_number} has {rows} rows, the passes of this run have {answer[1]}",
            where="data",
            cure="use the data that the run was started with",
        )
    if answer[0] == "early":
        return LedgerBroken(f"pass {pass_number} cannot be opened before pass {answer[1]}")
    return ForebayError(
        f"pass {pass_number} cannot be opened: the run has {answer[1]} passes", cure="raise `passes` in a new run"
    )


def _publisher_refused(what: str, answer: Sequence[str]) -> ForebayError:
    if answer[0] == "fenced":
        return Fenced(f"{what}: {answer[1]}", cure="end this process; its successor goes on")
    if answer[0] == "order":
        return LedgerBroken(f"{what}: the last one is step {answer[1]}", cure="steps go one by one")
    return LedgerBroken(f"{what}: it has no plan")
