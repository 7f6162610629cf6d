"""ColossalAI runs on whatever hardware is there: Ascend NPUs, CUDA or the CPU, by one choice made before anything else.

ColossalAI 0.5 ships a CPU accelerator that raises where there is nothing to do and whose ``get_rng_state`` passes an
argument that torch does not take. Data-parallel training needs it mended in just these places:

- random state: really read, set and seeded, as checkpoints carry it;
- ``synchronize`` and ``empty_cache``: nothing to do on a CPU, so they return.

Ascend and CUDA use ColossalAI's own accelerators unchanged.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import torch
from colossalai.accelerator import get_accelerator, set_accelerator
from colossalai.accelerator.cpu_accelerator import CpuAccelerator

from buffer.errors import SpecError

Platform = Literal["cpu", "cuda", "ascend"]


@dataclass(frozen=True)
class Hardware:
    """What the ranks run on."""

    platform: Platform
    backend: str  # of torch.distributed


class MendedCpuAccelerator(CpuAccelerator):
    """The CPU as ColossalAI expects an accelerator to behave."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """State of torch's generator."""
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """There is one CPU."""
        torch.manual_seed(seed)

    def synchronize(self, device: Any = None) -> None:
        """CPU operations are done when they return."""

    def empty_cache(self) -> None:
        """torch keeps no cache of host memory."""


def choose_platform(asked: str) -> Platform:
    """The platform asked for, or for `auto` the first that is installed: Ascend, CUDA, CPU."""
    npu = importlib.util.find_spec("torch_npu") is not None
    if asked == "auto":
        return "ascend" if npu else "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "ascend" and not npu:
        raise SpecError(
            "platform is ascend, but torch_npu is not installed",
            where="trainer.platform",
            cure="run the consumer in the Ascend image, or set platform to auto",
        )
    if asked == "cuda" and not torch.cuda.is_available():
        raise SpecError(
            "platform is cuda, but torch finds no CUDA device",
            where="trainer.platform",
            cure="run where a GPU is visible, or set platform to auto",
        )
    if asked in ("cpu", "cuda", "ascend"):
        return asked  # type: ignore[return-value]
    raise SpecError(f"unknown platform {asked}", where="trainer.platform", cure="use auto, cpu, cuda or ascend")


def prepare(asked: str) -> Hardware:
    """Choose the platform and make it ColossalAI's accelerator; call before anything else of ColossalAI."""
    platform = choose_platform(asked)
    if platform == "cpu":
        set_accelerator(MendedCpuAccelerator())
        return Hardware("cpu", "gloo")
    if platform == "ascend":
        importlib.import_module("torch_npu")  # registers the device with torch
        set_accelerator("npu")
        return Hardware("ascend", "hccl")
    set_accelerator("cuda")
    return Hardware("cuda", "nccl")


def current_device() -> torch.device:
    """The device of this rank."""
    return torch.device(get_accelerator().get_current_device())
