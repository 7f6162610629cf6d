"""What a service of this machine is started with: its own environment's Python, its own part of the spec, in a file.

The environments are those of `make setup`; `FOREBAY_PRODUCER_PYTHON` and `FOREBAY_CONSUMER_PYTHON` name others.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from buffer.errors import ForebayError
from buffer.settings import Settings
from deploy.environments.contents import PLACE, ROOT
from deploy.run_folder import replace_file
from deploy.spec import RunSpec
from producer.settings import EngineSettings

VARIABLES = {"producer": "FOREBAY_PRODUCER_PYTHON", "consumer": "FOREBAY_CONSUMER_PYTHON"}


def python_of(service: str) -> str:
    """The Python of a service's environment; raises ForebayError when it is not there."""
    if service == "controller":
        return sys.executable
    given = os.environ.get(VARIABLES[service])
    python = Path(given) if given else PLACE / service / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise ForebayError(
            f"the environment of the {service} is not there",
            where=str(python),
            cure=f"make it with `make setup`, or name another Python in {VARIABLES[service]}",
        )
    return str(python)


def command(
    service: str, module: str, settings: Settings, name: str, folder: Path
) -> tuple[Sequence[str], Mapping[str, str]]:
    """The command that starts a service, and its variables; its settings are written to the run folder."""
    file = folder / "settings" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, settings.model_dump_json(indent=2) + "\n")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The working directory is that of the run: a reward of one's own is found there.
    paths.insert(1, os.getcwd())
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Threads that spin while they wait take the cores from the other services of the machine.
    variables |= {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    return [python_of(service), "-m", module, "--settings", str(file)], variables


def engine_on_this_machine(spec: RunSpec, engine: EngineSettings) -> EngineSettings:
    """The engine's settings with its threads said: half of the cores, shared among all producers here."""
    if engine.threads is not None:
        return engine
    producers = sum(pool.replicas for pool in spec.producers.values())
    cores = len(os.sched_getaffinity(0))
    return engine.model_copy(update={"threads": max(1, cores // 2 // max(1, producers))})
