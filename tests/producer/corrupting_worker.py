"""Breaks what a load should have done, in the worker: each fault is one that a load path could really have."""

from typing import Any

import torch

from producer.engine.vllm_worker import WeightLoader


class CorruptingLoader(WeightLoader):
    """Forebay's loader, with ways to corrupt a tensor that computes, and nothing else."""

    stale_layer = ""

    def leave_stale(self, name: str) -> None:
        """From here on loads leave this layer computing with what it had ("" ends it)."""
        self.stale_layer = name

    def forebay_load(self, path: str, manifest: str) -> str:
        if not self.stale_layer:
            return super().forebay_load(path, manifest)
        layer = self.get_model().get_submodule(self.stale_layer)
        old = _computing_weight(layer)
        answer = super().forebay_load(path, manifest)
        _compute_with(layer, old)
        return answer

    def corrupt(self, name: str) -> None:
        """Change one element of what a layer computes with, and leave the parameter of a packed one as it was."""
        layer = self.get_model().get_submodule(name)
        weight = _computing_weight(layer)
        weight.view(-1)[0] += 0.01
        _compute_with(layer, weight)


def _computing_weight(layer: Any) -> torch.Tensor:
    if not hasattr(layer, "cpu_linear"):
        return layer.weight.detach().clone()
    width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
    return layer.quant_method.apply(layer, torch.eye(width, dtype=layer.params_dtype), None).t().contiguous()


def _compute_with(layer: Any, weight: torch.Tensor) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    if not hasattr(layer, "cpu_linear"):
        layer.weight.data.copy_(weight)
        return
    kept = layer.weight
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    layer.weight = kept
