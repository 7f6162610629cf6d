"""Invariant: torch is always the CPU build, from the configured index or, failing that, from PyTorch's own."""

import os
import subprocess
from pathlib import Path

from deploy.environments.contents import TORCH, TORCH_INDEX, SetUpFailed

DEADLINE = 3600.0  # seconds: the largest environment over a slow line


def run_pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the pip of an environment; the caller looks at the return code."""
    command = [str(python), "-m", "pip", *arguments]
    quiet = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=quiet)
    except subprocess.TimeoutExpired as error:
        raise SetUpFailed(
            f"pip did not finish within {DEADLINE:.0f} s",
            where=" ".join(command),
            cure="look at the network, run again",
        ) from error


def install(python: Path, *arguments: str) -> None:
    """``pip install`` with these arguments, or an error that ends with what pip said."""
    done = run_pip(python, "install", "--quiet", *arguments)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise SetUpFailed(f"pip install failed:\n{said}", where=str(python), cure="see pip's message, then run again")


def torch_options(python: Path) -> tuple[str, ...]:
    """What pip must be told to find the CPU build of torch: nothing, or PyTorch's own index."""
    choices: tuple[tuple[str, ...], ...] = ((), ("--extra-index-url", TORCH_INDEX))
    said: list[str] = []
    for options in choices:
        done = run_pip(python, "install", "--quiet", "--dry-run", "--no-deps", *options, TORCH)
        if done.returncode == 0:
            return options
        said += done.stderr.strip().splitlines()[-2:]
    raise SetUpFailed(
        f"{TORCH} was found neither in the configured package index nor in {TORCH_INDEX}:\n" + "\n".join(said),
        where="pip",
        cure="set FOREBAY_TORCH_INDEX to an index that has PyTorch's CPU builds, then run again",
    )
