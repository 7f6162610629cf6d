"""The controller's process listens on the port it was given or does not start, and ends within seconds when asked to.

``python -m deploy.controller.service --settings FILE``. While Redis is away it goes on and says so (503).
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import structlog
import uvicorn

from buffer.client import connect
from buffer.errors import BufferUnavailable, Fenced, ForebayError
from buffer.logs import log_to
from buffer.members import Members
from buffer.settings import read_settings
from deploy.controller.app import MEMBER, make_app
from deploy.controller.auth import refuse_exposure
from deploy.controller.settings import ControllerProcessSettings
from deploy.run_folder import controller_token, redis_password

REDIS_SECONDS = 1.5  # a person waits for the answer, and the end may have to wait for the longest call
END_SECONDS = 1  # for requests that are under way at the end

log = structlog.get_logger()


class Presence:
    """The controller's place among the members, kept up by a thread."""

    def __init__(self, members: Members, seconds: float) -> None:
        self._members, self._seconds = members, seconds
        self._info = {"pid": str(os.getpid()), "host": socket.gethostname()}
        self._leaving = threading.Event()
        self._reachable = True
        self.fenced: Fenced | None = None

    def run(self, server: uvicorn.Server) -> threading.Thread:
        """Join, and report until `leave`; a newer controller of this run ends the server."""
        incarnation = self._members.join(MEMBER, role="controller", pool="controller", info=self._info)
        self._members.set_state(MEMBER, incarnation, "serving")
        thread = threading.Thread(target=self._keep_up, args=(incarnation, server), name="presence", daemon=True)
        thread.start()
        return thread

    def leave(self) -> None:
        """Report no more."""
        self._leaving.set()

    def _keep_up(self, incarnation: int, server: uvicorn.Server) -> None:
        while not self._leaving.wait(self._seconds):
            try:
                self._members.report(MEMBER, incarnation, self._info)
                self._reachable = True
            except Fenced as error:
                self.fenced = error
                server.should_exit = True
                return
            except BufferUnavailable as error:
                if self._reachable:
                    log.warning("Redis does not answer", error=str(error))
                self._reachable = False
        if self._reachable:
            with contextlib.suppress(BufferUnavailable):
                self._members.leave(MEMBER, incarnation)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that the port is ours from here on; raises ForebayError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> ForebayError:
    return ForebayError(
        f"the controller cannot listen on port {port}: {error.strerror}",
        where=f"{host}:{port}",
        cure="stop what listens there, or give another `controller.port` (none: a free one is taken)",
    )


def serve(settings: ControllerProcessSettings) -> None:
    """Serve until told to stop."""
    folder = Path(settings.folder)
    token = controller_token(folder, settings.token_env)
    refuse_exposure(settings.host, token, settings.token_env)
    listener = listen(settings.host, settings.port)
    client = connect(
        settings.redis_url,
        password=redis_password(folder, settings.buffer),
        tls_ca_file=settings.buffer.tls_ca_file,
        timeout_seconds=REDIS_SECONDS,
    )
    beat = settings.buffer.heartbeat_seconds
    app = make_app(client, run=settings.run, steps=settings.steps, heartbeat_seconds=beat, token=token.strip())
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=END_SECONDS
        )
    )
    presence = Presence(Members(client, settings.run, heartbeat_seconds=beat), beat)
    thread = presence.run(server)
    log.info("listening", host=settings.host, port=settings.port)
    try:
        server.run(sockets=[listener])
    finally:
        presence.leave()
        thread.join(REDIS_SECONDS)
    if presence.fenced is not None:
        raise presence.fenced


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.controller.service", description="Run the controller.")
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE", help="the controller's settings (JSON)")
    options = parser.parse_args(arguments)
    # uvicorn raises the signals that ended it once more when it is done; then they must not kill.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        settings = read_settings(ControllerProcessSettings, options.settings)
        log_to(Path(settings.folder) / "logs" / "controller.log", packages=("",))
    except ForebayError as error:  # before there is a log
        print(f"controller: {error}", file=sys.stderr)
        return error.exit_code
    try:
        serve(settings)
    except ForebayError as error:
        log.error("ended by an error", error=str(error), exit_code=error.exit_code)
        print(f"controller: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # the last stop: people get a sentence, the log gets the rest
        log.exception("ended by an unexpected error")
        print(
            f"controller: unexpected {type(error).__name__}: {error}\n  cure: see logs/controller.log", file=sys.stderr
        )
        return 1
    log.info("ended")
    return 0


if __name__ == "__main__":
    code = main()
    # A request's thread may still wait for a Redis that does not answer: end without it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
