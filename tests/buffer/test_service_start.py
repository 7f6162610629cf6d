"""What every service does at its start: it reads its settings and opens its log, or says in a sentence why not."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from buffer.errors import ForebayError, SpecError
from buffer.logs import log_to
from buffer.settings import BufferSettings, read_settings


@pytest.fixture
def restored_logging() -> Iterator[None]:
    package = logging.getLogger("forebay")
    handlers, level = list(package.handlers), package.level
    yield
    structlog.reset_defaults()
    package.handlers, package.level = handlers, level


@pytest.mark.usefixtures("restored_logging")
def test_each_line_is_json_whoever_says_it_and_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "one.log"
    log_to(path)
    structlog.get_logger(rank=1).info("step", step=3)
    logging.getLogger("forebay.weight_sync").info("epoch %d", 2)
    try:
        raise ValueError("a cause")
    except ValueError:
        structlog.get_logger().exception("ended")
    own, package, error = (json.loads(line) for line in path.read_text().splitlines())
    assert (own["event"], own["step"], own["rank"], own["level"]) == ("step", 3, 1, "info")
    assert (package["event"], package["level"]) == ("epoch 2", "info")
    assert "ValueError: a cause" in error["exception"]
    assert all(line["timestamp"].endswith("Z") for line in (own, package, error))


@pytest.mark.usefixtures("restored_logging")
def test_a_log_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file, not a folder")
    with pytest.raises(ForebayError, match="the log cannot be written") as caught:
        log_to(tmp_path / "logs" / "one.log")
    assert caught.value.where == str(tmp_path / "logs" / "one.log")


def test_settings_are_read_whole_or_every_problem_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"budget_bytes": 5}))
    assert read_settings(BufferSettings, file).budget_bytes == 5
    file.write_text(json.dumps({"budget_bytes": 0, "budget": 1}))
    with pytest.raises(SpecError, match="(?s)malformed: budget_bytes: .*; budget: ") as caught:
        read_settings(BufferSettings, file)
    assert caught.value.where == str(file)
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_settings(BufferSettings, tmp_path / "absent.json")
