"""What a layer keeps for its backward pass: activation policies, composed per layer.

A policy is a base and, for `layer`, modifiers:

| policy                     | kept per token and layer              | recomputed in the backward pass                |
|----------------------------|---------------------------------------|------------------------------------------------|
| `none`                     | everything                            | nothing                                        |
| `mlp`                      | stream, q, k, v, attention output     | the norms and the experts' activations         |
| `layer`                    | the layer's input                     | the layer                                      |
| `layer+attention`          | its input and the attention output    | all of the layer but attention, whose cost     |
|                            |                                       | grows with the context                         |
| `...+mxfp8` (with `layer`) | the input in 8 bits (MXFP8)           | as above, from the rounded input               |
| `...+offload` (likewise)   | the input in pinned host memory       | as above; copies overlap the computation       |
| `...+mxfp8+offload`        | the input in 8 bits in host memory    | as `mxfp8`                                     |

The choice of experts is always kept (one byte or two per choice) and never made again. Gradients equal those of
`none` bit by bit, but for `mxfp8`, whose layers recompute from an input rounded to 3 bits of mantissa.

Axis legend: T tokens, D hidden size, K experts chosen per token.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from genomoe.model.attention import SequenceLayout
from genomoe.model.kernels import KernelOptions
from genomoe.model.moe import Routing
from genomoe.model.transformer import GenoMoEModel, Layer, run_layer
from genomoe.ops.attention import attention
from genomoe.ops.attention_kernels import AttentionCache
from genomoe.ops.recipe import get_recipe

POLICIES = (
    "none", "mlp", "layer", "layer+mxfp8", "layer+offload",
    "layer+mxfp8+offload", "layer+attention", "layer+attention+mxfp8", "layer+attention+offload",
    "layer+attention+mxfp8+offload",
)  # fmt: skip
"""Names in rising order of memory saved within each kind."""

BLOCK = 32
"""Values that share a scale in MXFP8."""
_ROWS = 1 << 16  # rows quantised at a time, which bounds the float32 transient


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationPolicy:
    """One parsed policy name."""

    base: str = "none"
    """none, mlp or layer."""
    attention: bool = False
    """Keep the attention output."""
    store: str = "plain"
    """How a layer's input is kept: plain, mxfp8, offload or mxfp8+offload."""

    @classmethod
    def parse(cls, name: str) -> ActivationPolicy:
        """Read a name of `POLICIES`.

        Raises:
            ValueError: there is no such policy.
        """
        if name not in POLICIES:
            raise ValueError(f"there is no activation policy {name!r}; policies: {', '.join(POLICIES)}")
        base, *modifiers = name.split("+")
        store = "+".join(modifier for modifier in modifiers if modifier != "attention") or "plain"
        return cls(base=base, attention="attention" in modifiers, store=store)


def apply_policy(model: GenoMoEModel, policy: str | Sequence[str]) -> None:
    """Put an activation policy in force, replacing the one before.

    Args:
        model: its `run_layer` and `kernels.activation` are set.
        policy: a name for all layers, or one name per layer.

    Raises:
        ValueError: an unknown name, or not as many names as layers.
    """
    names = [policy] * len(model.layers) if isinstance(policy, str) else list(policy)
    if len(names) != len(model.layers):
        raise ValueError(
            f"activation policies for {len(names)} layers were given, but the model has {len(model.layers)}"
        )
    parsed = [ActivationPolicy.parse(name) for name in names]
    label = names[0] if len(set(names)) == 1 else ",".join(names)
    model.kernels = dataclasses.replace(model.kernels, activation=label)
    if all(one.base == "none" for one in parsed):
        model.run_layer = run_layer
    else:
        model.run_layer = PolicyRunner(parsed)


class PolicyRunner:
    """Runs every layer under its policy; a `genomoe.model.transformer.LayerRunner`."""

    def __init__(self, policies: Sequence[ActivationPolicy]) -> None:
        self.policies = tuple(policies)
        self._runners = {"none": run_layer, "mlp": run_mlp_policy}

    def __call__(
        self,
        index: int,
        layer: Layer,
        x_TD: Tensor,
        layout: SequenceLayout,
        valid_T: Tensor | None,
        kernels: KernelOptions,
    ) -> tuple[Tensor, Routing]:
        policy = self.policies[index]
        if not torch.is_grad_enabled():
            return run_layer(index, layer, x_TD, layout, valid_T, kernels)
        if policy.base == "layer":
            return run_layer_policy(policy, layer, x_TD, layout, valid_T, kernels)
        return self._runners[policy.base](index, layer, x_TD, layout, valid_T, kernels)


def run_mlp_policy(
    index: int, layer: Layer, x_TD: Tensor, layout: SequenceLayout, valid_T: Tensor | None, kernels: KernelOptions
) -> tuple[Tensor, Routing]:
    """Experts recompute their activations; norms are made again from the residual stream."""
    kernels = dataclasses.replace(kernels, save="recompute")
    with saved_tensors_hooks(_pack_recipe, _unpack_recipe):
        return layer(x_TD, layout, valid_T, kernels)


