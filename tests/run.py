"""Invariant: every test folder runs in the environment named for it, all of them run whatever fails, and no test or
folder is passed over in silence.

``python3 tests/run.py [STAGE ...]`` runs the checks of the code, then the tests, and closes with one summary.
"""

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "test-results"
DEADLINE = 25 * 60.0  # seconds for one stage; each test has its own time limit in pyproject.toml
GRACE = 20.0  # seconds between asking a stage to end and killing it
PARTING = 5.0  # seconds for what ends by itself just after the stage, such as Python's resource tracker
NO_TESTS = 5  # pytest's exit code

OTHERS_OF_PRODUCER = ("-m", "not consumer_env", "--ignore-glob=*/test_consumer_*.py")
OTHERS_OF_CONSUMER = ("-m", "not producer_env", "--ignore-glob=*/test_producer_*.py")


@dataclass(frozen=True)
class Stage:
    """One command, or the tests of some folders, in one environment."""

    name: str
    environment: str
    command: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What a stage came to."""

    stage: Stage
    seconds: float
    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)


STAGES = (
    Stage("lint", "controller", ("ruff", "check", ".")),
    Stage("format", "controller", ("ruff", "format", "--check", ".")),
    Stage("types", "controller", ("mypy",)),
    Stage("controller", "controller", folders=("buffer", "deploy")),
    Stage("weight_sync-producer", "producer", folders=("weight_sync",), options=OTHERS_OF_PRODUCER),
    Stage("weight_sync-consumer", "consumer", folders=("weight_sync",), options=OTHERS_OF_CONSUMER),
    Stage("producer", "producer", folders=("producer",), options=OTHERS_OF_PRODUCER),
    Stage("consumer", "consumer", folders=("consumer",), options=OTHERS_OF_CONSUMER),
    Stage("end_to_end", "controller", folders=("end_to_end",)),
)


def has_tests(folder: Path) -> bool:
    """Whether a folder has test files."""
    return any(folder.rglob("test_*.py"))


def folders_without_stage() -> list[str]:
    """Test folders that no stage runs."""
    known = {folder for stage in STAGES for folder in stage.folders}
    return [entry.name for entry in sorted((ROOT / "tests").iterdir()) if entry.name not in known and has_tests(entry)]


def run_bounded(command: list[str]) -> int:
    """Run a command in a process group of its own, which is gone when this returns."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        print(f"still running after {DEADLINE / 60:.0f} minutes, ending it: {' '.join(command)}", flush=True)
        return 124
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process group."""
    for number, grace in ((signal.SIGINT, GRACE), (signal.SIGKILL, GRACE)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(timeout=grace)
            except subprocess.TimeoutExpired:
                continue
    deadline = time.monotonic() + PARTING
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    print(f"process group {process.pid} outlived its stage and was killed", flush=True)


def command_of(stage: Stage) -> list[str]:
    """What to run for a stage."""
    programs = ROOT / ".venv" / stage.environment / "bin"
    if stage.command:
        return [str(programs / stage.command[0]), *stage.command[1:]]
    folders = [f"tests/{folder}" for folder in stage.folders if has_tests(ROOT / "tests" / folder)]
    report = f"--junitxml={RESULTS / stage.name}.xml"
    return [str(programs / "python"), "-m", "pytest", "-q", "--durations=5", report, *stage.options, *folders]


def read_report(outcome: Outcome, file: Path) -> None:
    """Take the counts and the names of what failed from pytest's report."""
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        if bad is not None:
            reason = (bad.get("message") or "").strip().splitlines()
            outcome.failures.append(f"{name}: {reason[0] if reason else 'failed'}")
        elif case.find("skipped") is not None:
            outcome.skipped += 1
        else:
            outcome.passed += 1


def run_stage(stage: Stage) -> Outcome:
    """Run one stage and say what it came to."""
    print(f"\n== {stage.name} (in .venv/{stage.environment})", flush=True)
    report = RESULTS / f"{stage.name}.xml"
    report.unlink(missing_ok=True)
    began = time.monotonic()
    code = run_bounded(command_of(stage))
    outcome = Outcome(stage, time.monotonic() - began)
    if stage.folders and report.exists():
        read_report(outcome, report)
    elif code == 0:
        outcome.passed = 1
    if code == NO_TESTS and stage.folders:
        outcome.failures.append(f"{stage.name}: there are test files, but no test ran")
    elif code and not outcome.failures:
        outcome.failures.append(f"{stage.name}: exit code {code}")
    return outcome


def summarise(outcomes: list[Outcome], wrong: list[str]) -> int:
    """Print the closing summary and return the exit code."""
    print("\n== summary", flush=True)
    for outcome in outcomes:
        verdict = f"{len(outcome.failures)} FAILED" if outcome.failures else "ok"
        counts = f"{outcome.passed} passed, {outcome.skipped} skipped"
        print(f"{outcome.stage.name:<22} {verdict:<10} {counts:<24} {outcome.seconds:6.0f} s")
    failures = wrong + [failure for outcome in outcomes for failure in outcome.failures]
    for failure in failures:
        print(f"FAILED {failure}")
    passed, skipped = sum(o.passed for o in outcomes), sum(o.skipped for o in outcomes)
    print(f"{passed} passed, {len(failures)} failed, {skipped} skipped", flush=True)
    return 1 if failures or not passed else 0


def main(names: list[str]) -> int:
    """Run the named stages, or all."""
    unknown = sorted(set(names) - {stage.name for stage in STAGES})
    if unknown:
        print(f"no such stage: {', '.join(unknown)}; choose from {', '.join(stage.name for stage in STAGES)}")
        return 2
    RESULTS.mkdir(exist_ok=True)
    chosen = [stage for stage in STAGES if not names or stage.name in names]
    runnable = [s for s in chosen if s.command or any(has_tests(ROOT / "tests" / folder) for folder in s.folders)]
    wrong = [f"tests/{folder}: no stage of tests/run.py runs it" for folder in folders_without_stage()]
    return summarise([run_stage(stage) for stage in runnable], wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
