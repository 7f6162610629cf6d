"""After a load every tensor that computes is the shadow's, or the load says which is not; digests are of what computes.

Runs inside vLLM's worker processes: ``WeightLoader`` is mixed into vLLM's worker class, its methods are called by name.
On the CPU, vLLM packs linear weights for its kernels and drops or no longer reads the parameter, so a packed layer's
digest is taken of what the layer answers to a fixed input; everything else is hashed as it lies in memory.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from producer.engine.digest import digest
from producer.engine.shadow_names import TIED_HEAD, some
from weight_sync.manifest import decode
from weight_sync.shadow import ShadowReference, open_shadow

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

PROBE_ROWS = 16


class WeightLoader:
    """What Forebay adds to a worker."""

    if TYPE_CHECKING:
        vllm_config: VllmConfig
        model_config: ModelConfig
        device: torch.device
        rank: int

        def get_model(self) -> torch.nn.Module:
            """vLLM's."""

    def forebay_load(self, path: str, manifest: str) -> str:
        """Load a shadow; "" or what was not loaded, and then the model is of no use."""
        names = [entry.name for entry in decode(manifest).tensors]
        model = self.get_model()
        expected = {name for name, _ in model.named_parameters()}
        used: set[str] = set()
        loaded = _reload(self, model, _noting_use(open_shadow(ShadowReference(path, manifest)), used))
        if unused := [name for name in names if name not in used and name != TIED_HEAD]:
            return f"the engine made no use of {some(unused)}"
        if missing := sorted(expected - loaded):
            return f"no weights reached the engine's {some(missing)}"
        return ""

    def forebay_digests(self) -> dict[str, str]:
        """Digest of each tensor that computes, by `rank:name`."""
        model = self.get_model()
        found = {
            f"{self.rank}:{name}": digest(tensor)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if tensor.numel()
        }
        for name, layer in model.named_modules():
            if hasattr(layer, "cpu_linear"):
                found[f"{self.rank}:{name} (packed)"] = digest(_answer(layer))
        return found

    def forebay_kernels(self) -> str:
        """What of this machine decides the last bits of a packed layer's answer."""
        if self.device.type != "cpu":
            return ""
        return f"{torch.backends.cpu.get_cpu_capability()} x {torch.get_num_threads()} threads"


def _reload(worker: WeightLoader, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Through vLLM's own loaders, layer by layer: Hugging Face names become fused, sharded, packed parameters."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config), worker.device, torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)  # type: ignore[operator]
        finalize_layerwise_reload(model, worker.model_config)
        _pack_tied_again(model)
    return set(loaded)


def _pack_tied_again(model: torch.nn.Module) -> None:
    """A module that shares its parameter with another has no weights of its own in a load, so vLLM does not process it
    again: its packed copy (the output head's, on the CPU) would be the old one."""
    owners: defaultdict[int, list[torch.nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.numel():
                owners[id(parameter)].append(module)
    for sharing in owners.values():
        for module in sharing[1:]:
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]


class _CountCopies(TorchDispatchMode):
    """Counts copies into tensors: what every weight loader ends in."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


def _noting_use(weights: Iterable[tuple[str, torch.Tensor]], used: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, with the names of those noted that were copied somewhere before the next one was asked for."""
    with _CountCopies() as copies:
        for name, tensor in weights:
            before = copies.count
            yield name, tensor
            if copies.count > before:
                used.add(name)


def _answer(layer: Any) -> torch.Tensor:
    """What the layer's kernel makes of a fixed input in which each weight enters exactly one output."""
    width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
    generator = torch.Generator().manual_seed(width)
    columns = torch.arange(width)
    values = torch.randint(64, 128, (width,), generator=generator) / 64  # exact in every floating-point type
    probe = torch.zeros(PROBE_ROWS, width)
    probe[columns % PROBE_ROWS, columns] = values
    with torch.no_grad():
        return layer.quant_method.apply(layer, probe.to(layer.params_dtype), None)
