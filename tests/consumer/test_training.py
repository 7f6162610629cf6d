"""The trainer's losses, gradients and refusals, through ColossalAI's Booster."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from buffer.errors import TrainingFailed
from buffer.records import Group, Sampling
from consumer.training import Trainer, learning_rate_factor
from tests.consumer.material import gradients, make_groups, make_settings

pytestmark = [pytest.mark.consumer_env, pytest.mark.usefixtures("one_rank")]

ROOT = Path(__file__).resolve().parents[2]


def reference_loss(
    model: torch.nn.Module,
    groups: list[Group],
    *,
    aggregation: str,
    beta: float,
    initial: torch.nn.Module,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 2.0,
) -> torch.Tensor:
    """GRPO, sample by sample, in plain PyTorch; written from the paper, not from Forebay's code."""

    def log_probs(of: torch.nn.Module, ids: torch.Tensor, start: int, temperature: float) -> torch.Tensor:
        logits = of(input_ids=ids[None]).logits[0, start - 1 : -1] / temperature
        return torch.log_softmax(logits, dim=-1).gather(1, ids[start:, None])[:, 0]

    sequences = []
    for group in groups:
        rewards = torch.tensor([s.reward for s in group.samples], dtype=torch.float64)
        spread = rewards.std()
        for sample in group.samples:
            advantage = 0.0 if spread == 0 else float((sample.reward - rewards.mean()) / (spread + 1e-6))
            ids = torch.from_numpy(np.concatenate([group.prompt_tokens(), sample.tokens()]).astype(np.int64))
            start, temperature = len(group.prompt_tokens()), group.sampling.temperature
            now = log_probs(model, ids, start, temperature)
            old = torch.from_numpy(sample.behaviour_log_probs().copy())
            importance = torch.exp(now.detach() - old).clamp(max=cap)
            ratio = torch.exp(now - now.detach())
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            loss = -importance * gain
            if beta:
                with torch.no_grad():
                    other = log_probs(initial, ids, start, temperature)
                loss = loss + beta * (torch.exp(other - now) - (other - now) - 1)
            sequences.append(loss)
    if aggregation == "token_mean":
        return torch.cat(sequences).sum() / sum(len(s) for s in sequences)
    return torch.stack([s.mean() for s in sequences]).mean()


