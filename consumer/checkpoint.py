"""A checkpoint is whole, under its final name, with checksums that match; or it does not count.

    checkpoints/step-00000010/
        model/                  Hugging Face folder that the trainer, the engine and people's tools read alike
        optimizer.safetensors   AdamW's moments by parameter name
        random.safetensors      state of each rank's random generators
        state.json              step, version, digest of the settings, where the ledger stood
        COMPLETE                checksum of every other file

It is written under another name, synchronised to the disk and renamed. A write that fails on one rank fails on all
before any of them goes on. Nothing in it can run code.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from colossalai.accelerator import get_accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from buffer.errors import TrainingFailed
from consumer.agreement import Agreement
from consumer.training import Trainer
from weight_sync.model_folder import read_tensors, save_portable

COMPLETE = "COMPLETE"
PART = ".part-"  # prefix of one that is being written or removed


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What is not a tensor."""

    schema_version: int = 1
    step: int  # optimizer steps done
    version: int  # newest version handed to the publisher when it was written
    settings_digest: str
    world_size: int
    ledger: dict[str, Any] = {}  # the ledger's summary, for people


def checkpoints_folder(run_folder: str | Path) -> Path:
    """Where the checkpoints of a run are."""
    return Path(run_folder) / "checkpoints"


def finished(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of what has a final name, oldest first; its content is not verified."""
    found = [(int(path.name.removeprefix("step-")), path) for path in folder.glob("step-*") if path.is_dir()]
    return sorted(found)


def save(
    trainer: Trainer, agreement: Agreement, folder: Path, state: State, *, keep: int, tokenizer: Any = None
) -> Path:
    """Write a checkpoint and prune to ``keep``. Every rank calls it; when it cannot be written, every rank raises."""
    path = folder / f"step-{state.step:08d}"
    randomness = _gather_randomness(trainer, agreement)
    failure: OSError | SafetensorError | None = None
    if trainer.rank == 0:
        try:
            _write(trainer, path, state, randomness, tokenizer)
            for _, old in finished(folder)[:-keep]:
                _remove(old)
        except (OSError, SafetensorError) as error:
            failure = error
    if agreement.any_failed(failure is not None):
        raise TrainingFailed(
            f"the checkpoint of step {state.step} could not be written: {failure or 'see rank 0'}",
            where=str(path),
            cure="make room or mend the file system, then start again with --resume; the journal has the steps since "
            "the last whole checkpoint",
        ) from failure
    return path


def whole(folder: Path, report: Callable[[str], None]) -> Iterator[tuple[int, Path]]:
    """Verified checkpoints, newest first; each one that does not verify is reported and skipped."""
    for step, path in reversed(finished(folder)):
        problem = problem_of(path)
        if problem is None:
            yield step, path
        else:
            report(f"checkpoint {path.name} is not used: {problem}")


def problem_of(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        expected = msgspec.json.decode((path / COMPLETE).read_bytes(), type=dict[str, str])
        msgspec.json.decode((path / "state.json").read_bytes(), type=State)
        for name, checksum in expected.items():
            if _checksum(path / name) != checksum:
                return f"{name} is not what was written (checksum differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, msgspec.DecodeError) as error:
        return f"it cannot be read: {error}"
    return None


def load(trainer: Trainer, path: Path) -> State:
    """Put a verified checkpoint into the trainer, on every rank; it goes on as if it had never stopped."""
    state = msgspec.json.decode((path / "state.json").read_bytes(), type=State)
    parameters = dict(trainer.policy().named_parameters())
    seen = set()
    with torch.no_grad():
        for name, tensor in read_tensors(path / "model"):
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise _of_another_model(path, name)
            parameters[name].copy_(tensor)
            seen.add(name)
    if missing := sorted(parameters.keys() - seen):
        raise _of_another_model(path, missing[0])
    optimizer = trainer.optimizer.unwrap()
    moments = load_file(path / "optimizer.safetensors")
    for name, parameter in parameters.items():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            if f"{name}.{key}" in moments:
                device = "cpu" if key == "step" else parameter.device
                optimizer.state[parameter][key] = moments[f"{name}.{key}"].to(device)
    trainer.restore_schedule(state.step)
    random = load_file(path / "random.safetensors")
    if f"cpu.{trainer.rank}" in random:  # a rank that was not there has no state to go on with
        torch.set_rng_state(random[f"cpu.{trainer.rank}"])
        get_accelerator().set_rng_state(random[f"device.{trainer.rank}"])
    return state


def _of_another_model(path: Path, name: str) -> TrainingFailed:
    return TrainingFailed(
        f"the checkpoint is of another model: {name} does not fit",
        where=str(path),
        cure="resume with the model that the run began with, or start a new run folder",
    )


def _gather_randomness(trainer: Trainer, agreement: Agreement) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state(), "device": get_accelerator().get_rng_state().cpu()}
    gathered = {key: agreement.gather(state) for key, state in states.items()}
    return {f"{key}.{rank}": state for key, ranks in gathered.items() for rank, state in enumerate(ranks)}


def _write(trainer: Trainer, path: Path, state: State, randomness: dict[str, torch.Tensor], tokenizer: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(PART + "*"):  # of a process that died
        shutil.rmtree(left)
    part = path.parent / (PART + path.name)
    save_portable(trainer.policy(), tokenizer, part / "model")
    moments = {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, parameter in trainer.policy().named_parameters()
        for key, value in trainer.optimizer.unwrap().state.get(parameter, {}).items()
    }
    save_file(moments, part / "optimizer.safetensors")
    save_file(randomness, part / "random.safetensors")
    (part / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    files = sorted(file for file in part.rglob("*") if file.is_file())
    checksums = {str(file.relative_to(part)): _checksum(file) for file in files}
    (part / COMPLETE).write_bytes(msgspec.json.format(msgspec.json.encode(checksums)))
    for entry in (*files, part / COMPLETE, part / "model", part):
        _synchronise(entry)
    if path.exists():  # a step trained again after its checkpoint was found broken
        _remove(path)
    part.rename(path)
    _synchronise(path.parent)


def _remove(path: Path) -> None:
    """By another name first: half a checkpoint must not have a final name."""
    aside = path.with_name(PART + "old-" + path.name)
    path.rename(aside)
    shutil.rmtree(aside)


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
