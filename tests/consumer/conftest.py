"""One gloo rank in this process for the tests that need ColossalAI's Booster but no second rank."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.arithmetic.model import write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied Qwen2 of a few thousand parameters; the spread of its weights keeps log-probs from being uniform."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny", tied=False, hidden=64, layers=2, std=0.06)


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """A distributed group of this process alone, launched as torchrun would."""
    import colossalai
    import torch.distributed as dist

    from consumer.accelerator import prepare

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    prepare("cpu")
    colossalai.launch_from_torch(seed=1, verbose=False)
    yield
    dist.destroy_process_group()
