"""A process that is there but says nothing for a minute is ended, so that what stalls costs a deadline, not the run.

Members report from a thread of their own, also in a long step or a long load: silence means that the process is stopped
or stuck. One that cannot reach Redis is silent too; it has ended by its own deadline before.
"""

import contextlib
import os
import signal
from collections.abc import Sequence

import psutil

from buffer.members import Member

SILENT_SECONDS = 60.0


def end_silent(members: Sequence[Member]) -> list[Member]:
    """Kill those of the members that are processes below this one and have been silent for too long."""
    below = {str(child.pid) for child in psutil.Process().children(recursive=True)}
    silent = [m for m in members if m.info.get("pid") in below and m.seconds_since_report > SILENT_SECONDS]
    for member in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(member.info["pid"]), signal.SIGKILL)
    return silent
