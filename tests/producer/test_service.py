"""A producer leases what it may answer, commits only what it has proved, and gives back the rest however it ends."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from buffer import server
from buffer.client import connect
from buffer.errors import BufferUnavailable, ForebayError, ProofFailed, SpecError, TrainingFailed
from buffer.ledger import Ledger
from buffer.members import Members
from buffer.metrics import Control, EvaluationQueue, Metrics
from producer.replica import Replica
from producer.rollout import sampling_seed
from producer.settings import ProducerSettings
from tests.producer.scripted import ScriptedEngine, ScriptedWeights

ROOT = Path(__file__).resolve().parents[2]
MISBEHAVING = "tests.producer.scorers:misbehaving"
Make = Callable[..., ProducerSettings]


@dataclass
class Scene:
    """A producer in this process, and the consumer's side of the ledger."""

    client: "redis.Redis"
    settings: ProducerSettings
    replica: Replica
    engine: ScriptedEngine
    weights: ScriptedWeights
    ledger: Ledger
    fence: int
    step: int = 0

    def publish(self) -> int:
        return self.ledger.publish(fence=self.fence, step=self.step)

    def summary(self, name: str) -> Any:
        return self.ledger.summary()[name]

    def counts(self) -> dict[str, int]:
        return self.ledger.verify().counts

    def count(self, state: str) -> int:
        return self.counts().get(state, 0)

    def dropped(self) -> dict[str, int]:
        return self.ledger.verify().dropped

    def groups(self) -> list[Any]:
        prompts = [prompt for prompt in range(48) if (self.ledger.history(prompt) or {}).get("state") == "generated"]
        return self.ledger.read_groups(prompts)

    def events(self, kind: str) -> list[str]:
        return [event["text"] for event in Metrics(self.client, self.settings.run).events() if event["kind"] == kind]

    def member(self) -> Any:
        members = Members(self.client, self.settings.run, heartbeat_seconds=0.2).all("producer")
        return next((member for member in members if member.name == self.settings.member), None)

    async def until(self, what: Callable[[], Any], seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(what):
            assert time.monotonic() < deadline, f"not in time; {self.counts()}, {self.dropped()}, {self.member()}"
            await asyncio.sleep(0.02)


def play(
    client: "redis.Redis",
    settings: ProducerSettings,
    act: Callable[[Scene], Awaitable[None]],
    *,
    engine: ScriptedEngine | None = None,
    weights: ScriptedWeights | None = None,
    publish: bool = True,
) -> Scene:
    """Run a producer beside ``act``, drain it when ``act`` is done, and see that the ledger adds up."""

    async def run() -> Scene:
        ledger = Ledger(client, settings.run)
        chosen_engine, chosen_weights = engine or ScriptedEngine(), weights or ScriptedWeights()
        replica = Replica(settings, lambda _: chosen_engine, lambda *_: chosen_weights)
        scene = Scene(
            client,
            settings,
            replica,
            chosen_engine,
            chosen_weights,
            ledger,
            await asyncio.to_thread(ledger.register_publisher),
        )
        if publish:
            scene.publish()
        serving = asyncio.create_task(replica.run())
        acting = asyncio.ensure_future(act(scene))
        await asyncio.wait([serving, acting], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        if acting.done():
            replica.drain("the test is over")
            try:
                acting.result()
            finally:
                await asyncio.wait_for(asyncio.gather(serving, return_exceptions=True), 30)
        else:
            acting.cancel()
        serving.result()
        return scene

    scene = asyncio.run(run())
    assert_clean(scene)
    return scene


def assert_clean(scene: Scene) -> None:
    report = scene.ledger.verify()
    assert not report.problems
    assert report.counts.get("leased", 0) == 0
    assert scene.engine.stopped


def fails(client: "redis.Redis", settings: ProducerSettings, act: Any, **how: Any) -> ForebayError:
    with pytest.raises(ForebayError) as caught:
        play(client, settings, act, **how)
    return caught.value


async def nothing(scene: Scene) -> None:
    await asyncio.sleep(30)


def test_groups_are_committed_up_to_what_staleness_allows(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("generated") == 8)  # 2 steps of 4 groups at staleness 1
        await scene.until(lambda: scene.member() and "staleness" in scene.member().info["waiting"])
        assert scene.member().state == "serving" and scene.member().version == 0
        values = Metrics(client, scene.settings.run).producers()["producer-0"]
        assert values["version"] == 0 and values["idle_seconds"] >= 0

    scene = play(client, make_settings(), act)
    assert scene.member() is None  # it said goodbye
    for group in scene.groups():
        assert [sample.sampling_seed for sample in group.samples] == [
            sampling_seed(7, group.prompt, number) for number in range(4)
        ]
        assert [sample.reward for sample in group.samples] == [sample.sampling_seed % 2 for sample in group.samples]
        assert all(sample.token_versions().tolist() == [0] * 4 for sample in group.samples)
        assert group.producer == "producer-0" and group.sampling.temperature == 1.0


def test_seeds_and_prompts_do_not_depend_on_who_answers(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("generated") == 8)

    def groups(settings: ProducerSettings) -> dict[int, Any]:
        return {
            group.prompt: (group.row, [(s.sampling_seed, s.reward) for s in group.samples])
            for group in play(client, settings, act).groups()
        }

    one = groups(make_settings(run=f"one-{os.getpid()}"))
    other = groups(make_settings(run=f"other-{os.getpid()}", member="another", settings={"engine": {"concurrency": 1}}))
    assert one == other and len(one) == 8


def test_a_pool_with_tasks_answers_prompts_of_those_only(
    client: "redis.Redis", make_settings: Make, tmp_path: Path
) -> None:
    rows = tmp_path / "tasks.jsonl"
    kinds = ["sum", "product", "root"] * 4
    rows.write_text(
        "".join(json.dumps({"question": f"{n}=", "answer": "1", "kind": k}) + "\n" for n, k in enumerate(kinds))
    )
    settings = make_settings(
        data={"path": str(rows), "task_key": "kind"},
        settings={"engine": {"concurrency": 4}, "drain_seconds": 5, "tasks": ["product", "root"]},
        groups_per_step=12,
    )

    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("generated") == 8)
        await scene.until(lambda: scene.member().info["waiting"].startswith("exhausted"))

    scene = play(client, settings, act)
    assert {group.task for group in scene.groups()} == {"product", "root"}
    assert scene.counts()["pending"] == 4


def test_the_next_pass_is_opened_when_every_prompt_was_leased(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("generated") == 24)

    scene = play(client, make_settings(groups_per_step=12), act)
    rows = {number: [g.row for g in scene.groups() if g.pass_number == number] for number in (0, 1)}
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(12)) and rows[0] != rows[1]


