"""An update meets running requests as the pool's mode says, and no sampled token is lost or changed by it."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

from buffer.errors import ForebayError
from producer import requests as requests_module
from producer.engine.base import Completion, Request
from producer.gate import Gate
from producer.requests import Requests, continued
from producer.settings import ProducerSettings
from producer.updates import Updates
from tests.producer.scripted import ScriptedEngine, ScriptedWeights
from tests.producer.test_service import Scene, play
from weight_sync.settings import UpdateMode
from weight_sync.shadow import ShadowReference

pytestmark = pytest.mark.producer_env
FIRST = 100  # the token that the counting engine begins with
Make = Callable[..., ProducerSettings]


class CountingEngine(ScriptedEngine):
    """Its completions count on from the last token of the prompt up to `max_tokens`; a log-prob tells its version."""

    def __init__(self, *, token_seconds: float = 0.01, deaf_seconds: float = 0.0) -> None:
        super().__init__(token_seconds=token_seconds)
        self.deaf_seconds = deaf_seconds  # after the start of a request: it does not know the request yet
        self.computing: set[str] = set()
        self.at_load: list[int] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(self.deaf_seconds)
        found = Completion([], [], [], "length", "")
        self.computing.add(request.id)
        try:
            while len(found.token_ids) < request.max_tokens:
                await self.running.wait()
                await asyncio.sleep(self.token_seconds)
                if request.id not in self.computing:
                    return Completion(found.token_ids, found.log_probs, found.versions, "abort", "part")
                found.token_ids.append(request.prompt_token_ids[-1] + len(found.token_ids) + 1)
                found.log_probs.append(log_prob_of(self.version))
                found.versions.append(self.version)
            return found
        finally:
            self.computing.discard(request.id)

    async def abort(self, request_id: str) -> None:
        await super().abort(request_id)
        self.computing.discard(request_id)

    async def load(self, shadow: ShadowReference, version: int) -> None:
        self.at_load.append(len(self.computing))
        await super().load(shadow, version)


def log_prob_of(version: int) -> float:
    return -0.25 * (version + 2)


def decode(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def request(number: int = 0, **changes: Any) -> Request:
    values: dict[str, Any] = {"id": f"r{number}", "prompt_token_ids": [1, FIRST - 1], "max_tokens": 12, "stop": ()}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": number}
    return Request(**(values | sampling | changes))


@dataclass
class Stage:
    """The updates of one engine, without a service around them."""

    engine: CountingEngine
    mode: UpdateMode
    drain_seconds: float = 5.0
    weights: ScriptedWeights = field(default_factory=lambda: ScriptedWeights(first=None))

    def __post_init__(self) -> None:
        async def nothing(*_: object) -> None:
            pass

        self.requests = Requests(self.engine, decode)
        self.updates = Updates(
            self.engine,
            self.requests,
            self.mode,
            self.drain_seconds,
            self.weights,
            Gate(),
            nothing,
            nothing,
            nothing,
        )
        self.weights.start(self.updates.offer)

    async def update(self, version: int) -> None:
        self.weights.deliver(version)
        await self.updates.first(1)

    async def groups(self, count: int = 2, **changes: Any) -> list[Completion]:
        return await self.requests.answer([request(number, **changes) for number in range(count)])


def act(action: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(action, 20))


def assert_whole(completion: Completion, count: int = 12) -> None:
    assert completion.token_ids == list(range(FIRST, FIRST + count))
    assert completion.log_probs == [log_prob_of(version) for version in completion.versions]
    assert completion.versions == sorted(completion.versions)


def test_in_flight_requests_go_on_over_a_load() -> None:
    async def run() -> None:
        stage = Stage(CountingEngine(), "in_flight")
        await stage.update(0)
        running = asyncio.create_task(stage.groups())
        await asyncio.sleep(0.05)
        await stage.update(1)
        for completion in await running:
            assert_whole(completion)
            assert set(completion.versions) == {0, 1} and completion.finish_reason == "length"
        assert stage.engine.at_load == [0, 2] and not stage.engine.aborted

    act(run())


def test_a_drain_lets_nothing_begin_and_loads_when_what_runs_has_ended() -> None:
    async def run() -> None:
        stage = Stage(CountingEngine(), "drain")
        await stage.update(0)
        before = asyncio.create_task(stage.groups())
        await asyncio.sleep(0.05)
        updating = asyncio.create_task(stage.update(1))
        await asyncio.sleep(0.01)
        assert not stage.requests.open
        after = asyncio.create_task(stage.requests.answer([request(number) for number in (2, 3)]))
        await asyncio.sleep(0.03)
        assert len(stage.engine.requests) == 2 and not updating.done()
        await updating
        for group, version in ((await before, 0), (await after, 1)):
            for completion in group:
                assert_whole(completion)
                assert set(completion.versions) == {version}
        assert stage.engine.at_load == [0, 0] and not stage.engine.aborted and stage.requests.open

    act(run())


def test_a_drain_that_takes_too_long_aborts_what_runs() -> None:
    async def run() -> None:
        stage = Stage(CountingEngine(token_seconds=0.1), "drain", drain_seconds=0.15)
        await stage.update(0)
        running = asyncio.create_task(stage.groups())
        await asyncio.sleep(0.05)
        await stage.update(1)
        assert [completion.finish_reason for completion in await running] == ["abort", "abort"]
        assert stage.engine.loads == [0, 1] and stage.engine.at_load[1] == 0 and stage.requests.open

    act(run())


def test_the_newest_version_is_loaded_when_a_drain_ends() -> None:
    async def run() -> None:
        stage = Stage(CountingEngine(), "drain")
        await stage.update(0)
        running = asyncio.create_task(stage.groups())
        await asyncio.sleep(0.02)
        updating = asyncio.create_task(stage.update(1))
        await asyncio.sleep(0.02)
        stage.weights.deliver(2)
        await asyncio.gather(running, updating)
        assert stage.engine.loads == [0, 2]
        assert stage.weights.released == ["shadow-0", "shadow-1", "shadow-2"]

    act(run())


def test_aborted_requests_resume_from_every_token_that_they_had() -> None:
    async def run() -> None:
        stage = Stage(CountingEngine(), "abort_resume")
        await stage.update(0)
        running = asyncio.create_task(stage.groups())
        for version in (1, 2):
            await asyncio.sleep(0.04)
            await stage.update(version)
        for completion in await running:
            assert_whole(completion)
            assert set(completion.versions) == {0, 1, 2} and completion.finish_reason == "length"
            assert completion.text == decode(completion.token_ids)
        assert stage.engine.at_load == [0, 0, 0]
        parts = [one for one in stage.engine.requests if one.id.startswith("r1")]
        assert len({one.seed for one in parts}) == len({one.id for one in parts}) == 3
        for one in parts:  # nothing of the budget is lost or won
            assert len(one.prompt_token_ids) + one.max_tokens == 2 + 12

    act(run())


def test_the_rest_of_a_completion_draws_random_numbers_of_its_own_that_follow_from_the_seed() -> None:
    first = request(5)
    assert continued(first, [7, 8]) == continued(first, [7, 8])
    seeds = {first.seed, continued(first, [7]).seed, continued(first, [7, 8]).seed, continued(request(6), [7]).seed}
    assert len(seeds) == 4 and all(0 <= seed < 1 << 31 for seed in seeds if seed is not None)
    assert continued(request(5, seed=None), [7]).seed is None


def test_an_abort_that_comes_before_its_request_is_repeated() -> None:
    async def run() -> None:
        stage = Stage(CountingEngine(deaf_seconds=0.1), "abort_resume")
        await stage.update(0)
        running = asyncio.create_task(stage.groups())
        await asyncio.sleep(0.02)
        await stage.update(1)
        for completion in await running:
            assert_whole(completion)
        assert stage.engine.at_load == [0, 0]

    act(run())


def test_a_stop_text_over_the_seam_of_two_parts_ends_the_completion() -> None:
    class Interrupted(CountingEngine):
        """Ends the first part after three tokens."""

        async def generate(self, request: Request) -> Completion:
            whole = await super().generate(request)
            if "+" in request.id:
                return whole
            part = slice(0, 3)
            return Completion(whole.token_ids[part], whole.log_probs[part], whole.versions[part], "abort", "")

    async def run() -> None:
        stage = Stage(Interrupted(token_seconds=0.001), "abort_resume")
        await stage.update(0)
        running = asyncio.create_task(stage.groups(1, stop=("02 103 1",)))
        await asyncio.sleep(0)
        stage.requests._interrupted.add("r0")
        (completion,) = await running
        assert_whole(completion, 5)
        assert completion.text == "100 101 102 103 1" and completion.finish_reason == "stop"

    act(run())


def test_an_engines_own_abort_is_not_resumed() -> None:
    async def run() -> None:
        stage = Stage(CountingEngine(), "abort_resume")
        await stage.update(0)
        running = asyncio.create_task(stage.groups())
        await asyncio.sleep(0.05)
        await stage.engine.abort("r0")
        aborted, whole = await running
        assert aborted.finish_reason == "abort" and whole.finish_reason == "length"

    act(run())


@pytest.mark.parametrize("mode", ["drain", "abort_resume"])
def test_requests_begin_again_after_an_update_that_failed(mode: UpdateMode) -> None:
    class Failing(CountingEngine):
        async def load(self, shadow: ShadowReference, version: int) -> None:
            if version == 1:
                raise ForebayError("no such luck")
            await super().load(shadow, version)

    async def run() -> None:
        stage = Stage(Failing(), mode)
        await stage.update(0)
        with pytest.raises(ForebayError, match="no such luck"):
            await stage.update(1)
        assert stage.requests.open and stage.weights.released == ["shadow-0", "shadow-1"]

    act(run())


def test_requests_that_do_not_end_when_aborted_are_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(CountingEngine):
        async def abort(self, request_id: str) -> None:
            pass

    async def run() -> None:
        engine = Deaf(token_seconds=1.0)
        requests = Requests(engine, decode)
        running = asyncio.create_task(requests.answer([request()]))
        await asyncio.sleep(0.02)
        requests.close_door()
        with pytest.raises(ForebayError, match="1 aborted requests did not end within 0 s"):
            await requests.abort(0.3, go_on=True)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await requests.ended(0.1)

    monkeypatch.setattr(requests_module, "ABORT_AGAIN_SECONDS", 0.05)
    act(run())


@pytest.mark.parametrize("mode", ["drain", "abort_resume"])
def test_a_service_keeps_every_group_over_updates(client: "redis.Redis", make_settings: Make, mode: UpdateMode) -> None:
    async def perform(scene: Scene) -> None:
        await scene.until(lambda: scene.member() and scene.member().version == 0, 40)  # it imports transformers
        for version in range(1, 4):
            await scene.until(lambda: scene.count("leased") > 0 or scene.count("generated") == 12)
            await asyncio.sleep(0.05)
            scene.publish()
            scene.weights.deliver(version)
            await scene.until(lambda version=version: scene.member().version == version)
        await scene.until(lambda: scene.count("generated") == 12)

    settings = make_settings(
        settings={"engine": {"concurrency": 4}, "drain_seconds": 5, "update_mode": mode},
        passes=1,
        groups_per_step=6,
        max_staleness=2,
        sampling={"max_tokens": 12},
    )
    scene = play(client, settings, perform, engine=CountingEngine(token_seconds=0.02))
    samples = [sample for group in scene.groups() for sample in group.samples]
    assert len(samples) == 48
    for sample in samples:
        versions = sample.token_versions().tolist()
        first = int(sample.tokens()[0])
        assert sample.tokens().tolist() == list(range(first, first + 12))
        assert sample.behaviour_log_probs().tolist() == [log_prob_of(version) for version in versions]
    counts = [len({v for s in group.samples for v in s.token_versions().tolist()}) for group in scene.groups()]
    assert set(counts) == {1} if mode == "drain" else max(counts) > 1
    assert not scene.events("aborted")
