"""A pool grows and shrinks while the run goes on: a new replica is proved before its first lease, a drained one leaves
nothing behind, and nobody else notices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.ledger import Ledger
from buffer.metrics import Metrics
from buffer.scripts import prefix
from deploy import run_folder
from tests.end_to_end.conftest import (
    LiveRun,
    forebay,
    ledger_holds,
    no_process_remains,
    read_report,
    small_spec,
    write_tiny_model,
)
from weight_sync.registry import Registry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def pools_of(run: LiveRun) -> dict[str, Any]:
    """What `forebay pools` says of the one pool."""
    result = forebay("pools", str(run.folder), "--json", cwd=run.folder.parent, seconds=60)
    assert result.returncode == 0, result.stderr
    (pool,) = json.loads(result.stdout)["pools"]
    return pool


def scale(run: LiveRun, replicas: int) -> str:
    result = forebay("scale", str(run.folder), "producer", str(replicas), cwd=run.folder.parent, seconds=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def first_leases(run: LiveRun) -> dict[tuple[str, int], float]:
    record = run_folder.read_record(run.folder)
    client = run_folder.connect_live(run.folder, record, seconds=10.0)
    return Ledger(client, record.run).first_leases()


def events_of(run: LiveRun) -> list[dict[str, Any]]:
    with run_folder.opened_buffer(run.folder) as (client, record, _):
        return Metrics(client, record.run).events(10_000)


def test_a_pool_is_scaled_from_1_to_3_to_1_and_nobody_restarts(
    tmp_path: Path, start_run: Callable[..., LiveRun]
) -> None:
    model = write_tiny_model(tmp_path / "model", tied=True)
    endless = small_spec(
        tmp_path,
        model,
        steps=1_000_000,
        consumer={
            "threads": 1,
            "micro_batch_tokens": 512,
            "optimizer": {"learning_rate": 1e-4},
            "checkpoint": {"every": 1_000},
        },
    )
    run = start_run(endless)
    run.wait_for_step(1)
    (first,) = pools_of(run)["replicas"]
    assert "1 -> 3 replicas" in scale(run, 3)
    three = {(f"producer-{number}", 1) for number in range(3)}
    run.wait_until(lambda _: first_leases(run).keys() >= three, "each of three producers has leased")
    grown = pools_of(run)
    assert (grown["desired"], grown["running"], grown["draining"]) == (3, 3, 0)
    assert "3 -> 1 replicas" in scale(run, 1)
    run.wait_until(
        lambda status: (
            [(pool["running"], pool["draining"]) for pool in status.get("pools", [])] == [(1, 0)]
            and [producer["name"] for producer in status["producers"]] == ["producer-0"]
        ),
        "only producer-0 is left",
    )
    with run_folder.opened_buffer(run.folder) as (client, record, _):
        held = {name: client.scard(f"{prefix(record.run)}held:{name}") for name in ("producer-1", "producer-2")}
    assert held == {"producer-1": 0, "producer-2": 0}
    run.wait_for_step(run.status()["step"] + 3)
    (left,) = pools_of(run)["replicas"]
    assert (left["name"], left["pid"]) == (first["name"], first["pid"]), "producer-0 is the process it was"
    assert forebay("stop", str(run.folder), cwd=tmp_path, seconds=60).returncode == 0
    assert run.wait(90) == 0, run.output()

    ledger_holds(run.folder)
    with run_folder.opened_buffer(run.folder) as (client, record, _):
        proofs = Registry(client, record.run).proof_history()
        leased = Ledger(client, record.run).first_leases()
        assert leased.keys() == three, "a process more would be a restart"
    for (member, incarnation), at in leased.items():
        own = [proof for proof in proofs if (proof.member, proof.incarnation) == (member, incarnation)]
        assert own[0].self_test == "passed" and not own[0].error
        proved = min(proof.time for proof in own if proof.version >= 0 and not proof.error)
        assert proved < at, f"{member} was proved at {proved} and leased at {at}"
    events = events_of(run)
    assert [event for event in events if event["kind"] in ("restart", "failure", "quarantine", "lease lost")] == []
    told = [event["text"] for event in events if event["kind"] == "scale"]
    assert sorted(text for text in told if "drained and left" in text) == [
        f"producer-{number} has drained and left; 0 prompts went back from it" for number in (1, 2)
    ], told
    assert read_report(run.folder)["ledger"]["problems"] == []
    no_process_remains(run.folder)
