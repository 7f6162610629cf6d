"""Producers are killed by the kernel at any moment; every prompt is trained exactly once all the same."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from buffer import journal, server
from buffer.ledger import Plan
from tests.buffer.world import World

ROOT = Path(__file__).resolve().parents[2]


class Producers:
    """Real processes that a test starts and kills."""

    def __init__(self, running: server.EmbeddedServer, run: str) -> None:
        self._running, self._run = running, run
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, mode: str = "loop") -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.buffer.crashing_producer", self._running.url, self._run, name, mode],
            cwd=ROOT,
            env={**os.environ, "TEST_PASSWORD": self._running.password, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
        )
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def producers(running_server: server.EmbeddedServer, world: World) -> Iterator[Producers]:
    started = Producers(running_server, world.run)
    yield started
    started.end()


def test_a_producer_killed_between_payload_and_commit_loses_nothing(world: World, producers: Producers) -> None:
    world.set_up(lease_seconds=1.0)
    victim = producers.start("p0", "between")
    assert victim.stdout is not None
    assert victim.stdout.readline() == b"between\n"
    victim.kill()
    victim.wait(10)
    orphan = next(world.client.scan_iter(f"forebay:{{{world.run}:0}}:group:*"))
    world.holds()  # a payload that nothing refers to is no group
    time.sleep(1.1)
    leases = world.lease("p1", count=3).leases
    assert [lease.prompt for lease in leases] == [0, 1, 2]
    for lease in leases:
        assert world.commit(lease, producer="p1")
    assert world.client.exists(orphan)
    assert world.ledger.collect_orphans() == 1
    assert not world.client.exists(orphan)
    assert world.train(1).prompts == (0, 1, 2)
    world.holds()


@pytest.mark.slow
def test_every_prompt_trains_exactly_once_while_producers_are_killed(
    world: World, producers: Producers, folder: Path
) -> None:
    rows, per_step, steps = 400, 8, 50
    chance = random.Random(7)
    world.set_up(rows=rows, per_step=per_step, staleness=1, lease_seconds=0.4, passes=1)
    running = {name: producers.start(name) for name in ("p0", "p1")}
    to_kill = {step: chance.uniform(0.0, 0.03) for step in range(4, 46, 7)}
    step, trained = 1, []
    deadline = time.monotonic() + 90
    while step <= steps:
        assert time.monotonic() < deadline, world.ledger.plan(step, fence=world.fence, final=False)
        if step in to_kill:
            time.sleep(to_kill.pop(step))  # producers are in the middle of what the last publish allowed
            name = chance.choice(sorted(running))
            running[name].kill()
            running[name].wait(10)
            running[name] = producers.start(name)
        plan = world.ledger.plan(step, fence=world.fence, final=False)
        if not isinstance(plan, Plan):
            time.sleep(0.02)
            continue
        journal.write(folder, plan, world.ledger.read_groups(plan.prompts))
        world.ledger.retire(step, fence=world.fence)
        world.publish(step)
        for name in running:
            world.serve(name, step)
        trained += plan.prompts
        step += 1
    assert not to_kill
    assert sorted(trained) == list(range(rows))
    assert trained == sorted(trained)  # tickets follow the pass's order, whoever answered
    assert journal.steps(folder) == list(range(1, steps + 1))
    world.holds()
    world.ledger.collect_orphans()
    assert not list(world.client.scan_iter(f"forebay:{{{world.run}:0}}:group:*"))


def test_a_commit_whose_answer_is_lost_is_made_once(world: World, running_server: server.EmbeddedServer) -> None:
    """The network is cut after the server has the command: what the client sends again is answered as a repetition."""
    world.set_up()
    lease = world.lease().leases[0]
    connection = world.client.connection_pool.get_connection()
    read = type(connection).read_response
    lost = []

    def lose_first_answer(self: object, *arguments: object, **options: object) -> object:
        answer = read(self, *arguments, **options)  # type: ignore[arg-type]
        if isinstance(answer, list) and answer[:1] == [b"done"] and not lost:
            lost.append(answer)
            raise redis.ConnectionError("cut by the test")
        return answer

    world.client.connection_pool.release(connection)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(connection), "read_response", lose_first_answer)
        assert world.commit(lease) is False
    assert lost
    assert world.commit(lease) is False
    assert world.counts()["generated"] == 1
    world.holds()
