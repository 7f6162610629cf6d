"""With the real publisher, transport and proofs: a replica serves what it has proved, and not what a bad load left it.

The engine computes with transformers, so that a load can be broken on purpose.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import redis
import torch
import transformers

from buffer.errors import ProofFailed
from buffer.ledger import Ledger
from buffer.members import Members
from producer.replica import Replica
from producer.settings import ProducerSettings
from producer.weights import ReceivedWeights, communicator_name
from tests.producer.scripted import ScriptedEngine
from weight_sync.proof import make_reference, probe_sequence
from weight_sync.publisher import Publisher
from weight_sync.registry import Registry
from weight_sync.shadow import ShadowReference, open_shadow

Make = Callable[..., ProducerSettings]


class Model:
    """A model of a folder, and the log-probs that it gives."""

    def __init__(self, path: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.state_dict().items():
            if name != "lm_head.weight":  # tied: the folder has no entry for it
                yield name, tensor.clone()

    def put(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = self.model.state_dict()
        for name, tensor in tensors:
            own[name].copy_(tensor)

    def log_probs(self, ids: Sequence[int]) -> list[float]:
        with torch.no_grad():
            logits = self.model(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)
        return [float(value) for value in logits.gather(1, torch.tensor(list(ids)[1:])[:, None])[:, 0]]


class TransformersEngine(ScriptedEngine):
    """Computes with what it is given, except for what it is told to forget."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.policy = Model(path)
        self.forgets: Callable[[int, str], bool] = lambda version, name: False

    async def load(self, shadow: ShadowReference, version: int) -> None:
        await super().load(shadow, version)
        self.policy.put((n, t) for n, t in open_shadow(shadow) if not self.forgets(version, n))

    async def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        return self.policy.log_probs(token_ids)


class Trainer:
    """The consumer's side: it publishes the model, changed a little more at each step."""

    def __init__(self, client: "redis.Redis", settings: ProducerSettings) -> None:
        self.ledger = Ledger(client, settings.run)
        self.fence = self.ledger.register_publisher()
        self.model = Model(settings.model.path)
        self.ids = probe_sequence(256, 24, 1)
        initial = Model(settings.model.path)

        def log_probs(tensors: Iterable[tuple[str, torch.Tensor]], ids: Sequence[int]) -> list[float]:
            initial.put(tensors)
            return initial.log_probs(ids)

        reference = make_reference(
            log_probs, self.model.tensors, noise=0.5, seed=1, dtype="float32", token_ids=self.ids
        )
        members = Members(client, settings.run, heartbeat_seconds=settings.buffer.heartbeat_seconds)
        self.publisher = Publisher(
            client,
            settings.run,
            fence=self.fence,
            transports=["gloo"],
            settings=settings.weight_sync,
            ledger=self.ledger,
            members=members,
        )
        Registry(client, settings.run).write_reference(reference, self.fence)
        self.publisher.start()

    def publish(self, step: int) -> int:
        with torch.no_grad():
            for tensor in self.model.model.parameters():
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(step)) * 0.05 * step)
        publication = self.publisher.publish(step, self.model.tensors(), self.ids, self.model.log_probs(self.ids))
        return publication.wait(30)


def run_with_trainer(
    client: "redis.Redis", settings: ProducerSettings, engine: TransformersEngine, act: Callable[..., Any]
) -> None:
    async def run() -> None:
        trainer = await asyncio.to_thread(Trainer, client, settings)
        replica = Replica(settings, lambda _: engine, ReceivedWeights)
        serving = asyncio.create_task(replica.run())
        try:
            acting = asyncio.create_task(act(trainer))
            await asyncio.wait([serving, acting], return_when=asyncio.FIRST_COMPLETED, timeout=60)
            replica.drain("the test is over")
            await asyncio.wait_for(asyncio.gather(serving), 30)
            await acting
        finally:
            await asyncio.to_thread(trainer.publisher.stop)

    asyncio.run(run())
    assert not Ledger(client, settings.run).verify().problems


