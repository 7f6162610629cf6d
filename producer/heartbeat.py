"""A producer reports that it is alive even while its engine keeps the event loop busy, and hears what people asked for.

It runs in a thread of its own: loading a model or a kernel's compilation may hold the loop for longer than a member may
be silent. Leases are renewed in the loop, so a producer whose loop is stuck still loses its prompts.
"""

import threading
from collections.abc import Callable

from buffer.errors import ForebayError
from buffer.members import Members
from buffer.metrics import Control

JOIN_SECONDS = 5.0


class Heartbeat:
    """Reports until stopped."""

    def __init__(
        self,
        members: Members,
        control: Control,
        *,
        name: str,
        incarnation: int,
        seconds: float,
        info: Callable[[], dict[str, str]],
        on_stop: Callable[[str], None],
        on_error: Callable[[ForebayError], None],
    ) -> None:
        self._members = members
        self._control = control
        self._name = name
        self._incarnation = incarnation
        self._seconds = seconds
        self._info = info
        self._on_stop = on_stop
        self._on_error = on_error
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to report; ``on_stop`` and ``on_error`` are called in the thread, once at most each."""
        self._thread.start()

    def stop(self) -> None:
        """Report no more."""
        self._end.set()
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        told = False
        try:
            while True:
                self._members.report(self._name, self._incarnation, self._info())
                if not told and (flag := self._control.get("stop")):
                    told = True
                    self._on_stop(flag)
                if self._end.wait(self._seconds):
                    return
        except ForebayError as error:
            self._on_error(error)