def test_the_last_pass_is_not_followed_by_another(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("generated") == 12)
        await scene.until(lambda: scene.member() and "exhausted" in scene.member().info["waiting"])

    play(client, make_settings(groups_per_step=12, passes=1), act)


def test_an_over_long_prompt_is_dropped_with_that_reason(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.dropped().get("over-long prompt") == 2)  # rows 10 and 11 have five characters

    play(client, make_settings(prompt={"max_tokens": 4}, groups_per_step=12, passes=1), act)


@pytest.mark.parametrize(
    ("says", "reason"), [("raise", "scorer failed"), ("die", "scorer failed"), ("unscorable", "unscorable")]
)
def test_a_group_that_cannot_be_scored_is_dropped_and_counted(
    client: "redis.Redis", make_settings: Make, says: str, reason: str
) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.dropped().get(reason, 0) >= 2)

    settings = make_settings(rewards=[{"name": MISBEHAVING, "retries": 0}], passes=1)
    scene = play(client, settings, act, engine=SayingEngine("1", says))
    assert scene.count("generated") == 0


def test_a_reward_that_never_gives_a_score_ends_the_producer_with_its_reason(
    client: "redis.Redis", make_settings: Make
) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: False)

    settings = make_settings(rewards=[{"name": MISBEHAVING, "retries": 0}])
    with pytest.raises(SpecError, match="no completion could be scored.*the scorer's own fault"):
        play(client, settings, act, engine=SayingEngine("raise"))
    ledger = Ledger(client, settings.run)
    assert sum(ledger.verify().dropped.values()) < 12, "a broken reward must not use up the data"


