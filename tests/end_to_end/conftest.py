"""Real runs: the tests here start `forebay run` as a person would and look at what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from buffer.errors import ForebayError
from deploy import run_folder
from deploy.status import read_status

ROOT = Path(__file__).resolve().parents[2]
PRODUCER_PYTHON = ROOT / ".venv/producer/bin/python"
CONSUMER_PYTHON = ROOT / ".venv/consumer/bin/python"
FOREBAY = (sys.executable, "-m", "deploy.cli")


def environment() -> dict[str, str]:
    """The environment of a command, with the project importable wherever it runs."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def forebay(*arguments: str, cwd: Path, seconds: float = 600) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [*FOREBAY, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=seconds
    )


@dataclass
class LiveRun:
    """A `forebay run` that was started in the background."""

    process: "subprocess.Popen[str]"
    folder: Path

    def status(self) -> dict[str, Any]:
        """What the status command says; empty before the run can be read."""
        result = forebay("status", str(self.folder), "--json", cwd=self.folder.parent, seconds=30)
        return json.loads(result.stdout) if result.returncode == 0 else {}

    def look(self) -> dict[str, Any]:
        """The same, read here: starting a command over and over would take a core from the run."""
        if not (self.folder / run_folder.RECORD_FILE).exists():
            return {}
        try:
            record = run_folder.read_record(self.folder)
            client = run_folder.connect_live(self.folder, record, seconds=3.0)
            beat = record.buffer.heartbeat_seconds
            status = read_status(client, run=record.run, steps=record.steps, heartbeat_seconds=beat)
        except ForebayError:  # an earlier run's record, or the server is not up yet
            return {}
        client.close()
        return status.model_dump(mode="json")

    def wait_until(self, is_so: Callable[[dict[str, Any]], bool], what: str, seconds: float = 300) -> None:
        """Return once the status says so; fail when the run ends or it takes too long."""
        deadline = time.monotonic() + seconds
        while not is_so(self.look()):
            if self.process.poll() is not None:
                pytest.fail(f"the run ended before {what}:\n{self.output()}")
            if time.monotonic() > deadline:
                pytest.fail(f"not {what} within {seconds} s:\n{self.output()}")
            time.sleep(0.5)

    def wait_for_step(self, step: int) -> None:
        """Return once the run has made ``step`` optimizer steps."""
        self.wait_until(lambda status: (status.get("step") or 0) >= step, f"step {step}")

    def output(self) -> str:
        """What it printed so far, and the tail of each service's output."""
        tails = [f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("logs/*.out"))]
        main = self.folder.parent / f"{self.folder.name}.console"
        return (main.read_text() if main.exists() else "") + "\n".join(tails)

    def wait(self, seconds: float = 180) -> int:
        """The exit code, once it has ended."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end in {seconds} s:\n{self.output()}")


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., LiveRun]]:
    """Starts runs, and kills what is left of them at the end of the test."""
    started: list[LiveRun] = []

    def start(spec: Path, *arguments: str) -> LiveRun:
        content = yaml.safe_load(spec.read_text())
        folder = tmp_path / content["folder"]
        console = (tmp_path / f"{folder.name}.console").open("a")
        process = subprocess.Popen(
            [*FOREBAY, "run", str(spec), *arguments],
            cwd=tmp_path,
            env=environment(),
            stdout=console,
            stderr=subprocess.STDOUT,
            text=True,
        )
        run = LiveRun(process, folder)
        started.append(run)
        return run

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.wait(timeout=30)


def processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that mention the folder, or whose environment or working files are in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            places = [os.readlink(entry / "cwd")] + [
                os.readlink(entry / "fd" / name) for name in ("1", "2") if (entry / "fd" / name).is_symlink()
            ]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if state != "Z" and (str(folder) in command or any(str(folder) in place for place in places)):
            found.append(f"{entry.name} {command}")
    return found


def no_process_remains(folder: Path, seconds: float = 20) -> None:
    """Fail when a process of the run is alive after the deadline."""
    deadline = time.monotonic() + seconds
    while alive := processes_of(folder):
        if time.monotonic() > deadline:
            pytest.fail("processes outlived the run:\n" + "\n".join(alive))
        time.sleep(0.3)


def write_tiny_model(folder: Path, *, tied: bool) -> Path:
    """A tiny random Qwen2 model with the arithmetic example's tokenizer."""
    code = (
        "import sys; from pathlib import Path; from examples.arithmetic.model import write_model;"
        "write_model(Path(sys.argv[1]), tied=sys.argv[2] == 'tied', hidden=64, layers=2, seed=11)"
    )
    subprocess.run(
        [str(CONSUMER_PYTHON), "-c", code, str(folder), "tied" if tied else "untied"],
        cwd=ROOT,
        env=environment(),
        check=True,
        timeout=120,
    )
    return folder


def write_sums(path: Path, rows: int = 64) -> Path:
    """Small sums as a JSONL data set."""
    lines = [json.dumps({"question": f"{i}+{j}=", "answer": str(i + j)}) for i in range(8) for j in range(8)]
    path.write_text("\n".join(lines[:rows]) + "\n")
    return path


OWN_REWARD = '''"""A reward that differs within a group of any model, so that every step changes the weights."""


def score(completion, row, finish_reason):
    """Share of the characters that are digits, and a little for length."""
    return sum(letter.isdigit() for letter in completion) / max(1, len(completion)) + len(completion) / 100
'''


def small_spec(tmp_path: Path, model: Path, **changes: Any) -> Path:
    """A run spec of a few quick steps."""
    data = write_sums(tmp_path / "sums.jsonl")
    (tmp_path / "own_reward.py").write_text(OWN_REWARD)
    spec: dict[str, Any] = {
        "name": "small",
        "folder": "run",
        "seed": 3,
        "steps": 5,
        "groups_per_step": 4,
        "group_size": 4,
        "max_staleness": 1,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(data)},
        "prompt": {"template": "raw", "max_tokens": 64},
        "sampling": {"max_tokens": 12},
        "rewards": [{"name": "own_reward:score"}, {"name": "exact"}],
        "producers": {"producer": {"engine": {"threads": 1, "concurrency": 8}}},
        "consumer": {
            "threads": 1,
            "micro_batch_tokens": 512,
            "optimizer": {"learning_rate": 1e-3},
            "checkpoint": {"every": 2},
        },
    }
    spec.update(changes)
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def ledger_holds(folder: Path) -> dict[str, object]:
    """`forebay ledger --verify` on the run folder, which must succeed."""
    result = forebay("ledger", str(folder), "--verify", "--json", cwd=folder.parent, seconds=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def read_report(folder: Path) -> dict[str, Any]:
    """The report that a run leaves."""
    return json.loads((folder / "report.json").read_text())
