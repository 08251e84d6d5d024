"""Which of PyTorch's attention kernels a model really ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class AttentionOperations(TorchDispatchMode):
    """A context that collects the names of the attention operations whose forward pass runs in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        """For example "_scaled_dot_product_cudnn_attention"."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.name().removeprefix("aten::").split(".")[0], kwargs or {}
        if name == "scaled_dot_product_attention":  # which arrives whole under inference mode
            with self:
                return func.decompose(*args, **kwargs)
        if "attention" in name and not name.endswith("_backward"):
            self.names.add(name)
        return func(*args, **kwargs)
