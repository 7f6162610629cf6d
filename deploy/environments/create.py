"""Invariant: an environment holds exactly what its locks name, or it is not marked as ready.

``python3 -m deploy.environments.create [NAME ...]`` makes those that are not ready; it needs nothing installed.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import venv
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from deploy.environments.contents import ENVIRONMENTS, PLACE, ROOT, SetUpFailed, lock_file, locked_version
from deploy.environments.machine import check_machine
from deploy.environments.pip import install, torch_options

HEARTBEAT = 30.0  # seconds between two signs of life while pip is at work
STARTED = {  # what a service imports at its start
    "producer": "producer.service, vllm.v1.engine.async_llm, vllm.v1.engine.core, vllm.v1.worker.cpu_worker",
    "consumer": "consumer.launch, consumer.rank, consumer.service",
    "controller": "deploy.cli, pytest",
}
COMPILE_SECONDS = 300.0


def fingerprint(name: str) -> str:
    """What an environment was made from: its locks, the project's entry points, and the folder it points back to."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # Only what an editable installation takes from there: a change in the linter's settings must not make all anew.
    installed = [
        str(ROOT),
        described["build-system"],
        described["project"],
        described["tool"]["setuptools"]["packages"],
    ]
    digest = hashlib.sha256(json.dumps(installed, sort_keys=True).encode())
    for lock in ENVIRONMENTS[name]:
        digest.update(lock_file(lock).read_bytes())
    return digest.hexdigest()


def stamp(name: str) -> Path:
    """The mark of readiness, written last."""
    return PLACE / name / "ready"


def is_ready(name: str) -> bool:
    """Whether the environment is there and was made from what the repository holds now."""
    return (
        (PLACE / name / "bin" / "python").exists()
        and stamp(name).exists()
        and stamp(name).read_text() == fingerprint(name)
    )


def create(name: str) -> None:
    """Make one environment from nothing."""
    made_from = fingerprint(name)
    folder = PLACE / name
    if folder.exists():
        shutil.rmtree(folder)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    first = [f"{package}=={locked_version(name, package)}" for package in ("pip", "setuptools")]
    install(python, *first)
    options = torch_options(python) if name != "controller" else ()
    locks = [part for lock in ENVIRONMENTS[name] for part in ("-r", str(lock_file(lock)))]
    # Without dependencies: the locks are complete, and ColossalAI and vLLM ask for packages that must not be there.
    # Without compiling: only what is imported needs it, a small part of what is installed.
    install(python, "--no-deps", "--no-build-isolation", "--no-compile", *options, *locks)
    install(python, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    compile_what_is_imported(python, STARTED[name])
    stamp(name).write_text(made_from)


def compile_what_is_imported(python: Path, modules: str) -> None:
    """Import once and keep the compiled files, also where Python is told not to write any: there each start of a
    service would compile thousands of files anew. Whether it succeeds is a matter of speed only."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [python, "-c", f"import {modules}"],
            cwd=ROOT,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            timeout=COMPILE_SECONDS,
            check=False,
        )


def create_all(names: list[str]) -> None:
    """Make several environments at once and say how it goes."""
    began = time.monotonic()
    print(f"making {', '.join(names)} under {PLACE.name}/ (a few minutes, once)", flush=True)
    done = threading.Event()

    def one(name: str) -> None:
        create(name)
        print(f"  {name}: ready after {time.monotonic() - began:.0f} s", flush=True)

    def sign_of_life() -> None:
        while not done.wait(HEARTBEAT):
            print(f"  still installing ({time.monotonic() - began:.0f} s)", flush=True)

    life = threading.Thread(target=sign_of_life, daemon=True)
    life.start()
    try:
        with ThreadPoolExecutor(len(names)) as pool:
            running = [pool.submit(one, name) for name in names]
            wait(running, return_when=FIRST_EXCEPTION)
            for future in running:
                future.result()
    finally:
        done.set()
        life.join()


def main(names: list[str]) -> int:
    """Make what is not ready of the named environments, or of all."""
    try:
        unknown = sorted(set(names) - set(ENVIRONMENTS))
        if unknown:
            raise SetUpFailed(
                f"no such environment: {', '.join(unknown)}", cure=f"choose from {', '.join(ENVIRONMENTS)}"
            )
        wanted = names or list(ENVIRONMENTS)
        if all(map(is_ready, wanted)):
            return 0
        check_machine()
        PLACE.mkdir(exist_ok=True)
        with (PLACE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second `make` waits here and then finds all ready
            missing = [name for name in wanted if not is_ready(name)]
            if missing:
                create_all(missing)
    except SetUpFailed as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
