"""Weights, gradients and optimizer states divided over the ranks with PyTorch's FSDP2, and put together again.

Every rank stores one n-th of each parameter. A layer's weights are gathered when it runs, forward and backward, and its
gradients are averaged and divided as soon as they are there, so that a device holds one or two whole layers at a time
(arXiv:2304.11277; `torch.distributed.fsdp.fully_shard`).
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from genomoe.model.transformer import GenoMoEModel, Layer

if torch.distributed.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def shard(model: GenoMoEModel, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Divide the parameters of `model` over the ranks of the one-dimensional `mesh`; they become DTensors.

    Experts are gathered in the format that they are multiplied in, so that no cast copy of them outlives their layer.
    All else is gathered as it is stored: norms and routers compute in the format of their weights. A group's gradients
    are averaged together and must agree in format, so a float32 router among bfloat16 weights is a group of its own.

    Args:
        compute: format of activations and products.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(even_axis(parameter, mesh.size()))

    stored = model.embed.weight.dtype
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if layer.moe.router.weight.dtype != stored:
            fully_shard(layer.moe.router, mesh=mesh, shard_placement_fn=place)
        if compute != stored:
            policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=stored, cast_forward_inputs=False)
            fully_shard(layer.moe.experts, mesh=mesh, shard_placement_fn=place, mp_policy=policy)
        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    # The head's weight is used outside of the model's forward pass, by the loss, so the root stays gathered until then.
    fully_shard(model, mesh=mesh, shard_placement_fn=place, reshard_after_forward=False)


def even_axis(parameter: Tensor, ranks: int) -> int:
    """The first axis that `ranks` divides, so that 8 experts on 16 ranks are shared out evenly; 0 if there is none."""
    return next((axis for axis, size in enumerate(parameter.shape) if size % ranks == 0), 0)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be divided over the ranks; every rank must call it."""
    return tensor.full_tensor() if _is_divided(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be divided; no other rank is asked."""
    return tensor.to_local() if _is_divided(tensor) else tensor


def _is_divided(tensor: Tensor) -> TypeGuard[DTensor]:
    return torch.distributed.is_available() and isinstance(tensor, DTensor)


def gather(state: Any, *, keep: bool) -> Any:
    """A nested state with whole tensors in host memory, one gathered at a time; every rank must call it.

    Args:
        keep: whether this rank wants the result; others get None for every tensor.
    """

    def collect(tensor: Tensor) -> Tensor | None:
        full = whole(tensor.detach())
        return full.cpu() if keep else None

    return tree_map_only(Tensor, collect, state)


def divide_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor, divided as `parameter` is; a tensor of another shape stays whole."""
    if not _is_divided(parameter) or tensor.shape != parameter.shape:
        return tensor
    return distribute_tensor(
        tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
