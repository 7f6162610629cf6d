"""A person scales a live run by the command line; services that are members and nothing more stand in for the real."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import SpecError
from deploy import run_folder
from deploy.controller.client import ControllerClient, ControllerError
from tests.deploy.specs import write_spec

ROOT = Path(__file__).resolve().parents[2]
FOREBAY = (sys.executable, "-m", "deploy.cli")


class Live:
    """A `forebay run` in the background."""

    def __init__(self, place: Path) -> None:
        self.place, self.folder = place, place / "run"
        python = place / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.deploy.stand_in "$@"\n')
        python.chmod(0o700)
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.environment |= {"FOREBAY_PRODUCER_PYTHON": str(python), "FOREBAY_CONSUMER_PYTHON": str(python)}
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, spec: Path, *arguments: str) -> None:
        with (self.place / "console").open("a") as console:
            self.processes.append(
                subprocess.Popen(
                    [*FOREBAY, "run", str(spec), *arguments],
                    cwd=self.place,
                    env=self.environment,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def forebay(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*FOREBAY, *arguments], cwd=self.place, env=self.environment, capture_output=True, text=True, timeout=60
        )

    def pools(self) -> dict[str, Any]:
        """As the controller says; empty before it can be asked."""
        if not (self.folder / run_folder.TOKEN_FILE).exists():
            return {}  # asking would make a token, which is the controller's to make
        try:
            record = run_folder.read_record(self.folder)
            token = run_folder.controller_token(self.folder, record.token_env)
            found = ControllerClient(record.controller_url, token).pools()
        except (ControllerError, SpecError):
            return {}
        return {pool["name"]: pool for pool in found.model_dump(mode="json")["pools"]}

    def until(self, is_so: Callable[[dict[str, Any]], bool], seconds: float = 40.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not (pools := self.pools()) or not is_so(pools):
            if self.processes[-1].poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{pools}\n{(self.place / 'console').read_text()}")
            time.sleep(0.1)
        return pools

    def end(self) -> int:
        self.processes[-1].send_signal(signal.SIGINT)
        return self.processes[-1].wait(40)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    live = Live(tmp_path)
    yield live
    for process in live.processes:
        process.kill()
        process.wait(10)


def names(pools: dict[str, Any], pool: str = "producer") -> list[str]:
    return [replica["name"] for replica in pools[pool]["replicas"]]


def have(running: dict[str, int]) -> Callable[[dict[str, Any]], bool]:
    """Whether each pool has exactly so many replicas."""
    return lambda pools: all(
        (pools[name]["running"], pools[name]["draining"], len(pools[name]["replicas"])) == (number, 0, number)
        for name, number in running.items()
    )


@pytest.mark.slow
def test_pools_are_scaled_apart_and_a_number_set_by_hand_outlives_the_run(live: Live) -> None:
    spec = write_spec(live.place, producers={"producer": {}, "other": {"replicas": 0, "max_replicas": 2}})
    live.start(spec)
    (first,) = live.until(have({"producer": 1, "other": 0}))["producer"]["replicas"]

    said = live.forebay("scale", str(live.folder), "producer", "3")
    assert said.stdout.startswith("producer: 1 -> 3 replicas; new replicas start"), said.stderr
    assert live.forebay("scale", str(live.folder), "other", "1").returncode == 0
    pools = live.until(have({"producer": 3, "other": 1}))
    assert names(pools) == ["producer-0", "producer-1", "producer-2"]
    assert names(pools, "other") == ["other-0"]
    told = live.forebay("pools", str(live.folder), "--json")
    assert [len(pool["replicas"]) for pool in json.loads(told.stdout)["pools"]] == [1, 3]
    assert "producer-2" in live.forebay("pools", str(live.folder)).stdout

    assert live.forebay("scale", str(live.folder), "producer", "2").returncode == 0
    pools = live.until(have({"producer": 2, "other": 1}))
    assert names(pools) == ["producer-0", "producer-1"]
    assert pools["producer"]["replicas"][0]["pid"] == first["pid"]

    for pool, number, cause in (("other", "3", "takes 0 to 2 replicas"), ("none", "1", "no pool `none`")):
        refused = live.forebay("scale", str(live.folder), pool, number)
        assert refused.returncode == 1 and cause in refused.stderr and "cure:" in refused.stderr
    status = json.loads(live.forebay("status", str(live.folder), "--json").stdout)
    assert [(pool["name"], pool["desired"], pool["running"]) for pool in status["pools"]] == [
        ("other", 1, 1),
        ("producer", 2, 2),
    ]
    assert [event["kind"] for event in status["events"] if event["kind"] in ("restart", "failure")] == []

    assert live.end() == 130
    live.start(spec, "--resume")
    live.until(have({"producer": 2, "other": 1}))
    assert live.end() == 130

    live.start(spec, "--resume", "--set", "producers.producer.replicas=3")
    live.until(have({"producer": 3, "other": 1}))
    assert live.end() == 130


@pytest.mark.slow
def test_a_pool_grows_back_after_forebay_run_was_killed(live: Live) -> None:
    spec = write_spec(live.place)
    live.start(spec)
    live.until(have({"producer": 1}))
    assert live.forebay("scale", str(live.folder), "producer", "2").returncode == 0
    before = live.until(have({"producer": 2}))["producer"]["replicas"]
    live.processes[-1].kill()
    live.processes[-1].wait(10)
    live.start(spec, "--resume")
    pids = {replica["pid"] for replica in before}
    live.until(
        lambda pools: (
            have({"producer": 2})(pools) and not pids & {replica["pid"] for replica in pools["producer"]["replicas"]}
        )
    )
