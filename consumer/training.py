"""A step either changes every rank's weights in the same way or raises and changes none.

The policy is trained by ColossalAI's Booster. The loss of an optimizer update is one weighted sum over the tokens of
all ranks; gradients meet once per update, in each rank's last micro-batch, and the numbers that decide whether the
update is made are the same on all ranks. A step that does not come out finite raises TrainingFailed before the update;
one whose update breaks a weight raises it before anything is journalled.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from buffer.errors import TrainingFailed
from buffer.records import Group
from consumer.accelerator import current_device
from consumer.algorithms.grpo import token_losses
from consumer.batching import (
    MicroBatch,
    TrainingSample,
    deal,
    empty_micro_batch,
    micro_batches,
    split_updates,
    training_samples,
)
from consumer.model import load_model, score_tokens
from consumer.settings import ConsumerSettings, OptimizerSettings

# Sums over tokens, one all-reduce per update.
SUMS = (
    "loss",
    "tokens",
    "inside",
    "entropy",
    "clipped",
    "importance",
    "capped",
    "reference_kl",
    "behaviour_kl",
    "mismatch",
    "newest_tokens",
    "newest_mismatch",
)
LARGEST = ("mismatch", "newest_mismatch")


def _oldest_versions(batch: MicroBatch) -> torch.Tensor:
    """For each token the oldest version of its sample: one sampled after an in-flight update still saw a cache of
    before, so only samples of one version show the mismatch of the kernels alone."""
    rows = batch.versions.split(list(batch.lengths))
    return torch.cat([row.min().expand(len(row)) if len(row) else row for row in rows])


@dataclass
class Tally:
    """What a rank has seen of a step."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LARGEST, 0.0))

    def over_all_ranks(self, device: torch.device) -> "Tally":
        """The same over all ranks."""
        sums = torch.tensor([self.sums[k] for k in SUMS], dtype=torch.float64).to(device)
        largest = torch.tensor([self.largest[k] for k in LARGEST], dtype=torch.float64).to(device)
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return Tally(
            dict(zip(SUMS, sums.tolist(), strict=True)),
            dict(zip(LARGEST, largest.tolist(), strict=True)),
        )


def learning_rate_factor(settings: OptimizerSettings, steps: int, step: int) -> float:
    """Share of the peak learning rate at ``step`` (from 1): warm-up, then the schedule, which is 0 after the last."""
    done, warmup = step - 1, settings.warmup_steps
    if done < warmup:
        return step / (warmup + 1)
    if settings.schedule == "constant":
        return 1.0
    share = min(1.0, (done - warmup) / max(1, steps - warmup))
    return 1.0 - share if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


