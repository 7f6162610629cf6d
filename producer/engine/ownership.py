"""An engine's process ends with the service that owns the engine, from its first moment on."""

import os
import select
import signal
import threading

from buffer.processes import die_with_parent

OWNER = "FOREBAY_ENGINE_OWNER"
"""Environment variable with the id of the process that the engine's processes end with."""


def end_with_owner() -> None:
    """In a process that an engine has started: end when the engine's owner does, with the process that started this
    one if that is another. In the owner, and where there is no engine, nothing happens."""
    owner = int(os.environ.get(OWNER, 0))
    if owner and owner != os.getpid() and not _watching.is_set():
        _watching.set()
        _watch(owner)


_watching = threading.Event()


def _watch(owner: int) -> None:
    parent = os.getppid()
    if parent != owner:
        die_with_parent(parent)

    def end() -> None:
        if parent != owner and os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
        os._exit(1)

    def wait(descriptor: int) -> None:
        select.select([descriptor], [], [])
        end()

    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        end()
    else:
        # A thread, not a signal: the kernel's signal follows the thread that forked, which need not live as long.
        threading.Thread(target=wait, args=(descriptor,), daemon=True, name="end with owner").start()