def _pack_recipe(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
    # detached: a node that keeps its own output through a hook would keep itself alive
    return get_recipe(tensor) or tensor.detach()


def _unpack_recipe(kept: Tensor | Callable[[], Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()


def run_layer_policy(
    policy: ActivationPolicy,
    layer: Layer,
    x_TD: Tensor,
    layout: SequenceLayout,
    valid_T: Tensor | None,
    kernels: KernelOptions,
) -> tuple[Tensor, Routing]:
    """The layer runs again in the backward pass, with the experts chosen the first time and without their output."""
    kept: list[Tensor] = []

    def run(x_TD: Tensor) -> tuple[Tensor, Routing]:
        if kept:
            return layer(x_TD, layout, valid_T, kernels, kept[0].long())
        out_TD, routing = layer(x_TD, layout, valid_T, kernels)
        few = layer.moe.router.config.num_experts <= 256
        kept.append(routing.expert_index_TK.to(torch.uint8 if few else torch.int16))
        return out_TD, routing

    if policy.attention:
        layout = _keeping_attention(layout, kernels)
    pack, unpack = _STORES[policy.store]
    with saved_tensors_hooks(pack, unpack):
        return checkpoint(run, x_TD, use_reentrant=False, preserve_rng_state=False)


def _keeping_attention(layout: SequenceLayout, kernels: KernelOptions) -> SequenceLayout:
    """The same layout, its attention called once: the layer's second run takes the output of the first."""
    cache = AttentionCache()

    def attend(_index: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        return attention(
            q,
            k,
            v,
            cu_seqlens=layout.cu_seqlens,
            max_seqlen=layout.max_seqlen,
            window=window,
            backend=kernels.attention,
            cache=cache,
        )

    return dataclasses.replace(layout, attend=attend)


# ---- how a layer's input is kept -----------------------------------------------------------------------------


def _is_stream(tensor: Tensor) -> bool:
    """A [T, D] block of activations, as opposed to the small tensors a checkpoint also keeps."""
    return tensor.dim() == 2 and tensor.is_floating_point() and tensor.shape[1] % BLOCK == 0


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A [T, D] tensor in MXFP8, rows in blocks; or where its two parts were put."""

    elements: Any
    """float8_e4m3fn [T, D], or `Offloaded`."""
    scales: Any
    """uint8 [T, D/32], or `Offloaded`."""
    dtype: torch.dtype


def _pack_mxfp8(tensor: Tensor) -> Tensor | Quantized:
    if not _is_stream(tensor):
        return tensor.detach()
    from genomoe.ops.mxfp8 import quantize_mxfp8

    T, D = tensor.shape
    elements = torch.empty(T, D, dtype=torch.float8_e4m3fn, device=tensor.device)
    scales = torch.empty(T, D // BLOCK, dtype=torch.uint8, device=tensor.device)
    for rows in _blocks(T):
        elements[rows], scales[rows] = quantize_mxfp8(tensor.detach()[rows])
    return Quantized(elements, scales, tensor.dtype)


def _unpack_mxfp8(kept: Tensor | Quantized) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    from genomoe.ops.mxfp8 import MXFP8, dequantize_mxfp8

    out = torch.empty(kept.elements.shape, dtype=kept.dtype, device=kept.elements.device)
    for rows in _blocks(out.shape[0]):
        out[rows] = dequantize_mxfp8(MXFP8(kept.elements[rows], kept.scales[rows]), kept.dtype)
    return out


def _blocks(rows: int) -> list[slice]:
    return [slice(start, start + _ROWS) for start in range(0, rows, _ROWS)]


class Offloaded:
    """A CUDA tensor copied to pinned host memory on a stream of its own, and back before it is needed.

    Fetching one starts the copy of the one packed before it, which the backward pass needs next.
    """

    _streams: dict[torch.device, torch.cuda.Stream] = {}  # noqa: RUF012 - one per device, for the process
    _latest: weakref.ref[Offloaded] | None = None

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        stream = self._stream()
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        self.fetched: Tensor | None = None
        self.previous = Offloaded._latest
        Offloaded._latest = weakref.ref(self)

    def _stream(self) -> torch.cuda.Stream:
        if self.device not in self._streams:
            self._streams[self.device] = torch.cuda.Stream(self.device)
        return self._streams[self.device]

    def start_fetch(self) -> None:
        if self.fetched is None:
            # allocated on the computing stream, so that its memory is reused in that stream's order
            fetched = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
            stream = self._stream()
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                fetched.copy_(self.host, non_blocking=True)
            fetched.record_stream(stream)
            self.fetched = fetched

    def fetch(self) -> Tensor:
        self.start_fetch()
        fetched, self.fetched = self.fetched, None
        assert fetched is not None
        torch.cuda.current_stream(self.device).wait_stream(self._stream())
        before = self.previous() if self.previous is not None else None
        if before is not None:
            before.start_fetch()
        return fetched


def _pack_offload(tensor: Tensor) -> Tensor | Offloaded:
    return Offloaded(tensor.detach()) if tensor.is_cuda and _is_stream(tensor) else tensor.detach()


def _unpack_offload(kept: Tensor | Offloaded) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.fetch()


def _pack_mxfp8_offload(tensor: Tensor) -> Tensor | Quantized:
    packed = _pack_mxfp8(tensor)
    if isinstance(packed, Tensor) or not packed.elements.is_cuda:
        return packed
    return Quantized(Offloaded(packed.elements), Offloaded(packed.scales), packed.dtype)


def _unpack_mxfp8_offload(kept: Tensor | Quantized) -> Tensor:
    if isinstance(kept, Tensor) or isinstance(kept.elements, Tensor):
        return _unpack_mxfp8(kept)
    # the scales were packed last, so the elements are already on their way when the scales are here
    scales = kept.scales.fetch()
    return _unpack_mxfp8(Quantized(kept.elements.fetch(), scales, kept.dtype))


def _keep(tensor: Tensor) -> Tensor:
    return tensor


_STORES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "plain": (_keep, _keep),
    "mxfp8": (_pack_mxfp8, _unpack_mxfp8),
    "offload": (_pack_offload, _unpack_offload),
    "mxfp8+offload": (_pack_mxfp8_offload, _unpack_mxfp8_offload),
}
