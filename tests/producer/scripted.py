"""A deterministic engine and a source of weights, for the service's own logic: each does what its test tells it.

``python -m tests.producer.scripted SETTINGS`` runs a producer with them as a process of its own.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import redis

from buffer.errors import ForebayError, ProofFailed
from buffer.settings import read_settings
from producer.engine.base import Completion, Engine, Request
from producer.service import serve
from producer.settings import ProducerSettings
from weight_sync.manifest import Manifest
from weight_sync.shadow import ShadowReference

TOKENS = 4


class ScriptedEngine:
    """Answers with `1` (right, in the tests' data) or `0` by the seed's lowest bit, token by token."""

    def __init__(self, *, token_seconds: float = 0.001) -> None:
        self.token_seconds = token_seconds
        self.version = -1
        self.running = asyncio.Event()
        self.running.set()
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.log_prob = -0.5
        self.finish_with_abort = False
        self.dead: ForebayError | None = None
        self.stopped = False
        self.loads: list[int] = []

    async def start(self) -> None:
        pass

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        versions = []
        for _ in range(TOKENS):
            await self.running.wait()
            await asyncio.sleep(self.token_seconds)
            if self.dead:
                raise self.dead
            versions.append(self.version)
        text = "1" if request.seed is None or request.seed % 2 else "0"
        return Completion(
            token_ids=list(range(TOKENS)),
            log_probs=[self.log_prob] * TOKENS,
            versions=versions,
            finish_reason="abort" if self.finish_with_abort else "stop",
            text=text,
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def pause(self) -> None:
        self.running.clear()

    async def resume(self) -> None:
        self.running.set()

    async def load(self, shadow: ShadowReference, version: int) -> None:
        assert not self.running.is_set(), "a load needs a paused engine"
        self.version = version
        self.loads.append(version)

    async def digests(self) -> Mapping[str, str]:
        return {"weight": str(self.version)}

    async def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        return [-0.5] * (len(token_ids) - 1)

    def layout(self) -> str:
        return "scripted"

    async def check(self) -> None:
        if self.dead:
            raise self.dead

    async def stop(self) -> None:
        self.stopped = True


class ScriptedWeights:
    """Delivers versions when told; their proofs pass, fail, or wait."""

    def __init__(self, *, first: int | None = 0) -> None:
        self.first = first
        self.bad: set[int] = set()
        self.held: dict[int, asyncio.Event] = {}
        self.self_test_error: ProofFailed | None = None
        self.released: list[str] = []
        self.deliver: Callable[[int], None] = lambda version: None

    def start(self, on_ready: Callable[[Manifest, ShadowReference], None]) -> None:
        def deliver(version: int) -> None:
            manifest = Manifest(
                version=version,
                step=version,
                fence=1,
                tensors=(),
                bucket_sizes=(),
                probe_token_ids=(),
                probe_log_probs=(),
            )
            on_ready(manifest, ShadowReference(f"shadow-{version}", ""))

        self.deliver = deliver
        if self.first is not None:
            deliver(self.first)

    async def self_test(self, engine: Engine) -> None:
        if self.self_test_error:
            raise self.self_test_error

    async def probe(self, engine: Engine, manifest: Manifest) -> None:
        if manifest.version in self.held:
            await self.held[manifest.version].wait()
        if manifest.version in self.bad:
            raise ProofFailed(f"version {manifest.version} does not compute as told")

    def release(self, reference: ShadowReference) -> None:
        self.released.append(reference.path)

    def check(self) -> None:
        pass

    def stop(self) -> None:
        pass


def main() -> int:
    settings = read_settings(ProducerSettings, Path(sys.argv[1]))

    def engine(_: ProducerSettings) -> Engine:
        return ScriptedEngine(token_seconds=float(sys.argv[2]))

    def weights(client: "redis.Redis", _: ProducerSettings, incarnation: int) -> ScriptedWeights:
        return ScriptedWeights()

    try:
        asyncio.run(serve(settings, make_engine=engine, make_weights=weights))
    except ForebayError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
