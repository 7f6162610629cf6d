"""The numbers of a step have the same names in Redis, in TensorBoard and on the screen.

Written on rank 0. TensorBoard's x axis is the optimizer step, for evaluations the step that made the version.
"""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from buffer.metrics import Metrics

NOT_A_RESULT = ("version", "step")


class Report:
    """Where the numbers go."""

    def __init__(self, metrics: Metrics, folder: Path, *, first_step: int) -> None:
        # After a restore, events of steps that are trained again are shadowed.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        self._metrics = metrics
        self._evaluations: set[int] = set()

    def step(self, step: int, values: dict[str, float]) -> None:
        """Numbers of one step."""
        self._metrics.record_step(step, values)
        for name, value in values.items():
            self._writer.add_scalar(name if "/" in name else f"train/{name}", value, step)
        self.evaluations()
        self._writer.flush()

    def evaluations(self) -> None:
        """Results of evaluations that are new since the last call."""
        for result in self._metrics.evaluations():
            version = int(result["version"])
            if version not in self._evaluations:
                self._evaluations.add(version)
                for name in result.keys() - set(NOT_A_RESULT):
                    self._writer.add_scalar(f"eval/{name}", result[name], int(result.get("step", version)))

    def close(self) -> None:
        """Write what is left."""
        self.evaluations()
        self._writer.close()
