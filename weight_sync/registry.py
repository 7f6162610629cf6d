"""What weight_sync keeps in Redis: who receives, which epoch stands, what is being sent, what each replica has proved.

Only the newest incarnation of the publisher (the highest fence) can write an epoch, a sync or the current version; each
receiver and each replica writes its own record only. All keys are in the run's slot: `forebay:{run}:weights:*`.
"""

import socket
from typing import Any, Literal, TypeVar

import msgspec
import redis

from buffer.errors import Fenced, ForebayError
from weight_sync.manifest import Manifest, decode, encode

SCHEMA_VERSION = 1
PROOFS_KEPT = 10_000  # records in the history of proofs
T = TypeVar("T", bound=msgspec.Struct)

# KEYS: fence, target, wake-up stream; ARGV: my fence, value
_WRITE = """
local held = tonumber(redis.call('GET', KEYS[1]) or '0')
if tonumber(ARGV[1]) < held then return held end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '16', '*', 'what', KEYS[2])
return 0
"""


class Seat(msgspec.Struct, frozen=True):
    """A member of an epoch: this process, not a later one of the same name."""

    member: str
    incarnation: int


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """State of one transport: who is called or seated, and the newest sync that runs among them.

    `calling`: the named receivers must answer, or they are not seated. `open`: they connect; rank is the place in
    ``seats`` plus one. ``sync`` counts the syncs of the epoch; each sends ``version``, whose manifest lies in Redis.
    """

    schema_version: int = SCHEMA_VERSION
    fence: int
    number: int
    transport: str
    phase: Literal["calling", "open"]
    seats: tuple[Seat, ...]
    rendezvous: bytes = b""
    sync: int = 0
    version: int = -1


class Current(msgspec.Struct, frozen=True, kw_only=True):
    """The version that is current: its weights were sent and the ledger knows it."""

    schema_version: int = SCHEMA_VERSION
    fence: int
    version: int
    step: int
    manifest: str  # weight_sync.manifest.digest


class ReceiverRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one receiver says of itself; written by it alone."""

    schema_version: int = SCHEMA_VERSION
    member: str
    incarnation: int
    transport: str
    beat: int  # grows while the receiver's thread runs
    answered: int = 0  # newest epoch whose call it answered
    epoch: int = 0  # the epoch of `sync`
    sync: int = 0  # newest sync that it went through, whatever came of it
    version: int = -1  # newest version that it holds whole and checked
    manifest: str = ""  # of that version: weight_sync.manifest.digest
    error: str = ""


class ProofRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica has proved of the version that it runs (invariant 6); shown to people."""

    schema_version: int = SCHEMA_VERSION
    member: str
    incarnation: int
    version: int
    layout: str
    checksums_ok: bool
    digest: str = ""  # over the digests of all tensors that compute
    probe_mean: float = 0.0
    probe_max: float = 0.0
    noise_floor: float = 0.0  # probe_mean of the initial weights
    tolerance: float = 0.0
    self_test: Literal["not run", "passed", "failed"] = "not run"
    self_test_change: float = 0.0  # mean absolute change of log-probs under the noise
    error: str = ""
    time: float = 0.0  # the server's, seconds


