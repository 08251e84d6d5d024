"""Memory and rates of the devices that plans are made for."""

from __future__ import annotations

import dataclasses

import torch

from genomoe.training.options import ConfigError, nearest

GIB = 2**30
ALLOCATOR_SLACK = 0.02
"""Share of a device's memory that blocks of unequal size leave unusable, beside the context's own `CONTEXT_BYTES`."""
CONTEXT_BYTES = GIB
"""CUDA context, library handles and workspaces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """Memory and peak rates of a device; dense, no sparsity."""

    name: str
    memory_bytes: float
    bf16_flops: float
    """Peak of bfloat16 products, FLOP/s."""
    fp8_flops: float
    """Peak of 8-bit products, FLOP/s; that of bfloat16 where there are none."""
    bandwidth: float
    """Bytes/s of a copy (read and written bytes both counted)."""
    product_efficiency: float = 0.87
    """Part of the bfloat16 peak that large products reach."""
    fp8_efficiency: float = 0.76
    """Part of the 8-bit peak that products of wide experts reach; see `FP8_HALF_WIDTH`."""
    attention_efficiency: float = 0.567
    """Part of the bfloat16 peak that attention with heads of 64 reaches on long sequences, forward and backward."""

    @classmethod
    def named(cls, name: str) -> Device:
        """A known device.

        Raises:
            ConfigError: it is not known.
        """
        if name.lower() not in DEVICES:
            known = ", ".join(DEVICES)
            raise ConfigError(f"the GPU {name!r} is not known{nearest(name.lower(), DEVICES)} Known: {known}.")
        return DEVICES[name.lower()]

    @classmethod
    def detect(cls) -> Device | None:
        """The first CUDA device, with the rates of the known one it resembles; None without one."""
        if not torch.cuda.is_available():
            return None
        properties = torch.cuda.get_device_properties(0)
        for key, device in DEVICES.items():
            if key in properties.name.lower().replace("-", " ").split():
                return dataclasses.replace(device, name=properties.name, memory_bytes=properties.total_memory)
        guess = DEVICES["a100"]
        return dataclasses.replace(guess, name=properties.name, memory_bytes=properties.total_memory)

    @property
    def roofline(self) -> str:
        """The rates that predicted times assume, in words."""
        return (
            f"products at {self.product_efficiency:.0%} of {self.bf16_flops / 1e12:.0f} TFLOP/s bf16, up to "
            f"{self.fp8_efficiency:.0%} of {self.fp8_flops / 1e12:.0f} fp8, attention up to "
            f"{self.attention_efficiency:.0%} of bf16 with heads of 64, "
            f"passes at {self.bandwidth / 1e12:.2f} TB/s, nothing overlapped"
        )

    @property
    def usable_bytes(self) -> float:
        """Memory a step may take."""
        return self.memory_bytes * (1 - ALLOCATOR_SLACK) - CONTEXT_BYTES


DEVICES = {
    # the H200 as measured on one (8192^3 products, a 4 GiB copy); the others: their data sheets times the same ratios
    "h200": Device(name="H200", memory_bytes=139.8 * GIB, bf16_flops=767e12, fp8_flops=1484e12, bandwidth=4.28e12),
    "h100": Device(name="H100", memory_bytes=79.1 * GIB, bf16_flops=767e12, fp8_flops=1484e12, bandwidth=2.9e12),
    "b200": Device(name="B200", memory_bytes=178.0 * GIB, bf16_flops=1700e12, fp8_flops=3400e12, bandwidth=7.0e12),
    "a100": Device(name="A100", memory_bytes=79.1 * GIB, bf16_flops=270e12, fp8_flops=270e12, bandwidth=1.7e12),
    "l40s": Device(name="L40S", memory_bytes=44.4 * GIB, bf16_flops=300e12, fp8_flops=600e12, bandwidth=0.78e12),
}  # fmt: skip
"""Known devices by name."""
