"""What all ranks must do alike is decided on rank 0 and reaches every rank before any of them acts.

Decisions travel over a gloo group of their own on every platform: a few numbers in host memory need no accelerator.
While rank 0 waits for groups it says so about once a second, so no rank waits in silence.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist

from buffer.errors import DeadlineExceeded

Kind = Literal["wait", "train", "leave", "failed"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Decision:
    """The next thing that every rank does."""

    kind: Kind
    step: int = 0
    last: bool = False  # leave after this step
    checkpoint: bool = False  # write a checkpoint after this step
    exit_code: int = 0  # of a failure


class Agreement:
    """The ranks of the consumer, in step."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: the longest that one rank may be behind another, for instance in training a step."""
        self.rank = dist.get_rank()
        self._seconds = seconds
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))

    def decide(self, decision: Decision | None) -> Decision:
        """Rank 0's decision, on every rank; the others pass None."""
        numbers = None
        if decision is not None:
            flags = [int(decision.last), int(decision.checkpoint)]
            numbers = [KINDS.index(decision.kind), decision.step, *flags, decision.exit_code]
        kind, step, last, checkpoint, code = self.share(numbers, 5)
        return Decision(KINDS[kind], step, bool(last), bool(checkpoint), code)

    def share(self, numbers: list[int] | None, count: int) -> list[int]:
        """Rank 0's ``count`` numbers, on every rank; the others pass None."""
        field = torch.tensor(numbers if numbers is not None else [0] * count, dtype=torch.int64)
        try:
            dist.broadcast(field, src=0, group=self._group)
        except RuntimeError as error:
            raise self._lost("word from rank 0", error) from error
        return [int(number) for number in field.tolist()]

    def any_failed(self, failed: bool) -> bool:
        """Whether any rank failed at what all of them just did."""
        flag = torch.tensor([int(failed)])
        try:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise self._lost("the outcome on the other ranks", error) from error
        return bool(flag.item())

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor of equal shape and type, in host memory, in order of rank."""
        gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        try:
            dist.all_gather(gathered, values, group=self._group)
        except RuntimeError as error:
            raise self._lost("the state of the other ranks", error) from error
        return gathered

    def _lost(self, what: str, error: RuntimeError) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"rank {self.rank} waited up to {self._seconds:g} s for {what}: {str(error).splitlines()[0]}",
            where="the ranks of the consumer",
            cure="look at the log of the rank that ended; start again with --resume",
        )
