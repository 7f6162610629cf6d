"""Breaks what a load should have done, in the worker: each fault is one that a load path could really have."""

import torch
from producer.engine.vllm_worker import WeightLoader


class CorruptingLoader(WeightLoader):
    """Forebay's loader and a way to corrupt the tensor that computes, and nothing else."""

    def corrupt_packed(self, name: str) -> None:
        """Pack a layer's kernel anew with other weights, and leave its parameter as it was."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        layer = self.get_model().get_submodule(name)
        width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
        weight = layer.quant_method.apply(layer, torch.eye(width, dtype=layer.params_dtype), None).t().contiguous()
        weight[0, 0] += 0.01  # one element
        kept = layer.weight
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        layer.weight = kept