class SelfTestReference(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer computes on the initial weights, and on them with noise added (weight_sync.proof)."""

    schema_version: int = SCHEMA_VERSION
    seed: int
    dtype: str
    scales: dict[str, float]  # by tensor: the noise's standard deviation
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    noisy_log_probs: tuple[float, ...]


class Registry:
    """The keys of one run."""

    def __init__(self, client: "redis.Redis", run: str) -> None:
        self._client = client
        self._base = f"forebay:{{{run}}}:weights"
        self._changes = self._key("changes")
        self._reports = self._key("reports")

    def _key(self, name: str) -> str:
        return f"{self._base}:{name}"

    # -- written by the publisher
    def next_epoch(self, fence: int) -> int:
        """A number that no epoch of this run had."""
        self.check_fence(fence)
        return int(self._client.incr(self._key("epochs")))

    def check_fence(self, fence: int) -> None:
        """Raise Fenced when a newer publisher has written."""
        held = int(self._client.get(self._key("fence")) or 0)
        if fence < held:
            raise _fenced(fence, held)

    def write_epoch(self, epoch: Epoch) -> None:
        """Replace the state of the epoch's transport; raises Fenced."""
        self._write(epoch.fence, f"epoch:{epoch.transport}", msgspec.json.encode(epoch))

    def write_manifest(self, manifest: Manifest) -> None:
        """The manifest of the version about to be sent; raises Fenced."""
        self._write(manifest.fence, "manifest", encode(manifest))

    def write_current(self, current: Current) -> None:
        """Let receivers hand the version over; raises Fenced."""
        self._write(current.fence, "current", msgspec.json.encode(current))

    def write_reference(self, reference: SelfTestReference, fence: int) -> None:
        """The reference of the load-path self-test; raises Fenced."""
        self._write(fence, "reference", msgspec.json.encode(reference))

    def _write(self, fence: int, name: str, value: bytes) -> None:
        keys = (self._key("fence"), self._key(name), self._changes)
        held = int(self._client.eval(_WRITE, len(keys), *keys, str(fence), value))
        if held:
            raise _fenced(fence, held)

    # -- written by receivers and replicas
    def write_receiver(self, record: ReceiverRecord) -> None:
        """Sign in, or say what changed; wakes the publisher."""
        both = self._client.pipeline(transaction=True)
        both.hset(self._key("receivers"), record.member, msgspec.json.encode(record))
        both.xadd(self._reports, {"who": record.member}, maxlen=16)
        both.execute()

    def remove_receiver(self, member: str, incarnation: int) -> None:
        """Sign out, unless a newer process has the name."""
        if (record := self.receivers().get(member)) and record.incarnation == incarnation:
            self._client.hdel(self._key("receivers"), member)
            self._client.xadd(self._reports, {"who": member}, maxlen=16)

    def write_proof(self, record: ProofRecord) -> None:
        """What a replica has proved, with the server's time: its newest record, and one more in the history."""
        seconds, micros = self._client.time()
        data = msgspec.json.encode(msgspec.structs.replace(record, time=seconds + micros / 1e6))
        both = self._client.pipeline(transaction=True)
        both.hset(self._key("proofs"), record.member, data)
        both.xadd(self._key("proofs:history"), {"proof": data}, maxlen=PROOFS_KEPT, approximate=False)
        both.execute()

    # -- read by everyone
    def epoch(self, transport: str) -> Epoch | None:
        """State of a transport; None before its first epoch."""
        return self._read(f"epoch:{transport}", Epoch)

    def manifest(self) -> Manifest | None:
        """The manifest of the version that is being sent, or was last."""
        data = self._client.get(self._key("manifest"))
        return decode(data) if data is not None else None

    def current(self) -> Current | None:
        """The newest version that receivers may hand over."""
        return self._read("current", Current)

    def reference(self) -> SelfTestReference | None:
        """The self-test's reference; None until the trainer has written it."""
        return self._read("reference", SelfTestReference)

    def receivers(self) -> dict[str, ReceiverRecord]:
        """Every receiver that signed in, alive or not."""
        return self._read_all("receivers", ReceiverRecord)

    def proofs(self) -> dict[str, ProofRecord]:
        """What every replica has proved: its newest record."""
        return self._read_all("proofs", ProofRecord)

    def proof_history(self) -> list[ProofRecord]:
        """The last `PROOFS_KEPT` records of all replicas, oldest first. A version has several: one when it was probed,
        another when that failed; a record whose answer was lost on the way may be there twice."""
        entries: Any = self._client.xrange(self._key("proofs:history"))
        return [_decoded(fields[b"proof"], ProofRecord) for _, fields in entries]

    def last_change(self) -> str:
        """The publisher's last write so far; asked for before what it wrote is read."""
        return self._last(self._changes)

    def wait_change(self, seen: str, seconds: float) -> str:
        """Sleep until the publisher writes after ``seen``, at most ``seconds``; the last write."""
        return self._wait(self._changes, seen, seconds)

    def last_report(self) -> str:
        """The receivers' last word so far; asked for before their records are read."""
        return self._last(self._reports)

    def wait_report(self, seen: str, seconds: float) -> str:
        """Sleep until a receiver reports after ``seen``, at most ``seconds``; the last report."""
        return self._wait(self._reports, seen, seconds)

    def _last(self, stream: str) -> str:
        newest: Any = self._client.xrevrange(stream, count=1)
        return newest[0][0].decode() if newest else "0-0"

    def _wait(self, stream: str, seen: str, seconds: float) -> str:
        answer: Any = self._client.xread({stream: seen}, count=16, block=max(int(seconds * 1000), 1))
        if not answer:
            return seen
        entries = answer[0][1] if isinstance(answer, list) else next(iter(answer.values()))[0]
        return str(entries[-1][0].decode())

    def _read(self, name: str, kind: type[T]) -> T | None:
        data = self._client.get(self._key(name))
        return _decoded(data, kind) if data is not None else None

    def _read_all(self, name: str, kind: type[T]) -> dict[str, T]:
        found: Any = self._client.hgetall(self._key(name))
        return {member.decode(): _decoded(data, kind) for member, data in found.items()}


def local_address(client: "redis.Redis") -> str:
    """The address of this machine on the network that Redis is reached by: what other members can connect to."""
    host = client.connection_pool.connection_kwargs.get("host", "127.0.0.1")
    port = client.connection_pool.connection_kwargs.get("port", 6379)
    try:
        with socket.create_connection((host, port), timeout=10) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise ForebayError(
            f"Redis cannot be reached: {error}",
            where=f"{host}:{port}",
            cure="see that the server runs, then start again",
        ) from error


def _decoded(data: bytes | str, kind: type[T]) -> T:
    try:
        record = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ForebayError(
            f"a {kind.__name__} in Redis cannot be read: {error}", cure="run the same release of Forebay everywhere"
        ) from error
    if record.schema_version != SCHEMA_VERSION:  # type: ignore[attr-defined]
        raise ForebayError(
            f"a {kind.__name__} in Redis has another schema version than {SCHEMA_VERSION}",
            cure="run the same release of Forebay everywhere",
        )
    return record


def _fenced(fence: int, held: int) -> Fenced:
    return Fenced(
        f"a newer publisher has taken over the weights (its fence is {held}, this one's {fence})",
        cure="nothing: this process was presumed dead and must end",
    )
