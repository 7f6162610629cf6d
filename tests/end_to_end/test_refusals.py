"""What only a service can find wrong ends the run with the service's own words and exit code, and leaves no process."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.conftest import (
    CONSUMER_PYTHON,
    ROOT,
    LiveRun,
    environment,
    no_process_remains,
    read_report,
    small_spec,
    write_tiny_model,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_reward_that_cannot_be_imported_ends_the_run_with_its_name(
    tmp_path: Path, start_run: Callable[..., LiveRun]
) -> None:
    model = write_tiny_model(tmp_path / "model", tied=True)
    run = start_run(small_spec(tmp_path, model, rewards=[{"name": "nowhere.rewards:score"}]))
    assert run.wait(200) == 2, run.output()
    assert "the reward `nowhere.rewards:score` cannot be imported" in run.output()
    assert read_report(run.folder)["status"] == "failed"
    no_process_remains(run.folder)


def test_a_model_with_nan_weights_ends_the_run_before_anything_is_trained(
    tmp_path: Path, start_run: Callable[..., LiveRun]
) -> None:
    model = write_tiny_model(tmp_path / "model", tied=True)
    code = (
        "import sys, torch; from safetensors.torch import load_file, save_file;"
        "path = sys.argv[1] + '/model.safetensors'; weights = load_file(path);"
        "weights['model.norm.weight'][0] = float('nan'); save_file(weights, path, {'format': 'pt'})"
    )
    subprocess.run([str(CONSUMER_PYTHON), "-c", code, str(model)], cwd=ROOT, env=environment(), check=True, timeout=120)
    run = start_run(small_spec(tmp_path, model))
    assert run.wait(200) == 8, run.output()
    assert "the weight model.norm.weight is not finite" in run.output(), run.output()
    report = read_report(run.folder)
    assert (report["status"], report["steps"]) == ("failed", 0)
    no_process_remains(run.folder)


def test_a_key_of_the_model_that_the_trainer_would_ignore_is_refused(
    tmp_path: Path, start_run: Callable[..., LiveRun]
) -> None:
    model = write_tiny_model(tmp_path / "model", tied=True)
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "logit_cap_of_tomorrow": 30.0}))
    run = start_run(small_spec(tmp_path, model))
    assert run.wait(200) == 2, run.output()
    assert "does not know 'logit_cap_of_tomorrow'" in run.output(), run.output()
    no_process_remains(run.folder)