async def until(what: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(what):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def proof_of(client: "redis.Redis", settings: ProducerSettings) -> Any:
    return Registry(client, settings.run).proofs().get(settings.member)


def member(client: "redis.Redis", settings: ProducerSettings) -> Any:
    found = Members(client, settings.run, heartbeat_seconds=0.2).all("producer")
    return found[0] if found else None


@pytest.fixture
def settings(make_settings: Make) -> ProducerSettings:
    return make_settings(weight_sync={"self_test_noise": 0.5, "join_seconds": 10, "transfer_seconds": 20})


@pytest.fixture
def engine(model_path: str) -> TransformersEngine:
    return TransformersEngine(model_path)


def test_versions_arrive_are_proved_and_served(
    client: "redis.Redis", settings: ProducerSettings, engine: TransformersEngine
) -> None:
    async def act(trainer: Trainer) -> None:
        for step in range(3):
            assert await asyncio.to_thread(trainer.publish, step) == step
            await until(lambda step=step: (found := member(client, settings)) and found.version == step)
        record = proof_of(client, settings)
        assert (record.version, record.self_test, record.error) == (2, "passed", "")
        assert record.self_test_change > 100 * max(record.noise_floor, record.probe_mean)
        assert engine.policy.log_probs(trainer.ids) == pytest.approx(trainer.model.log_probs(trainer.ids), abs=1e-5)
        await until(lambda: trainer.ledger.verify().counts.get("generated") == 8)

    run_with_trainer(client, settings, engine, act)
    assert Registry(client, settings.run).receivers() == {}


@pytest.mark.parametrize("forgotten", ["model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_a_load_that_leaves_one_tensor_stale_never_serves(
    client: "redis.Redis", settings: ProducerSettings, engine: TransformersEngine, forgotten: str
) -> None:
    engine.forgets = lambda version, name: name == forgotten

    async def act(trainer: Trainer) -> None:
        await asyncio.sleep(30)

    with pytest.raises(ProofFailed, match="after a load of changed weights"):
        run_with_trainer(client, settings, engine, act)
    assert proof_of(client, settings).self_test == "failed"
    assert member(client, settings).state == "quarantined"


def test_a_version_that_was_loaded_wrongly_is_quarantined(
    client: "redis.Redis", settings: ProducerSettings, engine: TransformersEngine
) -> None:
    engine.forgets = lambda version, name: version == 1 and "down_proj" in name

    async def act(trainer: Trainer) -> None:
        await asyncio.to_thread(trainer.publish, 0)
        await until(lambda: (found := member(client, settings)) and found.version == 0)
        await asyncio.to_thread(trainer.publish, 4)
        await until(lambda: member(client, settings).state == "quarantined")
        assert "version 1" in proof_of(client, settings).error
        assert trainer.ledger.lease(settings.member, count=1, version=0).refusal == "quarantined"

    run_with_trainer(client, settings, engine, act)


def test_a_replica_whose_digest_differs_from_the_others_is_quarantined(
    client: "redis.Redis", settings: ProducerSettings, engine: TransformersEngine
) -> None:
    async def act(trainer: Trainer) -> None:
        await asyncio.to_thread(trainer.publish, 0)
        await until(lambda: (found := member(client, settings)) and found.version == 0)
        registry, mine = Registry(client, settings.run), proof_of(client, settings)
        fields = {name: getattr(mine, name) for name in mine.__struct_fields__}
        for other in ("a", "b"):
            registry.write_proof(type(mine)(**fields | {"member": other, "version": 1, "digest": "theirs"}))
        await asyncio.to_thread(trainer.publish, 1)
        await until(lambda: member(client, settings).state == "quarantined")
        assert "other tensors than a, b" in proof_of(client, settings).error

    run_with_trainer(client, settings, engine, act)


def test_the_communicator_follows_from_the_pool(settings: ProducerSettings) -> None:
    assert communicator_name(settings.settings) == "gloo"
    assert communicator_name(settings.settings.model_copy(update={"platform": "ascend"})) == "hccl"
    assert communicator_name(settings.settings.model_copy(update={"platform": "cuda"})) == "nccl"
    assert communicator_name(settings.settings.model_copy(update={"communicator": "nccl"})) == "nccl"