@pytest.mark.parametrize("bound", [24, 400])
@pytest.mark.parametrize(
    ("aggregation", "beta", "temperature"),
    [("token_mean", 0.0, 1.0), ("token_mean", 0.1, 0.7), ("sequence_mean", 0.1, 1.3)],
)
def test_loss_and_gradients_match_plain_pytorch_for_any_split_over_micro_batches(
    tiny_model: Path, tmp_path: Path, bound: int, aggregation: str, beta: float, temperature: float
) -> None:
    sampling = Sampling(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, max_tokens=16)
    groups = make_groups(3, sampling=sampling)
    settings = make_settings(
        tiny_model,
        tmp_path,
        algorithm={"aggregation": aggregation, "kl_coefficient": beta},
        trainer={"micro_batch_tokens": bound},
        optimizer={"clip_norm": 1e9},
    )
    trainer = Trainer(settings)
    perturb(trainer.policy())  # so that the reference differs and its gradient is not zero
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, torch_dtype=torch.float32).eval()
    initial = AutoModelForCausalLM.from_pretrained(tiny_model, torch_dtype=torch.float32).eval()
    perturb(plain)
    expected = reference_loss(plain, groups, aggregation=aggregation, beta=beta, initial=initial)
    expected.backward()
    expected = expected.detach()

    found: dict[str, torch.Tensor] = {}
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (found.update(gradients(trainer.policy())), step())[1]
    values = trainer.train(1, groups, planned_version=0, newest=0)

    assert values["loss"] == pytest.approx(float(expected), abs=1e-6)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def perturb(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def test_the_clip_bounds_the_second_update_of_a_step(tiny_model: Path, tmp_path: Path) -> None:
    settings = make_settings(
        tiny_model, tmp_path, algorithm={"updates_per_step": 3, "clip_low": 0.01, "clip_high": 0.01}
    )
    values = Trainer(settings).train(1, make_groups(3), planned_version=0, newest=0)
    assert values["policy/clip_fraction"] > 0
    once = make_settings(tiny_model, tmp_path, algorithm={"clip_low": 0.01, "clip_high": 0.01})
    assert Trainer(once).train(1, make_groups(3), planned_version=0, newest=0)["policy/clip_fraction"] == 0


def test_a_step_moves_probability_towards_rewarded_answers(tiny_model: Path, tmp_path: Path) -> None:
    trainer = Trainer(make_settings(tiny_model, tmp_path, optimizer={"learning_rate": 3e-3}))
    groups = make_groups(2)
    first = trainer.train(1, groups, planned_version=0, newest=0)
    for step in range(2, 8):
        last = trainer.train(step, groups, planned_version=0, newest=0)
    assert last["loss"] < first["loss"] - 0.05


def test_a_model_with_nan_fails_the_step_and_changes_no_weight(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    trainer = Trainer(make_settings(broken, tmp_path))
    before = {name: tensor.clone() for name, tensor in trainer.named_tensors()}
    with pytest.raises(TrainingFailed, match="step 1 .*model.layers.1.mlp.up_proj.weight is not finite"):
        trainer.train(1, make_groups(3), planned_version=0, newest=0)
    for name, tensor in trainer.named_tensors():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


def test_an_update_that_breaks_a_weight_fails_the_step(tiny_model: Path, tmp_path: Path) -> None:
    trainer = Trainer(make_settings(tiny_model, tmp_path, optimizer={"learning_rate": 1e37, "weight_decay": 1e38}))
    with pytest.raises(TrainingFailed, match="is not finite after the update of step 1"):
        trainer.train(1, make_groups(3), planned_version=0, newest=0)


def test_what_is_measured_names_lengths_staleness_and_mismatch(tiny_model: Path, tmp_path: Path) -> None:
    groups = make_groups(2, version=3) + make_groups(1, version=2, first=2)
    values = Trainer(make_settings(tiny_model, tmp_path)).train(5, groups, planned_version=4, newest=3)
    assert (values["staleness/mean"], values["staleness/max"]) == (pytest.approx(4 / 3), 2)
    assert values["groups/task/default"] == values["groups/pool/producer"] == 3
    assert 0 < values["mismatch/mean_abs"] <= values["mismatch/max"] <= values["mismatch/all_max"]
    assert values["response/length_max"] == max(len(s.tokens()) for g in groups for s in g.samples)
    assert all(math.isfinite(value) for value in values.values())


def test_warm_up_rises_to_the_peak_and_schedules_end_at_zero_after_the_last_step(tiny_model: Path) -> None:
    options = make_settings(tiny_model, Path(), optimizer={"warmup_steps": 3, "schedule": "linear"}).settings.optimizer
    factors = [learning_rate_factor(options, 10, step) for step in range(1, 12)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors == sorted(factors[:3]) + sorted(factors[3:], reverse=True)
    assert factors[-1] == 0
    cosine = options.model_copy(update={"schedule": "cosine"})
    assert learning_rate_factor(cosine, 10, 11) == pytest.approx(0)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [3, 1])
def test_two_ranks_train_as_one_does_also_when_one_of_them_has_no_samples(
    tiny_model: Path, tmp_path: Path, groups: int
) -> None:
    size = 4 if groups > 1 else 1
    script = Path(__file__).with_name("train_on_ranks.py")
    job = {"model": str(tiny_model), "folder": str(tmp_path), "groups": groups, "size": size}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), json.dumps(job)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "result.json").read_text())

    trainer = Trainer(make_settings(tiny_model, tmp_path, trainer={"micro_batch_tokens": 64}))
    for step in (1, 2):
        values = trainer.train(step, make_groups(groups, size=size, seed=step), planned_version=0, newest=0)
        for key in ("loss", "grad_norm", "policy/entropy", "mismatch/mean_abs"):
            assert two[step - 1][key] == pytest.approx(values[key], abs=1e-5), key
    weights = load_file(tmp_path / "weights.safetensors")
    for name, tensor in trainer.named_tensors():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=0, msg=name)