def set_threads(asked: int | None) -> None:
    """CPU threads of this rank; by default half of the cores, shared among the ranks of the machine."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(asked or max(1, cores // 2 // ranks_here))


class Trainer:
    """The policy, its optimizer and schedule, boosted; and the reference policy if the loss needs one."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self.settings = settings
        self.device = current_device()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        options = settings.settings.optimizer
        model = load_model(settings.model_path)
        pad = getattr(model.config, "pad_token_id", None)
        self.pad_id = pad if isinstance(pad, int) else 0
        self.reference: nn.Module | None = None
        if settings.algorithm.kl_coefficient > 0:
            self.reference = load_model(settings.model_path).requires_grad_(False).to(self.device)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.epsilon,
            weight_decay=options.weight_decay,
        )
        scheduler = LambdaLR(optimizer, lambda done: learning_rate_factor(options, settings.steps, done + 1))
        # Buffers are constants of the model. Broadcasting them at each forward pass would also hang ranks whose
        # numbers of micro-batches differ.
        self.booster = Booster(plugin=TorchDDPPlugin(broadcast_buffers=False))
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(model, optimizer, lr_scheduler=scheduler)

    def policy(self) -> nn.Module:
        """The model under the wrappers."""
        return self.model.unwrap()

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under Hugging Face names; a tied head appears once, as the embedding."""
        for name, parameter in self.policy().named_parameters():
            yield name, parameter.detach()

    def restore_schedule(self, done: int) -> None:
        """Go on with the schedule after ``done`` steps, with the learning rate that the settings give now."""
        options = self.settings.settings.optimizer
        self.scheduler.last_epoch = done
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * learning_rate_factor(options, self.settings.steps, done + 1)

    def train(self, step: int, groups: Sequence[Group], *, planned_version: int, newest: int) -> dict[str, float]:
        """Make the updates of one step. ``planned_version``: newest published version at the plan, from which staleness
        counts; ``newest``: the version of the trainer's weights, whose tokens show the mismatch with the engine."""
        started = time.monotonic()
        algorithm = self.settings.algorithm
        updates: list[list[TrainingSample]] = []
        for part in split_updates(groups, algorithm.updates_per_step):
            updates.append(training_samples(part, algorithm, sum(map(len, updates))))
        batches = [self._batches(samples) for samples in updates]
        proximal = self._log_probs_by_sample(batches) if len(updates) > 1 else {}
        tally = Tally()
        losses, norms = [], []
        rate = self.optimizer.param_groups[0]["lr"]
        forward_backward, stepping = 0.0, 0.0
        for update in batches:
            before = time.monotonic()
            loss_before = tally.sums["loss"]
            norm = self._accumulate(update, proximal, newest, tally)
            loss = self._agree_on_loss(tally.sums["loss"] - loss_before)
            after = time.monotonic()
            self._refuse_non_finite(step, loss, norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.refuse_broken_weights(f"after the update of step {step}")
            losses.append(loss)
            norms.append(norm)
            forward_backward += after - before
            stepping += time.monotonic() - after
        self.scheduler.step()
        values = describe_groups(groups, planned_version)
        values |= _describe_tokens(tally.over_all_ranks(self.device), has_reference=self.reference is not None)
        seconds = time.monotonic() - started
        tokens = sum(len(sample.tokens) for samples in updates for sample in samples)
        values |= {
            "loss": sum(losses) / len(losses),
            "grad_norm": max(norms),
            "learning_rate": rate,
            "time/forward_backward": forward_backward,
            "time/step": stepping,
            "tokens": float(tokens),
            "tokens_per_second": tokens / max(seconds, 1e-9),
        }
        return values

    def _batches(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        mine = deal(samples, self.world)[self.rank]
        batches = micro_batches(mine, self.settings.settings.micro_batch_tokens, self.pad_id)
        return [batch.to(self.device) for batch in batches or [empty_micro_batch()]]

    def _log_probs_by_sample(self, updates: Sequence[Sequence[MicroBatch]]) -> dict[int, torch.Tensor]:
        """Log-probs at the start of the step, by sample."""
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for batch in (batch for batches in updates for batch in batches):
                scores = score_tokens(self.policy(), batch)
                found.update(zip(batch.indices, torch.split(scores.log_probs, list(batch.lengths)), strict=True))
        return found

    def _accumulate(
        self, batches: Sequence[MicroBatch], proximal: dict[int, torch.Tensor], newest: int, tally: Tally
    ) -> float:
        """Forward and backward over a rank's micro-batches; norm of the gradient over all ranks, before clipping."""
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with nullcontext() if last else self.booster.no_sync(self.model, self.optimizer):
                loss = self._loss(batch, proximal, newest, tally)
                # DDP averages gradients over ranks; the weights already make the loss a sum over them.
                self.booster.backward(loss * self.world, self.optimizer)
        return float(self.optimizer.clip_grad_by_norm(self.settings.settings.optimizer.clip_norm))

    def _loss(self, batch: MicroBatch, proximal: dict[int, torch.Tensor], newest: int, tally: Tally) -> torch.Tensor:
        scores = score_tokens(self.model, batch)
        # Tokens outside the filter are made equal everywhere: weight 0 does not silence an overflow of exp.
        log_probs = scores.log_probs.where(scores.inside, 0.0)
        behaviour = batch.behaviour.where(scores.inside, 0.0)
        # With one update per step the policy at the step's start is the current one: no forward pass of its own.
        start = log_probs.detach()
        if proximal and batch.indices != (-1,):
            start = torch.cat([proximal[i] for i in batch.indices]).where(scores.inside, 0.0)
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference = score_tokens(self.reference, batch).log_probs.where(scores.inside, 0.0)
        terms = token_losses(
            log_probs,
            proximal=start,
            behaviour=behaviour,
            advantages=batch.advantages,
            reference=reference,
            settings=self.settings.algorithm,
        )
        weights = batch.weights * scores.inside
        loss = (weights * terms.loss).sum()
        if batch.indices != (-1,):
            with torch.no_grad():
                inside = scores.inside.double()
                difference = (log_probs.detach() - behaviour).double()
                mismatch = (start - behaviour).abs().double() * inside
                of_newest = inside * (_oldest_versions(batch) == newest)
                for name, value in {
                    "loss": loss,
                    "tokens": torch.tensor(float(len(inside))),
                    "inside": inside.sum(),
                    "entropy": scores.entropy.double().sum(),
                    "clipped": (inside * terms.clipped).sum(),
                    "importance": (inside * terms.importance).sum(),
                    "capped": (inside * terms.capped).sum(),
                    "behaviour_kl": (inside * (torch.exp(difference) - difference - 1.0)).sum(),
                    "reference_kl": (inside * terms.reference_kl).sum() if terms.reference_kl is not None else 0.0,
                    "mismatch": mismatch.sum(),
                    "newest_tokens": of_newest.sum(),
                    "newest_mismatch": (mismatch * of_newest).sum(),
                }.items():
                    tally.sums[name] += float(value)
                tally.largest["mismatch"] = max(tally.largest["mismatch"], float(mismatch.max()))
                tally.largest["newest_mismatch"] = max(
                    tally.largest["newest_mismatch"], float((mismatch * of_newest).max())
                )
        return loss

    def _agree_on_loss(self, mine: float) -> float:
        total = torch.tensor([mine], dtype=torch.float64).to(self.device)
        dist.all_reduce(total)
        return float(total)

    def refuse_broken_weights(self, when: str) -> None:
        """Raise TrainingFailed when a weight is not finite; all ranks have the same weights."""
        norms = torch.stack(torch._foreach_norm([tensor for _, tensor in self.named_tensors()]))
        if torch.isfinite(norms).all():
            return
        raise TrainingFailed(
            f"the weight {self._broken_weight()} is not finite {when}",
            where=self.settings.model_path,
            cure="the last checkpoint is untouched: resume from it with a lower learning rate; if the initial model is "
            "broken, export it again",
        )

    def _broken_weight(self) -> str | None:
        return next((name for name, tensor in self.named_tensors() if not torch.isfinite(tensor).all()), None)

    def _refuse_non_finite(self, step: int, loss: float, norm: float) -> None:
        """Every rank sees the same loss and norm, so every rank raises or none does."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        broken = self._broken_weight()
        self.optimizer.zero_grad()
        cause = (
            f"the weight {broken} is not finite"
            if broken
            else f"the loss is {loss}"
            if not math.isfinite(loss)
            else f"the norm of the gradient is {norm}"
        )
        raise TrainingFailed(
            f"step {step} does not come out finite: {cause}; no update was made",
            where=self.settings.model_path if broken else f"step {step}",
            cure="the last checkpoint is untouched: resume from it with a lower learning rate or clip_norm"
            if not broken or step > 1
            else "the initial model is broken: export it again",
        )


def describe_groups(groups: Sequence[Group], planned_version: int) -> dict[str, float]:
    """Rewards, lengths, staleness and origin of a step's groups; the same on all ranks, as all of them read all."""
    samples = [sample for group in groups for sample in group.trained_samples()]
    values: dict[str, float] = {
        "groups": float(len(groups)),
        "samples": float(len(samples)),
        "samples_not_scored": float(sum(len(group.samples) for group in groups) - len(samples)),
    }
    if samples:
        lengths = np.array([len(sample.tokens()) for sample in samples])
        values |= {
            "reward/mean": float(np.mean([sample.reward for sample in samples])),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": float(lengths.max()),
            "response/truncated": float(np.mean([sample.finish_reason == "length" for sample in samples])),
        }
        for part in sorted({name for sample in samples for name in sample.reward_parts}):
            values[f"reward/{part}"] = float(np.mean([s.reward_parts[part] for s in samples if part in s.reward_parts]))
    staleness = [planned_version - group.oldest_version() for group in groups if group.oldest_version() >= 0]
    if staleness:
        values |= {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(max(staleness))}
    values |= {f"groups/task/{task}": float(n) for task, n in Counter(g.task for g in groups).items()}
    values |= {f"groups/pool/{pool}": float(n) for pool, n in Counter(g.pool for g in groups).items()}
    return values


def _describe_tokens(tally: Tally, *, has_reference: bool) -> dict[str, float]:
    """Means over the tokens of a step; a mean over no tokens is left out. ``policy/kl`` is the k3 estimate to the
    behaviour policy, ``policy/kl_reference`` that to the reference policy."""
    sums, tokens, inside = tally.sums, tally.sums["tokens"], tally.sums["inside"]
    values: dict[str, float] = {"response/tokens": tokens}
    if tokens:
        values |= {"policy/entropy": sums["entropy"] / tokens, "policy/outside_share": 1.0 - inside / tokens}
    if inside:
        values |= {
            "policy/kl": sums["behaviour_kl"] / inside,
            "policy/clip_fraction": sums["clipped"] / inside,
            "importance/mean": sums["importance"] / inside,
            "importance/capped": sums["capped"] / inside,
            "mismatch/all_mean_abs": sums["mismatch"] / inside,
            "mismatch/all_max": tally.largest["mismatch"],
        }
        if has_reference:
            values["policy/kl_reference"] = sums["reference_kl"] / inside
    if sums["newest_tokens"]:
        values |= {
            "mismatch/mean_abs": sums["newest_mismatch"] / sums["newest_tokens"],
            "mismatch/max": tally.largest["newest_mismatch"],
        }
    return values
