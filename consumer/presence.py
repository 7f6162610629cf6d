"""The consumer is known to be alive while its process lives, also in the middle of a long step."""

import threading
from types import TracebackType

from buffer.errors import BufferUnavailable, Fenced
from buffer.members import Members


class Presence:
    """Membership of rank 0, kept up by a thread; ``check`` raises when a newer process has taken the name."""

    def __init__(self, members: Members, name: str, pool: str, info: dict[str, str], *, seconds: float) -> None:
        self._members, self._name, self._pool, self._info = members, name, pool, dict(info)
        self._seconds = seconds
        self._leaving = threading.Event()
        self._fenced: Fenced | None = None
        self._thread = threading.Thread(target=self._keep_up, name="presence", daemon=True)
        self._incarnation = -1

    def __enter__(self) -> "Presence":
        self._incarnation = self._members.join(self._name, role="consumer", pool=self._pool, info=self._info)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        self._thread.join(timeout=self._seconds + 1.0)  # a daemon thread: a server that is gone does not hold us up
        if isinstance(error, (Fenced, BufferUnavailable)):
            return
        if error is None:
            self._members.leave(self._name, self._incarnation)
        else:
            # Not "leave": people should find the reason where the member was.
            self._info["last_error"] = str(error)
            self._members.report(self._name, self._incarnation, self._info)

    def check(self) -> None:
        """Raise Fenced when another process has the name."""
        if self._fenced is not None:
            raise self._fenced

    def serving(self, version: int) -> None:
        """Show the version of the weights."""
        self._members.set_state(self._name, self._incarnation, "serving", version=version)

    def draining(self) -> None:
        """Show that the consumer is about to leave."""
        self._members.set_state(self._name, self._incarnation, "draining")

    def _keep_up(self) -> None:
        while not self._leaving.wait(self._seconds):
            try:
                self._members.report(self._name, self._incarnation, self._info)
            except Fenced as error:
                self._fenced = error
                return
            except BufferUnavailable:
                continue  # the main thread meets the same server and says so
