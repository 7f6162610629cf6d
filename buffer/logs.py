"""A service's log is a file of JSON lines in the run folder, each on disk as soon as any package has said it."""

import logging
from pathlib import Path
from typing import Any

import structlog

from buffer.errors import ForebayError


def log_to(path: Path, *, packages: tuple[str, ...] = ("forebay",)) -> None:
    """Send every line of this process to ``path``; ``packages``: standard loggers whose lines belong there too, from
    the level INFO on (an empty name stands for all)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise ForebayError(
            f"the log cannot be written: {error.strerror}",
            where=str(path),
            cure="give the run a folder that can be written",
        ) from error
    first: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    render = structlog.processors.JSONRenderer()
    structlog.configure(processors=[*first, render], logger_factory=structlog.WriteLoggerFactory(file=file))
    handler = logging.StreamHandler(file)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=first, processor=render))
    for name in packages:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
