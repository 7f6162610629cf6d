"""Weights reach the engine whole and checked (the receiver), and count only with their proof on record."""

import asyncio
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import redis

from buffer.errors import DeadlineExceeded, ProofFailed
from producer.engine.base import Engine
from producer.settings import PoolSettings, ProducerSettings
from weight_sync import proof
from weight_sync.manifest import Manifest
from weight_sync.receiver import Receiver
from weight_sync.registry import ProofRecord, Registry, SelfTestReference
from weight_sync.settings import CommunicatorName
from weight_sync.shadow import ShadowReference

REFERENCE_SECONDS = 600.0  # the consumer may have a large model to read
REFERENCE_POLL_SECONDS = 0.2
NOTHING_PROVED = -1

COMMUNICATORS: dict[str, CommunicatorName] = {"cpu": "gloo", "cuda": "nccl", "ascend": "hccl"}


def communicator_name(pool: PoolSettings) -> CommunicatorName:
    """How weights arrive: as the spec says, else by the hardware."""
    if pool.communicator is not None:
        return pool.communicator
    platform: str = pool.platform
    if platform == "auto":
        if find_spec("vllm_ascend") is not None:
            platform = "ascend"
        else:
            import torch

            platform = "cuda" if torch.cuda.is_available() else "cpu"
    return COMMUNICATORS[platform]


class ReceivedWeights:
    """weight_sync's receiver and proofs for one producer."""

    def __init__(self, client: "redis.Redis", settings: ProducerSettings, incarnation: int) -> None:
        self._client = client
        self._settings = settings
        self._incarnation = incarnation
        self._registry = Registry(client, settings.run)
        self._folder = Path(settings.folder) / "shadows"
        self._receiver: Receiver | None = None
        self._self_test_change = 0.0
        self._noise_floor = 0.0
        self._self_test: Literal["not run", "passed", "failed"] = "not run"

    def start(self, on_ready: Callable[[Manifest, ShadowReference], None]) -> None:
        """Sign in at the registry and receive in a thread."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._receiver = Receiver(
            self._client,
            self._settings.run,
            self._settings.member,
            self._incarnation,
            communicator_name(self._settings.settings),
            self._settings.weight_sync,
            self._folder,
            on_ready,
        )
        self._receiver.start()

    def check(self) -> None:
        """Raise what ended the receiver, if something did."""
        if self._receiver is not None:
            self._receiver.check()

    def stop(self) -> None:
        """Sign out."""
        if self._receiver is not None:
            self._receiver.stop()

    def release(self, reference: ShadowReference) -> None:
        """The shadow may be filled again."""
        if self._receiver is not None:
            self._receiver.release(reference)

    async def self_test(self, engine: Engine) -> None:
        """Load noise and look whether log-probs change as the trainer's do; raises ProofFailed."""
        reference = await self._reference()
        try:
            result = await proof.self_test(
                engine, self._settings.model.path, reference, self._folder, self._settings.weight_sync
            )
        except ProofFailed as error:
            self._self_test = "failed"
            await self._record(engine, NOTHING_PROVED, error=str(error))
            raise
        self._self_test, self._self_test_change, self._noise_floor = "passed", result.change, result.noise_floor
        await self._record(engine, NOTHING_PROVED)

    async def probe(self, engine: Engine, manifest: Manifest) -> None:
        """Compare log-probs with the trainer's and digests with those of the other replicas, and record both; raises
        ProofFailed."""
        allowed = proof.tolerance(self._settings.weight_sync, self._settings.model.dtype)
        result = await proof.probe(engine, manifest, allowed)
        values = {"probe_mean": result.mean, "probe_max": result.max, "tolerance": allowed}
        digest = proof.summarise(await engine.digests())
        await self._record(engine, manifest.version, digest=digest, **values)
        try:
            result.check(self._noise_floor)
            records = await asyncio.to_thread(self._registry.proofs)
            odd = proof.compare_digests(records.values()).get(self._settings.member)
            if odd is not None:
                raise ProofFailed(
                    f"{self._settings.member} {odd}",
                    where=f"the digests of version {manifest.version}",
                    cure="the replica is quarantined; restart it, so that it reads and loads everything anew",
                )
        except ProofFailed as error:
            await self._record(engine, manifest.version, digest=digest, error=str(error), **values)
            raise

    async def _reference(self) -> SelfTestReference:
        deadline = time.monotonic() + REFERENCE_SECONDS
        while (found := await asyncio.to_thread(self._registry.reference)) is None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the consumer gave no reference for the load-path self-test within {REFERENCE_SECONDS:.0f} s",
                    where=f"the start of {self._settings.member}",
                    cure="look at the consumer's log: is it up, and does it reach the same Redis?",
                )
            await asyncio.sleep(REFERENCE_POLL_SECONDS)
        return found

    async def _record(self, engine: Engine, version: int, **values: Any) -> None:
        record = ProofRecord(
            member=self._settings.member,
            incarnation=self._incarnation,
            version=version,
            layout=engine.layout(),
            checksums_ok=True,  # a receiver hands over nothing else
            noise_floor=self._noise_floor,
            self_test=self._self_test,
            self_test_change=self._self_test_change,
            **values,
        )
        await asyncio.to_thread(self._registry.write_proof, record)
