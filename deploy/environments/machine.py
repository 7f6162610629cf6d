"""Invariant: what the machine lacks is said all at once, with the command that brings it, before anything is made."""

import ctypes
import importlib.util
import platform
import shutil
import sys
from pathlib import Path

from deploy.environments.contents import PLACE, SetUpFailed

SPACE = 8 * 2**30  # bytes: the three environments take about 6 GB, pip's own cache the rest


def has_library(name: str) -> bool:
    """Whether the loader finds a shared library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def check_machine(place: Path = PLACE) -> None:
    """Refuse a machine on which the locks cannot be installed or would not run."""
    wrong: list[str] = []
    packages: list[str] = []
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        wrong.append(f"the locks are for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    if sys.version_info[:2] != (3, 11):
        wrong.append(
            f"Python 3.11 is needed and {sys.executable} is {platform.python_version()}: "
            "install it, then `make PYTHON=python3.11 …`"
        )
    if any(importlib.util.find_spec(module) is None for module in ("venv", "ensurepip")):
        wrong.append("Python's venv module cannot make environments")
        packages.append("python3-venv")
    if not has_library("libnuma.so.1"):
        wrong.append("libnuma.so.1, which vLLM loads, is missing")
        packages.append("libnuma1")
    free = shutil.disk_usage(place if place.exists() else place.parent).free
    if free < SPACE:
        wrong.append(
            f"{SPACE / 2**30:.0f} GiB of disk are needed and {free / 2**30:.1f} GiB are free at {place.parent}"
        )
    if wrong:
        cure = f"on Debian: sudo apt-get install {' '.join(packages)}" if packages else "see above, then run again"
        raise SetUpFailed("this machine lacks something:\n  - " + "\n  - ".join(wrong), cure=cure)
