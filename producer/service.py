"""A producer's process ends with 0 when it was told to stop (SIGTERM, SIGINT or the flag `stop`), else with its error's
exit code: the error is on stderr, the whole story in ``logs/<member>.log`` of the run folder.

``python -m producer.service --settings FILE`` runs one replica.
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import redis
import structlog

from buffer.errors import ForebayError
from buffer.logs import log_to
from buffer.settings import read_settings
from producer.engine.base import Engine
from producer.replica import MakeEngine, MakeWeights, Replica, WeightSource
from producer.settings import ProducerSettings

log = structlog.get_logger()


def real_engine(settings: ProducerSettings) -> Engine:
    """The engine that the pool names."""
    folder = Path(settings.folder)
    if settings.settings.engine.kind == "transformers":
        from producer.engine.transformers import TransformersEngine

        return TransformersEngine(settings.model, settings.settings, folder)
    from producer.engine.vllm import VllmEngine

    return VllmEngine(settings.model, settings.settings, folder)


def real_weights(client: "redis.Redis", settings: ProducerSettings, incarnation: int) -> WeightSource:
    """weight_sync's receiver and proofs."""
    from producer.weights import ReceivedWeights

    return ReceivedWeights(client, settings, incarnation)


async def serve(
    settings: ProducerSettings, *, make_engine: MakeEngine = real_engine, make_weights: MakeWeights = real_weights
) -> None:
    """Run one producer until it is told to stop."""
    replica = Replica(settings, make_engine, make_weights)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, replica.drain, signal.Signals(number).name)
    await replica.run()


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m producer.service", description="Run one producer.")
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE", help="the producer's settings (JSON)")
    options = parser.parse_args(arguments)
    try:
        settings = read_settings(ProducerSettings, options.settings)
        log_to(Path(settings.folder) / "logs" / f"{settings.member}.log")
    except ForebayError as error:  # before there is a log
        print(f"producer: {error}", file=sys.stderr)
        return error.exit_code
    try:
        structlog.contextvars.bind_contextvars(member=settings.member, run=settings.run)
        asyncio.run(serve(settings))
    except ForebayError as error:
        log.error("ended by an error", error=str(error), exit_code=error.exit_code)
        print(f"producer: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # the last stop: people get a sentence, the log gets the rest
        log.exception("ended by an unexpected error")
        print(f"producer: unexpected {type(error).__name__}: {error}\n  cure: see the producer's log", file=sys.stderr)
        return 1
    log.info("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
