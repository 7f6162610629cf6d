"""The consumer as a process on a real server: its end, its deaths and what they leave behind."""

import itertools
import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from safetensors.torch import load_file, save_file

from buffer import journal, server
from buffer.client import connect
from buffer.ledger import Ledger
from buffer.members import Members
from buffer.metrics import Control, EvaluationQueue, Metrics
from consumer.settings import ConsumerSettings
from tests.consumer import run_service
from tests.consumer.material import make_groups, make_settings

pytestmark = [pytest.mark.consumer_env, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
STEPS, GROUPS = 4, 3
_numbers = itertools.count()
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.consumer.run_service"])


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.EmbeddedServer]:
    running = server.start(tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


class Running:
    """The service in a process of its own. Its imports take many seconds: they are made once, by a process that those
    of all tests are forked from."""

    def __init__(self, environment: dict[str, str], arguments: list[str], said: Path) -> None:
        self._said = said
        self.process = processes.Process(target=run_service.run, args=(environment, arguments, str(said)), daemon=True)
        self.process.start()

    def terminate(self) -> None:
        """SIGTERM"""
        self.process.terminate()

    def end(self, seconds: float) -> tuple[int, str]:
        """Wait for its end: exit code (-n for signal n) and what was said on stderr."""
        self.process.join(seconds)
        code = self.process.exitcode
        self.process.kill()
        self.process.join(10)
        said = self._said.read_text()
        assert code is not None, f"it did not end within {seconds} s: {said}"
        return code, said


class World:
    """A run: its settings, its ledger, and a feeder that answers each prompt with the same group in every run."""

    def __init__(self, running: server.EmbeddedServer, model: Path, folder: Path, **options: Any) -> None:
        self.running, self.folder = running, folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.client: redis.Redis = connect(running.url, password=running.password, timeout_seconds=10)
        run = f"run-{next(_numbers)}"
        options = {"steps": STEPS, "groups_per_step": GROUPS, "max_staleness": 8} | options
        options["checkpoint"] = {"every": 3} | options.get("checkpoint", {})
        # AdamW divides by the gradient's size: an element of almost no gradient would show the order of its sums.
        options["optimizer"] = {"epsilon": 1e-4}
        self.settings = make_settings(model, folder, run=run, redis_url=running.url, **options)
        self.ledger = Ledger(self.client, run)
        self.ledger.configure(
            groups_per_step=GROUPS,
            max_staleness=8,
            budget_bytes=10_000_000,
            lease_seconds=30,
            reserve_bytes=100_000,
            passes=1,
            data_digest="test",
        )
        self.ledger.open_pass(0, list(range(60)), ["default"] * 60)
        self.metrics, self.control = Metrics(self.client, run), Control(self.client, run)
        self.members = Members(self.client, run, heartbeat_seconds=1.0)
        self._stop = threading.Event()
        self._feeder: threading.Thread | None = None

    def feed(self, groups: int = 60) -> None:
        """Lease prompts in order and commit their groups, as a producer does."""
        incarnation = self.members.join("producer-0", role="producer", pool="producer", info={})

        def work() -> None:
            done = 0
            while not self._stop.is_set() and done < groups:
                version = self.ledger.current_version()
                if version >= 0:
                    self.members.set_state("producer-0", incarnation, "serving", version=version)
                    for lease in self.ledger.lease("producer-0", count=1, version=version).leases:
                        self.ledger.commit(lease, make_groups(1, seed=lease.prompt, first=lease.prompt)[0], usable=True)
                        done += 1
                self._stop.wait(0.02)

        self._feeder = threading.Thread(target=work, daemon=True)
        self._feeder.start()

    def start(self, *, die: tuple[str, int] | None = None, **changes: Any) -> Running:
        """One rank, in a process of its own."""
        environment, arguments = self._order(changes)
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if die:
            environment |= {"DIE_BEFORE": die[0], "DIE_AT_STEP": str(die[1])}
        return Running(environment, arguments, self.folder / "stderr.txt")

    def run(self, **options: Any) -> tuple[int, str]:
        """Exit code and what was said on stderr."""
        return self.start(**options).end(120)

    def run_ranks(self, ranks: int) -> tuple[int, str]:
        """The same of several ranks under torchrun."""
        environment, arguments = self._order({})
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        script = str(Path(__file__).with_name("run_service.py"))
        done = subprocess.run(
            [*torchrun, script, *arguments],
            cwd=ROOT,
            env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stderr

    def _order(self, changes: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
        settings = ConsumerSettings(**{**dict(self.settings), **changes})
        file = self.folder / "consumer.json"
        file.write_text(settings.model_dump_json())
        environment = {"OMP_NUM_THREADS": "1", settings.buffer.password_env: self.running.password}
        return environment, ["--settings", str(file)]

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "checkpoints" / f"step-{step:08d}" / "model" / "model.safetensors")

    def close(self) -> None:
        self._stop.set()
        if self._feeder is not None:
            self._feeder.join(10)

    def holds(self) -> None:
        report = self.ledger.verify()
        assert not report.problems, "\n".join(report.problems)


@pytest.fixture
def worlds(running_server: server.EmbeddedServer, tiny_model: Path, tmp_path: Path) -> Iterator[Any]:
    made: list[World] = []

    def make(model: Path = tiny_model, **options: Any) -> World:
        made.append(World(running_server, model, tmp_path / f"world-{len(made)}", **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture(scope="module")
def unkilled(
    running_server: server.EmbeddedServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """A run that went through, on one rank."""
    world = World(running_server, tiny_model, tmp_path_factory.mktemp("unkilled"))
    world.feed()
    code, said = world.run()
    assert code == 0, said
    yield world
    world.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_run_trains_journals_publishes_and_reports_each_step(unkilled: World) -> None:
    assert [values["step"] for values in unkilled.metrics.steps()] == [1, 2, 3, 4]
    assert unkilled.ledger.last_trained_step() == STEPS
    assert unkilled.ledger.current_version() == STEPS
    names = sorted(path.name for path in (unkilled.folder / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000004"]
    assert journal.steps(unkilled.folder / "journal") == [4]
    assert list((unkilled.folder / "tensorboard").glob("events.*"))
    wanted = {"reward/mean", "response/length_mean", "policy/entropy", "policy/kl", "policy/clip_fraction"}
    wanted |= {"staleness/mean", "mismatch/all_mean_abs", "time/wait", "time/forward_backward", "grad_norm", "loss"}
    assert wanted <= unkilled.metrics.steps()[0].keys()
    unkilled.holds()


@pytest.mark.parametrize("point", ["journal", "retire", "publish", "rename"])
def test_a_run_killed_in_a_step_and_resumed_has_the_weights_of_one_that_was_not(
    worlds: Any, unkilled: World, point: str
) -> None:
    world = worlds()
    world.feed()
    code, said = world.run(die=(point, 3))
    assert code == -signal.SIGKILL, said
    versions = world.ledger.current_version()
    code, said = world.run(resume=True)
    assert code == 0, said
    for name, tensor in unkilled.weights(STEPS).items():
        assert torch.equal(world.weights(STEPS)[name], tensor), name
    assert [values["step"] for values in world.metrics.steps()] == [1, 2, 3, 4]
    assert world.ledger.current_version() > versions
    world.holds()


def test_two_ranks_run_as_one_does(worlds: Any, unkilled: World) -> None:
    world = worlds()
    world.feed()
    code, said = world.run_ranks(2)
    assert code == 0, said
    for name, tensor in unkilled.weights(STEPS).items():
        torch.testing.assert_close(world.weights(STEPS)[name], tensor, atol=1e-5, rtol=0, msg=name)
    world.holds()


def test_a_stop_finishes_the_step_writes_a_checkpoint_and_resume_goes_on(worlds: Any, unkilled: World) -> None:
    world = worlds()
    world.feed(groups=2 * GROUPS)  # step 3 will wait, as its groups do not come
    process = world.start()
    wait_until(lambda: len(world.metrics.steps()) == 2)
    process.terminate()
    code, said = process.end(60)
    assert code == 0, said
    assert (world.folder / "checkpoints" / "step-00000002" / "COMPLETE").is_file()
    world.feed()
    code, said = world.run(resume=True)
    assert code == 0, said
    for name, tensor in unkilled.weights(STEPS).items():
        assert torch.equal(world.weights(STEPS)[name], tensor), name
    world.holds()


def test_a_used_run_folder_is_refused_without_resume(unkilled: World) -> None:
    code, said = unkilled.run()
    assert code == 2
    assert "--resume" in said
    assert "Traceback" not in said


def test_a_step_that_waits_too_long_names_whom_it_waited_for(worlds: Any) -> None:
    world = worlds(trainer={"no_progress_seconds": 3})
    world.feed(groups=2)
    code, said = world.run()
    assert code == 4
    assert "step 1 waited 3 s for 1 groups" in said
    assert "producer-0 (serving, version 0)" in said
    assert "Traceback" not in said
    assert any("waited 3 s" in event["text"] for event in world.metrics.events())


def test_a_model_that_produces_nan_ends_the_run_with_a_reason_before_anything_is_published(
    worlds: Any, tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    world = worlds(model=broken)
    world.feed()
    code, said = world.run()
    assert code == 8
    assert "model.norm.weight is not finite" in said
    assert "Traceback" not in said
    assert not (world.folder / "checkpoints").exists()
    assert (world.ledger.last_trained_step(), world.ledger.current_version()) == (0, -1)
    world.holds()


def test_evaluations_are_asked_for_at_version_0_at_multiples_and_at_the_end(worlds: Any) -> None:
    world = worlds(evaluation_every=3)
    world.feed()
    process = world.start()
    wait_until(lambda: (world.folder / "checkpoints" / f"step-{STEPS:08d}").is_dir())
    queue = EvaluationQueue(world.client, world.settings.run)
    wait_until(lambda: queue.open() == [0, 3, 4])
    for version in (0, 3, 4):
        world.metrics.record_evaluation(version, {"accuracy": 0.5, "step": version})
        queue.done(version)
    code, said = process.end(30)
    assert code == 0, said


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_settings_that_are_malformed_are_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"run": "x"}))
    code, said = Running({}, ["--settings", str(file)], tmp_path / "stderr.txt").end(60)
    assert code == 2
    assert "malformed" in said
    assert "Traceback" not in said
