"""A report adds up, whatever the run has come to."""

import json
import math
import time
from pathlib import Path

import pytest

from buffer.metrics import Metrics
from deploy.report import Report, make_report
from tests.buffer.world import World
from tests.deploy.shown import step_numbers, trained_run
from weight_sync.registry import ProofRecord, Registry


def prove(world: World, version: int, *, member: str = "p0", incarnation: int = 1, error: str = "") -> None:
    Registry(world.client, world.run).write_proof(
        ProofRecord(
            member=member,
            incarnation=incarnation,
            version=version,
            layout="tp1",
            checksums_ok=True,
            digest=f"digest {version}",
            probe_mean=1e-6,
            probe_max=1e-5,
            noise_floor=1e-6,
            tolerance=1e-3,
            self_test="passed",
            error=error,
        )
    )


def test_a_report_of_a_run_that_did_nothing_has_no_numbers(world: World, tmp_path: Path) -> None:
    report = make_report(
        world.client, run=world.run, status="failed", reason="no model", started=time.time(), folder=tmp_path
    )
    Report.model_validate(report)
    assert (report["status"], report["reason"], report["steps"], report["version"]) == ("failed", "no model", 0, None)
    assert report["eval"] == {"first": None, "last": None, "history": []}
    assert report["time"] == {}
    assert report["checkpoint"] is None


def test_a_report_holds_what_the_run_recorded_and_adds_up(world: World, tmp_path: Path) -> None:
    trained_run(world)
    for version in range(4):
        prove(world, version)
    (tmp_path / "checkpoints/step-00000003").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000004").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000003/COMPLETE").touch()
    report = make_report(
        world.client, run=world.run, status="finished", reason="", started=time.time() - 60, folder=tmp_path
    )
    json.dumps(report, allow_nan=False)
    assert (report["run"], report["status"], report["steps"], report["version"]) == (world.run, "finished", 3, 3)
    assert report["seconds"] == pytest.approx(60, abs=5)
    assert report["checkpoint"] == "checkpoints/step-00000003"
    assert (report["eval"]["first"], report["eval"]["last"]) == (0.25, 0.75)
    assert [(one["version"], one["step"], one["mean_length"]) for one in report["eval"]["history"]] == [
        (0, 0, 12.5),
        (3, 3, 12.5),
    ]
    assert (report["reward"]["first"], report["reward"]["last"]) == (pytest.approx(0.1), pytest.approx(0.3))
    assert [one["step"] for one in report["reward"]["history"]] == [1, 2, 3]
    assert [proof["version"] for proof in report["proofs"]] == [0, 1, 2, 3]
    assert report["proofs"][0] == {
        "version": 0,
        "member": "p0",
        "probe_mean_abs": 1e-6,
        "probe_max_abs": 1e-5,
        "noise_floor": 1e-6,
        "tolerance": 1e-3,
        "checksums_ok": True,
        "digest": "digest 0",
        "self_test_passed": True,
        "error": "",
    }
    assert report["staleness"] == {"mean": 0.5, "max": 1.0}
    assert report["mismatch"] == {
        "mean_abs": pytest.approx(2e-6),
        "max": pytest.approx(3e-5),
        "all_mean_abs": pytest.approx(4e-6),
    }
    assert report["throughput"] == {"samples": 18, "tokens": 180, "tokens_per_second": 30.0, "steps_per_second": 0.5}
    assert report["time"]["wait"] == 0.25
    assert report["time"]["other"] == pytest.approx(0.1)
    assert sum(report["time"].values()) == pytest.approx(1.0)
    assert report["ledger"]["counts"]["trained"] == 9
    assert sum(report["ledger"]["counts"].values()) == 40
    assert report["ledger"]["problems"] == []


def test_a_ledger_that_does_not_add_up_is_told(world: World, tmp_path: Path) -> None:
    trained_run(world)
    world.client.hincrby(f"forebay:{{{world.run}}}:counters", "trained", 1)
    report = make_report(world.client, run=world.run, status="stopped", reason="", started=0.0, folder=tmp_path)
    assert report["ledger"]["problems"]


def test_a_proof_that_failed_after_its_probe_is_shown_once_and_failed(world: World, tmp_path: Path) -> None:
    prove(world, 1)
    prove(world, 1, error="another replica computes with other tensors")
    prove(world, 1, incarnation=2)
    report = make_report(world.client, run=world.run, status="stopped", reason="", started=0.0, folder=tmp_path)
    assert [proof["error"] for proof in report["proofs"]] == ["another replica computes with other tensors", ""]


def test_replayed_steps_and_numbers_that_are_not_finite_spoil_no_mean(world: World, tmp_path: Path) -> None:
    trained_run(world)
    replayed = step_numbers(2, **{"mismatch/mean_abs": math.nan})
    for name in ("time/wait", "time/publish", "time/total"):
        del replayed[name]
    Metrics(world.client, world.run).record_step(2, replayed)
    report = make_report(world.client, run=world.run, status="stopped", reason="", started=0.0, folder=tmp_path)
    assert sum(report["time"].values()) == pytest.approx(1.0)
    assert report["throughput"]["tokens_per_second"] == 30.0
    assert report["mismatch"]["mean_abs"] == pytest.approx(2e-6)
    assert report["throughput"]["samples"] == 18
