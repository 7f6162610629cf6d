"""Checkpoints: going on bit-equal, torn ones, pruning, and what other tools read."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer.errors import TrainingFailed
from consumer import checkpoint
from consumer.agreement import Agreement
from consumer.training import Trainer
from tests.consumer.material import make_groups, make_settings

pytestmark = [pytest.mark.consumer_env, pytest.mark.usefixtures("one_rank")]


@pytest.fixture
def agreement(one_rank: None) -> Agreement:
    return Agreement(60)


def train(trainer: Trainer, steps: range) -> list[dict[str, float]]:
    return [trainer.train(step, make_groups(3, seed=step), planned_version=0, newest=0) for step in steps]


def state(step: int) -> checkpoint.State:
    return checkpoint.State(step=step, version=step, settings_digest="x", world_size=1)


def trainer_of(model: Path, folder: Path) -> Trainer:
    return Trainer(make_settings(model, folder, optimizer={"schedule": "cosine", "warmup_steps": 2}, steps=6))


def test_training_goes_on_bit_equal_after_a_checkpoint(tiny_model: Path, tmp_path: Path, agreement: Agreement) -> None:
    unbroken = trainer_of(tiny_model, tmp_path)
    train(unbroken, range(1, 4))
    path = checkpoint.save(unbroken, agreement, tmp_path / "checkpoints", state(3), keep=2)
    random = torch.rand(3)
    expected = train(unbroken, range(4, 7))

    resumed = trainer_of(tiny_model, tmp_path)
    assert checkpoint.load(resumed, path).step == 3
    assert torch.equal(torch.rand(3), random)
    for values, other in zip(expected, train(resumed, range(4, 7)), strict=True):
        timeless = {k: v for k, v in values.items() if not k.startswith("time/") and k != "tokens_per_second"}
        assert timeless == {k: other[k] for k in timeless}
    for (name, one), (_, two) in zip(unbroken.named_tensors(), resumed.named_tensors(), strict=True):
        assert torch.equal(one, two), name


def test_the_model_of_a_checkpoint_is_a_folder_that_transformers_loads(
    tiny_model: Path, tmp_path: Path, agreement: Agreement
) -> None:
    trainer = trainer_of(tiny_model, tmp_path)
    train(trainer, range(1, 2))
    path = checkpoint.save(trainer, agreement, tmp_path / "checkpoints", state(1), keep=2)
    loaded = dict(AutoModelForCausalLM.from_pretrained(path / "model").named_parameters())
    for name, tensor in trainer.named_tensors():
        assert torch.equal(loaded[name], tensor), name
    assert not [file for file in path.rglob("*") if file.suffix in (".bin", ".pt", ".pkl")]


def test_a_torn_checkpoint_is_skipped_and_reported(tiny_model: Path, tmp_path: Path, agreement: Agreement) -> None:
    trainer, folder = trainer_of(tiny_model, tmp_path), tmp_path / "checkpoints"
    for step in (1, 2, 3, 4):
        train(trainer, range(step, step + 1))
        checkpoint.save(trainer, agreement, folder, state(step), keep=4)
    with (folder / "step-00000004" / "optimizer.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\xff")
    (folder / "step-00000003" / "COMPLETE").unlink()
    (folder / "step-00000002" / "model" / "model.safetensors").unlink()
    reports: list[str] = []
    assert [step for step, _ in checkpoint.whole(folder, reports.append)] == [1]
    assert ["checksum differs" in reports[0], "COMPLETE is missing" in reports[1]] == [True, True]
    assert "model.safetensors is missing" in reports[2]


def test_old_checkpoints_and_parts_of_dead_ones_are_removed(
    tiny_model: Path, tmp_path: Path, agreement: Agreement
) -> None:
    trainer, folder = trainer_of(tiny_model, tmp_path), tmp_path / "checkpoints"
    (folder / ".part-step-00000009" / "model").mkdir(parents=True)
    for step in (1, 2, 3, 3):
        checkpoint.save(trainer, agreement, folder, state(step), keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_checkpoint_that_cannot_be_written_is_an_error_and_leaves_the_last_one(
    tiny_model: Path, tmp_path: Path, agreement: Agreement
) -> None:
    trainer, folder = trainer_of(tiny_model, tmp_path), tmp_path / "checkpoints"
    checkpoint.save(trainer, agreement, folder, state(1), keep=2)
    (folder / ".part-step-00000002").write_text("a file where a folder has to be")
    with pytest.raises(TrainingFailed, match="step 2 could not be written"):
        checkpoint.save(trainer, agreement, folder, state(2), keep=2)
    assert [step for step, _ in checkpoint.whole(folder, print)] == [1]


def test_a_checkpoint_of_another_model_is_refused(tiny_model: Path, tmp_path: Path, agreement: Agreement) -> None:
    from examples.arithmetic.model import write_model

    path = checkpoint.save(trainer_of(tiny_model, tmp_path), agreement, tmp_path / "checkpoints", state(1), keep=2)
    wider = trainer_of(write_model(tmp_path / "wider", tied=False, hidden=96, layers=2), tmp_path)
    with pytest.raises(TrainingFailed, match="of another model"):
        checkpoint.load(wider, path)
