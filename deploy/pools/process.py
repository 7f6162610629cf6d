"""Services as processes of this machine: none outlives the run, and what each one says is in a file of its own.

Each service has a session of its own (Ctrl-C at the terminal is for the run, which then drains them) and is killed by
the kernel when the run ends. This process adopts orphans of its services (it is their subreaper), so that what a
killed service leaves behind is found and ended too.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from buffer.errors import ForebayError
from buffer.processes import dying_with_me
from deploy.pools.base import Ended

_PR_SET_CHILD_SUBREAPER = 36
LAST_WORDS_BYTES = 4000
LAST_LINES = 12
POLL_SECONDS = 0.1
KILL_SECONDS = 10.0  # for the kernel to end what was killed

_WARNING = re.compile(r"\w+Warning: ")  # Python prints the line and, below it, the code

Command = Callable[[str], tuple[Sequence[str], Mapping[str, str]]]
"""Of a process's name: its command, and variables that its environment has besides this process's."""


def adopt_orphans() -> None:
    """Have processes whose parent dies become children of this one, so that it can end them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class ProcessPool:
    """Processes of one service on this machine. To be used from one thread that lives as long as they do."""

    def __init__(self, folder: Path, command: Command) -> None:
        self._folder = folder
        self._command = command
        self._running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self._written: dict[str, int] = {}  # bytes of the output that are of earlier processes of the name

    def start(self, name: str) -> None:
        """Start the process of that name; its output goes to ``logs/<name>.out``."""
        command, variables = self._command(name)
        logs = self._folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"{name}.out").open("ab") as output:
            self._written[name] = output.tell()
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **variables},
                    start_new_session=True,
                    preexec_fn=dying_with_me(),
                )
            except OSError as error:
                raise ForebayError(
                    f"{name} cannot be started: {error.strerror}",
                    where=str(command[0]),
                    cure="make the environments with `make setup`",
                ) from error
        self._running[name] = (process, time.monotonic())

    def names(self) -> list[str]:
        """Processes that are there."""
        return list(self._running)

    def pid(self, name: str) -> int:
        """The process id."""
        return self._running[name][0].pid

    def collect(self) -> list[Ended]:
        """Processes that ended since the last call."""
        ended = []
        for name, (process, started) in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[name]
                ended.append(
                    Ended(name, code, last_words(self._folder, name, self._written[name]), time.monotonic() - started)
                )
        return ended

    def ask_to_end(self, *names: str) -> None:
        """SIGTERM to the named ones, or to all: drain and leave."""
        for process in self._processes(names):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    def wait(self, seconds: float, *names: str) -> bool:
        """Whether the named ones, or all, ended within the deadline."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self._processes(names)):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def stop(self, seconds: float) -> None:
        """Ask all to end, insist after the deadline, and return when none is left."""
        self.ask_to_end()
        if not self.wait(seconds):
            self.kill()

    def kill(self, *names: str) -> None:
        """End the named ones, or all, at once, with everything in their sessions."""
        for process in self._processes(names):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.wait(KILL_SECONDS, *names)

    def _processes(self, names: Sequence[str]) -> "list[subprocess.Popen[bytes]]":
        return [self._running[name][0] for name in names or list(self._running)]


def last_words(folder: Path, name: str, since: int = 0) -> str:
    """The last lines that a process wrote to its output from byte ``since`` on, without libraries' warnings."""
    path = folder / "logs" / f"{name}.out"
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(since, path.stat().st_size - LAST_WORDS_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    told = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if not _WARNING.search(line) and not (line[:1].isspace() and _WARNING.search(before))
    ]
    return "\n".join(told[-LAST_LINES:])


def end_descendants(seconds: float, *, spare: Sequence[int] = ()) -> list[str]:
    """Kill what is left below this process, adopted orphans included; the command lines that did not go away."""
    deadline = time.monotonic() + seconds
    while True:
        left = [child for child in psutil.Process().children(recursive=True) if child.pid not in spare]
        if not left:
            return []
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        _, alive = psutil.wait_procs(left, timeout=1.0)
        if alive and time.monotonic() > deadline:
            return [" ".join(child.cmdline()) for child in alive if child.is_running()]
