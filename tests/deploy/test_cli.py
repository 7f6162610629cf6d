"""Bad input gets one message of cause and cure and a non-zero exit; nothing is started and nothing is lost."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer import server
from deploy import run_folder
from tests.deploy.specs import write_spec

ROOT = Path(__file__).resolve().parents[2]


def forebay(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "FOREBAY_PRODUCER_PYTHON": sys.executable, "FOREBAY_CONSUMER_PYTHON": sys.executable}
        | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


def refused(result: subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    assert result.returncode == code, result.stdout + result.stderr
    missing = [text for text in (*said, "cure:") if text not in result.stderr]
    assert not missing, f"{missing} not in:\n{result.stderr}"
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_missing_spec_ends_with_2(command: str, tmp_path: Path) -> None:
    refused(forebay(command, tmp_path / "none.yaml"), 2, "the run spec cannot be read")


def test_what_does_not_fit_ends_with_2_before_the_run_folder_is_made(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, data__path="nowhere.jsonl", rewards=[{"name": "maths"}])
    refused(forebay("run", spec), 2, "2 things do not fit", "the dataset does not exist", "no reward `maths`")
    assert not (tmp_path / "run").exists()


def test_check_prints_numbers_and_problems_as_json(tmp_path: Path) -> None:
    result = forebay("check", write_spec(tmp_path, buffer__budget_bytes=1), "--json")
    content = json.loads(result.stdout)
    assert result.returncode == 2
    assert content["derived"]["samples per step"] == 4
    assert [problem["where"] for problem in content["problems"]] == ["buffer.budget_bytes"]


def test_check_prints_the_resolved_spec_for_people(tmp_path: Path) -> None:
    result = forebay("check", write_spec(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "learning_rate: 1.0e-06" in result.stdout
    assert "everything fits" in result.stdout


def test_a_port_in_use_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = forebay("run", write_spec(tmp_path, controller__port=port))
    refused(result, 1, f"cannot listen on port {port}", "controller.port")
    assert not (tmp_path / "run" / "redis").exists()


def test_a_redis_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spec = write_spec(tmp_path, buffer={"url": f"redis://127.0.0.1:{port}/0", "timeout_seconds": 1})
    refused(forebay("run", spec), 3, "Redis did not answer", f"127.0.0.1:{port}")


def test_a_wrong_password_is_said_and_not_shown(tmp_path: Path, running_server: server.EmbeddedServer) -> None:
    spec = write_spec(tmp_path, buffer__url=running_server.url)
    result = forebay("run", spec, FOREBAY_REDIS_PASSWORD="not-the-one")
    refused(result, 3, "Redis refuses the password", "buffer.password_env")
    assert "not-the-one" not in result.stdout + result.stderr


def test_a_folder_in_which_a_run_works_is_refused(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    (tmp_path / "run").mkdir()
    with run_folder.hold(tmp_path / "run"):
        refused(forebay("run", spec), 1, "another `forebay run` works in this folder")


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    record(tmp_path / "run")
    refused(forebay("run", spec), 2, "holds a run already", "--resume", "--restart")


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    refused(forebay("run", write_spec(tmp_path), "--resume"), 2, "there is nothing to resume")


def test_resuming_another_runs_folder_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "run", run="other")
    refused(forebay("run", write_spec(tmp_path), "--resume"), 2, "the folder holds the run `other`")


def test_resuming_without_the_servers_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    record(tmp_path / "run")
    (tmp_path / "run" / "journal").mkdir()
    (tmp_path / "run" / "journal" / "step-00000001.msgpack").touch()
    refused(forebay("run", write_spec(tmp_path), "--resume"), 7, "its data are gone")
    assert not (tmp_path / "run" / "logs").exists()


def test_a_run_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    (tmp_path / "run").write_text("a file")
    refused(forebay("run", spec), 2, "the run folder cannot be written")


def test_an_environment_that_was_not_made_is_said(tmp_path: Path) -> None:
    result = forebay("run", write_spec(tmp_path), FOREBAY_PRODUCER_PYTHON=str(tmp_path / "python"))
    refused(result, 1, "the environment of the producer is not there", "make setup")


@pytest.mark.parametrize("command", ["status", "ledger", "stop", "pause", "resume", "checkpoint", "pools"])
def test_a_folder_without_a_run_is_said(command: str, tmp_path: Path) -> None:
    refused(forebay(command, tmp_path), 2, "this is not a run folder")


def test_a_run_that_has_ended_cannot_be_told_to_stop(tmp_path: Path) -> None:
    record(tmp_path / "run")
    refused(forebay("stop", tmp_path / "run"), 2, "the run is not running")


def test_only_a_live_run_and_a_whole_number_of_replicas_can_be_scaled(tmp_path: Path) -> None:
    record(tmp_path / "run")
    refused(forebay("scale", tmp_path / "run", "producer", 2), 2, "the run is not running")
    for number in ("-1", "two", "1.5"):
        result = forebay("scale", tmp_path / "run", "producer", number)
        assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr


def test_status_and_ledger_of_an_ended_run_read_its_own_server(tmp_path: Path) -> None:
    record(tmp_path / "run")
    status = json.loads(forebay("status", tmp_path / "run", "--json").stdout)
    assert (status["run"], status["alive"], status["step"]) == ("right", False, None)
    verified = forebay("ledger", tmp_path / "run", "--verify", "--json")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["problems"] == []


def test_a_ledger_that_does_not_add_up_ends_with_7(tmp_path: Path) -> None:
    record(tmp_path / "run")
    running = server.start(tmp_path / "run" / "redis")
    try:
        from buffer.client import connect

        client = connect(running.url, password=running.password)
        client.hset("forebay:{right}:counters", "generated", 3)
    finally:
        running.stop()
    refused(forebay("ledger", tmp_path / "run", "--verify"), 7, "0 prompts are generated, the counter says 3")


def test_an_unknown_command_or_option_is_a_usage_error() -> None:
    for arguments in (["rescale"], ["run"], ["run", "x.yaml", "--fast"]):
        result = forebay(*arguments)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


def record(folder: Path, **changes: Any) -> None:
    """The record that an ended run leaves in its folder."""
    folder.mkdir(parents=True)
    content = {"run": "right", "steps": 4, "buffer": {}, "redis_url": "redis://127.0.0.1:1/0"}
    content |= {"controller_url": "http://127.0.0.1:1", "token_env": "FOREBAY_TOKEN"} | changes
    (folder / run_folder.RECORD_FILE).write_text(json.dumps(content))