class SayingEngine(ScriptedEngine):
    """Says the given texts one after the other, the last one for ever."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self._texts = itertools.chain(texts, itertools.repeat(texts[-1]))

    async def generate(self, request: Any) -> Any:
        completion = await super().generate(request)
        return type(completion)(**{**vars(completion), "text": next(self._texts)})


def test_a_group_without_signal_is_dropped_when_dynamic_sampling_is_on(
    client: "redis.Redis", make_settings: Make
) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("generated") + scene.count("dropped") == 12)

    scene = play(client, make_settings(dynamic_sampling=True, groups_per_step=12, passes=1, group_size=2), act)
    equal = [n for n in range(12) if sampling_seed(7, n, 0) % 2 == sampling_seed(7, n, 1) % 2]
    assert scene.dropped() == {"no signal": len(equal)} and 0 < len(equal) < 12


def test_tokens_of_an_unproved_version_wait_for_its_proof(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("leased") == 4)
        await asyncio.sleep(0.3)  # one token of the old version
        hold = scene.weights.held[1] = asyncio.Event()
        scene.publish()
        scene.weights.deliver(1)
        await scene.until(lambda: scene.engine.version == 1)
        await asyncio.sleep(1.2)  # every completion is there
        assert scene.count("generated") == 0 and scene.count("leased") == 4
        hold.set()
        await scene.until(lambda: scene.count("generated") >= 4)
        assert scene.member().version == 1

    scene = play(client, make_settings(groups_per_step=2), act, engine=ScriptedEngine(token_seconds=0.2))
    mixed = [s for group in scene.groups() for s in group.samples if len(set(s.token_versions().tolist())) == 2]
    assert mixed and all(s.token_versions().tolist() == sorted(s.token_versions().tolist()) for s in mixed)


def test_a_failed_proof_quarantines_and_gives_everything_back(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("leased") == 4)
        scene.weights.bad.add(1)
        scene.publish()
        scene.weights.deliver(1)
        await scene.until(lambda: scene.member().state == "quarantined")
        await scene.until(lambda: scene.count("leased") == 0)
        await asyncio.sleep(0.5)
        assert scene.count("leased") == scene.count("generated") == 0
        assert "version 1 does not compute" in scene.events("quarantine")[0]
        assert "quarantined" in scene.member().info["waiting"]
        scene.weights.deliver(2)  # it stays in the broadcasts, and out of everything else
        await scene.until(lambda: "shadow-2" in scene.weights.released)
        assert scene.engine.loads == [0, 1]

    play(client, make_settings(), act, engine=ScriptedEngine(token_seconds=0.2))


def test_a_failed_self_test_ends_the_producer_before_it_leases(client: "redis.Redis", make_settings: Make) -> None:
    weights = ScriptedWeights()
    weights.self_test_error = ProofFailed("the output head is stale")
    settings = make_settings()
    assert isinstance(fails(client, settings, nothing, weights=weights), ProofFailed)
    (member,) = Members(client, settings.run, heartbeat_seconds=0.2).all()
    assert member.state == "quarantined" and "stale" in member.info["last_error"]
    assert Ledger(client, settings.run).verify().counts.get("leased", 0) == 0


def test_only_the_newest_of_two_waiting_versions_is_loaded(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        hold = scene.weights.held[1] = asyncio.Event()
        await scene.until(lambda: scene.member() and scene.member().version == 0)
        for version in (1, 2, 3):
            scene.publish()
            scene.weights.deliver(version)
            await asyncio.sleep(0.3)
        hold.set()
        await scene.until(lambda: scene.member().version == 3)
        assert scene.engine.loads == [0, 1, 3]
        assert sorted(scene.weights.released) == ["shadow-0", "shadow-1", "shadow-2", "shadow-3"]

    play(client, make_settings(), act)


def test_a_lost_lease_is_aborted_and_somebody_else_answers(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("leased") == 4)
        scene.ledger.give_back_all(scene.settings.member)  # as after a long silence
        await scene.until(lambda: scene.events("lease lost"))
        assert scene.engine.aborted

    buffer = {"heartbeat_seconds": 0.2, "lease_seconds": 1, "timeout_seconds": 3}
    play(client, make_settings(buffer=buffer), act, engine=ScriptedEngine(token_seconds=1.0))


def test_a_commit_of_a_lost_lease_is_dropped_with_an_event(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("leased") == 4)
        scene.ledger.give_back_all(scene.settings.member)
        await scene.until(lambda: scene.events("fenced"))
        await scene.until(lambda: scene.count("generated") == 8)

    scene = play(client, make_settings(), act, engine=ScriptedEngine(token_seconds=0.1))
    assert len({group.prompt for group in scene.groups()}) == 8


def test_an_aborted_request_gives_its_prompt_back(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.events("aborted"))
        scene.engine.finish_with_abort = False
        await scene.until(lambda: scene.count("generated") == 8)

    engine = ScriptedEngine(token_seconds=0.05)
    engine.finish_with_abort = True
    play(client, make_settings(), act, engine=engine)


def test_a_stop_flag_drains(client: "redis.Redis", make_settings: Make) -> None:
    settings = make_settings()

    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("leased") == 4)
        Control(client, settings.run).set("stop", "drain")
        await asyncio.sleep(20)

    scene = play(client, settings, act, engine=ScriptedEngine(token_seconds=0.1))
    assert scene.count("generated") >= 4


def test_a_drain_gives_back_what_does_not_end_in_time(client: "redis.Redis", make_settings: Make) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("leased") == 4)

    settings = make_settings(settings={"engine": {"concurrency": 4}, "drain_seconds": 0.3})
    scene = play(client, settings, act, engine=ScriptedEngine(token_seconds=5.0))
    assert scene.count("generated") == 0 and len(scene.engine.aborted) == 16


def test_a_dead_engine_ends_the_producer_with_its_error_and_nothing_lost(
    client: "redis.Redis", make_settings: Make
) -> None:
    settings, engine = make_settings(), ScriptedEngine(token_seconds=0.1)

    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("leased") == 4)
        engine.dead = ForebayError("the engine's process was killed", cure="see its log")
        await asyncio.sleep(30)

    assert "was killed" in str(fails(client, settings, act, engine=engine))
    (member,) = Members(client, settings.run, heartbeat_seconds=0.2).all()
    assert "was killed" in member.info["last_error"]
    counts = Ledger(client, settings.run).verify().counts
    assert counts.get("leased", 0) == 0 and counts["pending"] == 12


def test_log_probs_that_are_not_numbers_end_the_producer(client: "redis.Redis", make_settings: Make) -> None:
    engine = ScriptedEngine()
    engine.log_prob = float("nan")
    error = fails(client, make_settings(), nothing, engine=engine)
    assert isinstance(error, TrainingFailed) and "version 0" in str(error)


def test_a_producer_whose_name_is_taken_ends_and_leaves_the_leases_alone(
    client: "redis.Redis", make_settings: Make
) -> None:
    settings = make_settings()

    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("leased") == 4)
        members = Members(client, settings.run, heartbeat_seconds=0.2)
        members.join(settings.member, role="producer", pool="producer", info={})
        await asyncio.sleep(30)

    assert "is replaced by incarnation 2" in str(fails(client, settings, act, engine=ScriptedEngine(token_seconds=0.5)))


def test_a_lost_server_ends_the_producer_within_its_deadline(make_settings: Make, tmp_path: Path) -> None:
    running = server.start(tmp_path / "redis")
    try:
        client = connect(running.url, password=running.password)
        settings = make_settings(
            redis_url=running.url.replace("redis://", f"redis://:{running.password}@"),
            buffer={"heartbeat_seconds": 0.2, "lease_seconds": 3, "timeout_seconds": 1},
        )
        stopped_at = 0.0

        async def act(scene: Scene) -> None:
            nonlocal stopped_at
            await scene.until(lambda: scene.count("leased") == 4)
            await asyncio.to_thread(running.stop)
            stopped_at = time.monotonic()
            await asyncio.sleep(30)

        error = fails(client, settings, act, engine=ScriptedEngine(token_seconds=1.0))
        assert isinstance(error, BufferUnavailable) and time.monotonic() - stopped_at < 10
    finally:
        running.stop()


def test_an_evaluation_is_greedy_and_pins_its_version(client: "redis.Redis", make_settings: Make) -> None:
    settings = make_settings()
    settings = make_settings(evaluation={"data": settings.data.model_dump(), "max_tokens": 6, "timeout_seconds": 20})
    queue = EvaluationQueue(client, settings.run)

    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.member() and scene.member().version == 0)
        queue.request(0, 0)
        await scene.until(lambda: any(r.id.startswith("evaluation") for r in scene.engine.requests))
        scene.publish()
        scene.weights.deliver(1)
        await scene.until(lambda: scene.member().version == 1)
        (result,) = Metrics(client, settings.run).evaluations()
        assert result["version"] == result["asked"] == result["step"] == 0
        assert result["problems"] == 12 and result["accuracy"] == 1.0 and result["mean_length"] == 4
        assert queue.open() == []

    scene = play(client, settings, act, engine=ScriptedEngine(token_seconds=0.1))
    asked = [request for request in scene.engine.requests if request.id.startswith("evaluation")]
    assert len(asked) == 12
    assert all(r.temperature == 0 and r.seed is None and r.max_tokens == 6 for r in asked)


def test_two_producers_share_a_short_supply(client: "redis.Redis", make_settings: Make) -> None:
    async def run() -> dict[str, int]:
        settings = [make_settings(member=f"producer-{n}", groups_per_step=12) for n in range(2)]
        ledger = Ledger(client, settings[0].run)
        ledger.publish(fence=ledger.register_publisher(), step=0)
        replicas = [
            Replica(one, lambda _: ScriptedEngine(token_seconds=0.05), lambda *_: ScriptedWeights()) for one in settings
        ]
        tasks = [asyncio.create_task(replica.run()) for replica in replicas]
        deadline = time.monotonic() + 20
        while (await asyncio.to_thread(ledger.verify)).counts.get("generated", 0) < 24:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        for replica in replicas:
            replica.drain("done")
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert not ledger.verify().problems
        made = [group.producer for group in ledger.read_groups(range(24))]
        return {name: made.count(name) for name in ("producer-0", "producer-1")}

    made = asyncio.run(run())
    assert sum(made.values()) == 24 and min(made.values()) >= 6


def start_process(settings: ProducerSettings, tmp_path: Path, token_seconds: float) -> "subprocess.Popen[str]":
    path = tmp_path / f"{settings.member}.json"
    path.write_text(settings.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-m", "tests.producer.scripted", str(path), str(token_seconds)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_terminated_process_drains_and_exits_with_0(
    client: "redis.Redis", make_settings: Make, tmp_path: Path
) -> None:
    settings = make_settings()
    ledger = Ledger(client, settings.run)
    ledger.publish(fence=ledger.register_publisher(), step=0)
    process = start_process(settings, tmp_path, 0.1)
    try:
        wait_for(lambda: ledger.summary()["running"] == 4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
    report = ledger.verify()
    assert not report.problems and report.counts.get("leased", 0) == 0 and report.counts["generated"] >= 4
    assert Members(client, settings.run, heartbeat_seconds=0.2).all() == []


@pytest.mark.slow
def test_the_prompts_of_a_killed_process_go_to_another(
    client: "redis.Redis", make_settings: Make, tmp_path: Path
) -> None:
    settings = make_settings(passes=1, groups_per_step=12)
    ledger = Ledger(client, settings.run)
    ledger.publish(fence=ledger.register_publisher(), step=0)
    process = start_process(settings, tmp_path, 5.0)
    try:
        wait_for(lambda: ledger.summary()["running"] == 4)
    finally:
        process.kill()
        process.wait(10)

    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.count("generated") == 12)

    scene = play(client, make_settings(passes=1, groups_per_step=12, member="producer-1"), act, publish=False)
    assert {group.producer for group in scene.groups()} == {"producer-1"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rewards": [{"name": "maths"}]}, "there is no reward `maths`"),
        ({"data": {"path": "absent.jsonl"}}, "the dataset does not exist"),
        ({"prompt": {"template": "r0"}}, "there is no template `r0`"),
        ({"redis_url": "redis://127.0.0.1:1/0"}, "Redis"),
    ],
)
def test_what_is_wrong_in_the_spec_ends_the_process_with_a_sentence(
    make_settings: Make, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    settings = make_settings(**changes, **({} if "buffer" in changes else {"buffer": {"timeout_seconds": 0.5}}))
    path = tmp_path / "settings.json"
    path.write_text(settings.model_dump_json())
    result = subprocess.run(
        [sys.executable, "-m", "producer.service", "--settings", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode in (2, 3) and says in result.stderr and "Traceback" not in result.stderr
    assert (Path(settings.folder) / "logs" / "producer-0.log").read_text().count("\n") >= 1


def test_other_data_than_the_runs_is_refused(client: "redis.Redis", make_settings: Make) -> None:
    settings = make_settings()
    play(client, settings, lambda scene: scene.until(lambda: scene.count("generated") == 8))
    other = make_settings(data={"path": settings.data.path, "limit": 3})
    error = fails(client, other, nothing)
    assert isinstance(error, SpecError) and "data" in str(error)
