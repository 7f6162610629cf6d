"""No process of a run outlives the one that started it, however that one ends."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

LAUNCHER = "FOREBAY_LAUNCHER"
"""Environment variable with the id of the process that a service must not outlive, where another one starts it."""
_PR_SET_PDEATHSIG = 1
# Loaded once and early: between fork and exec only async-signal-safe work should be done.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(expected_parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends; for `preexec_fn` or the start of a service.

    ``expected_parent``: the process id of whoever starts this one; if it is gone already, this process ends at once.
    It must be given for that: a parent with the id 1 may be the init that orphans go to or, in a container, the one
    that started this process.
    The signal follows the *thread* that forked: start long-lived children from a thread that lives as long.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.getppid()
    # A service may itself be process 1 of its container, so 1 is only suspect when nobody said whom to expect.
    if parent != expected_parent if expected_parent is not None else parent == 1:
        os._exit(1)


def dying_with_me() -> Callable[[], None]:
    """A `preexec_fn` for a child that must not outlive the calling process."""
    me = os.getpid()
    return lambda: die_with_parent(me)


def die_with_launcher() -> None:
    """For the start of a service that another program starts: end with the launcher that the environment names."""
    if launcher := os.environ.get(LAUNCHER):
        die_with_parent(int(launcher))
