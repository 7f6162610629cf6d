"""What runs becomes what is desired, with real processes on a real server: only what is too much is told to leave."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buffer import server
from buffer.client import connect
from buffer.errors import BufferUnavailable
from buffer.metrics import EvaluationQueue, Metrics
from buffer.pools import Desired, Pools
from deploy.pools import replicas as module
from deploy.pools.base import RESTARTS, RunFailed
from deploy.pools.process import ProcessPool
from deploy.pools.replicas import Replicas
from tests.buffer.world import World

OBEDIENT = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True);"
    "time.sleep(60)"
)
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
SLOW = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.6), sys.exit(0)));"
    "print('up', flush=True); time.sleep(60)"
)


class Scene:
    """Pools of one run, whose replicas run ``code``."""

    def __init__(self, world: World, folder: Path, code: str, *, drain_seconds: float) -> None:
        self.world, self.folder = world, folder
        self.pools = Pools(world.client, world.run)
        self.pools.declare({"producer": Desired(1, 8), "other": Desired(0, 8)})
        self.metrics = Metrics(world.client, world.run)
        self.evaluations = EvaluationQueue(world.client, world.run)
        self.codes: dict[str, str] = {}  # of single names
        self.started: list[str] = []
        self.processes = ProcessPool(folder, self._command)
        self._default = code
        self.replicas = Replicas(
            self.processes,
            pools=self.pools,
            ledger=world.ledger,
            members=world.members,
            metrics=self.metrics,
            evaluations=self.evaluations,
            drain_seconds={"producer": drain_seconds, "other": drain_seconds},
            folder=folder,
        )

    def _command(self, name: str) -> tuple[list[str], dict[str, str]]:
        self.started.append(name)
        return [sys.executable, "-S", "-E", "-c", self.codes.get(name, self._default)], {}

    def scale(self, number: int, pool: str = "producer") -> None:
        self.pools.scale(pool, number)

    def look(self, *, stopping: bool = False) -> None:
        self.replicas.look(stopping=stopping)

    def until(self, is_so: Callable[[], bool], seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if is_so():
                return
            assert time.monotonic() < deadline, f"{self.names()}, {self.events()}"
            time.sleep(0.02)

    def names(self) -> list[str]:
        return sorted(self.processes.names())

    def up(self, *names: str) -> None:
        """Wait until the processes listen to signals."""
        outputs = [self.folder / "logs" / f"{name}.out" for name in names]
        self.until(lambda: all(output.exists() and "up" in output.read_text() for output in outputs))

    def events(self, kind: str = "scale") -> list[str]:
        return [event["text"] for event in self.metrics.events(1000) if event["kind"] == kind]


@pytest.fixture
def make(world: World, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def scene(code: str = OBEDIENT, *, drain_seconds: float = 10.0) -> Scene:
        world.set_up(rows=40, producers=())
        made.append(Scene(world, tmp_path, code, drain_seconds=drain_seconds))
        return made[-1]

    yield scene
    for one in made:
        one.processes.kill()


def test_the_desired_replicas_are_started_by_the_lowest_numbers(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.look()
    assert scene.names() == ["producer-0"]
    scene.scale(3)
    scene.scale(2, "other")
    scene.look()
    assert scene.names() == ["other-0", "other-1", "producer-0", "producer-1", "producer-2"]
    assert scene.started.count("producer-0") == 1


def test_the_highest_numbers_leave_and_their_end_is_expected(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.scale(3)
    scene.up("producer-0", "producer-1", "producer-2")
    first = scene.processes.pid("producer-0")
    scene.scale(1)
    scene.look()
    assert scene.pools.draining() == {"producer-1", "producer-2"}
    scene.until(lambda: scene.names() == ["producer-0"])
    scene.until(lambda: not scene.pools.draining())
    assert scene.processes.pid("producer-0") == first
    assert scene.started == ["producer-0", "producer-1", "producer-2"]
    assert scene.events("restart") == scene.events("failure") == []
    told, left = scene.events()[:2], scene.events()[2:]
    assert told == [f"producer-{number} was told to drain within 10 s" for number in (2, 1)]
    assert sorted(left) == [f"producer-{number} has drained and left; 0 prompts went back from it" for number in (1, 2)]


def test_a_replica_is_told_to_drain_once(make: Callable[..., Scene]) -> None:
    scene = make(SLOW)
    scene.scale(2)
    scene.up("producer-0", "producer-1")
    scene.scale(1)
    for _ in range(5):
        scene.look()
    assert scene.events() == ["producer-1 was told to drain within 10 s"]
    assert scene.names() == ["producer-0", "producer-1"]


def test_a_name_that_is_wanted_again_while_it_drains_is_started_when_it_has_ended(
    make: Callable[..., Scene],
) -> None:
    scene = make(SLOW)
    scene.scale(2)
    scene.up("producer-0", "producer-1")
    leaving = scene.processes.pid("producer-1")
    scene.scale(1)
    scene.look()
    scene.scale(2)
    scene.look()
    assert scene.processes.pid("producer-1") == leaving
    assert len(scene.names()) == 2, "never more processes than were desired at once"
    scene.until(lambda: "producer-1" in scene.names() and scene.processes.pid("producer-1") != leaving)
    assert scene.pools.draining() == frozenset()
    assert scene.events("restart") == []


def test_a_replica_that_does_not_drain_in_time_is_killed_and_leaves_nothing_leased(
    make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INSIST_SECONDS", 0.2)
    scene = make(DEAF, drain_seconds=0.3)
    scene.scale(2)
    scene.up("producer-0", "producer-1")
    scene.world.serve("producer-1", 0)
    assert len(scene.world.lease("producer-1", 2).leases) == 2
    scene.scale(1)
    started = time.monotonic()
    scene.look()
    scene.until(lambda: scene.names() == ["producer-0"] and not scene.pools.draining())
    assert 0.5 <= time.monotonic() - started < 5
    assert scene.events()[-1] == ("producer-1 did not drain in time and was killed; 2 prompts went back from it")
    assert scene.events("restart") == scene.events("failure") == []
    assert scene.world.counts()["leased"] == 0
    assert scene.world.members.all("producer") == [], "it could not say goodbye"
    scene.world.holds()


def test_a_producer_that_ends_well_without_being_told_is_started_again(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.up("producer-0")
    before = scene.processes.pid("producer-0")
    os.kill(before, signal.SIGTERM)
    scene.until(lambda: scene.names() == ["producer-0"] and scene.processes.pid("producer-0") != before)
    (text,) = scene.events("restart")
    assert text.startswith("it ended with code 0 after") and text.endswith("and is started again")


def test_a_producer_that_is_killed_is_started_again_and_what_it_held_goes_back(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.up("producer-0")
    scene.world.serve("producer-0", 0)
    scene.world.lease("producer-0", 3)
    scene.evaluations.request(0, 0)
    assert scene.evaluations.claim("producer-0", version=0, seconds=600) == (0, 0)
    assert scene.evaluations.claim("producer-7", version=0, seconds=600) is None
    before = scene.processes.pid("producer-0")
    os.kill(before, signal.SIGKILL)
    scene.until(lambda: scene.names() == ["producer-0"] and scene.processes.pid("producer-0") != before)
    assert scene.world.counts()["leased"] == 0
    assert scene.evaluations.claim("producer-7", version=0, seconds=600) == (0, 0)
    assert "was killed by SIGKILL" in scene.events("restart")[0]


def test_one_that_keeps_dying_is_given_up_and_without_any_the_run_fails(make: Callable[..., Scene]) -> None:
    scene = make("import sys; sys.exit('the engine died')")
    with pytest.raises(RunFailed, match="the producer producer-0 ended with code 1") as failed:
        scene.until(lambda: False)
    assert "the engine died" in failed.value.what
    assert scene.started == ["producer-0"] * (RESTARTS + 1)
    assert len(scene.events("failure")) == 1


def test_one_that_was_given_up_does_not_end_the_others_and_gets_a_new_chance_by_scaling(
    make: Callable[..., Scene],
) -> None:
    scene = make()
    scene.codes["producer-1"] = "import sys; sys.exit(6)"  # its proof failed
    scene.scale(3)
    scene.until(lambda: bool(scene.events("failure")))
    assert scene.names() == ["producer-0", "producer-2"]
    assert scene.started.count("producer-1") == 1
    del scene.codes["producer-1"]
    scene.scale(1)
    scene.until(lambda: scene.names() == ["producer-0"])
    scene.scale(2)
    scene.up("producer-0", "producer-1")


def test_a_refused_spec_ends_the_run_at_once(make: Callable[..., Scene]) -> None:
    scene = make("import sys; print('producer: no such reward'); sys.exit(2)")
    with pytest.raises(RunFailed, match="no such reward") as failed:
        scene.until(lambda: False)
    assert failed.value.code == 2
    assert scene.started == ["producer-0"]


def test_a_pool_may_be_scaled_to_nothing_and_back(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.up("producer-0")
    scene.scale(0)
    scene.until(lambda: scene.names() == [] and not scene.pools.draining())
    scene.look()
    scene.scale(1)
    scene.look()
    assert scene.names() == ["producer-0"]


def test_while_the_run_stops_nobody_is_started_again(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.up("producer-0")
    scene.processes.kill()
    scene.scale(3)
    scene.look(stopping=True)
    assert scene.names() == []
    assert scene.events("restart") == []


def test_a_server_that_knows_no_pools_is_no_order_to_end_them(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.up("producer-0")
    scene.world.client.delete(f"forebay:{{{scene.world.run}}}:pools:replicas")
    for _ in range(3):
        scene.look()
    assert scene.names() == ["producer-0"]
    assert scene.events() == []


def test_an_end_that_cannot_be_noted_while_the_server_is_away_is_noted_afterwards(tmp_path: Path) -> None:
    own = server.start(tmp_path / "redis")
    client = connect(own.url, password=own.password, timeout_seconds=0.5)
    scene = Scene(World(client, "away").set_up(producers=()), tmp_path, OBEDIENT, drain_seconds=10.0)
    try:
        scene.scale(2)
        scene.up("producer-0", "producer-1")
        scene.scale(1)
        scene.look()
        own.stop()
        assert scene.processes.wait(10, "producer-1")
        with pytest.raises(BufferUnavailable):
            scene.look()
        own = server.start(tmp_path / "redis", port=own.port)
        scene.until(lambda: scene.names() == ["producer-0"] and not scene.pools.draining())
        assert scene.events()[-1] == "producer-1 has drained and left; 0 prompts went back from it"
        assert scene.started == ["producer-0", "producer-1"]
    finally:
        scene.processes.kill()
        own.stop()
