"""Expert layers to compare: their tensors, the float64 truth, and how far from it each precision may be."""

from __future__ import annotations

import torch

from genomoe.ops.grouped_mlp import grouped_mlp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Relative error (Frobenius) of each tensor against float64. bfloat16: inputs of the products rounded to 2^-9 a few
# times over. e4m3 and MXFP8 round every operand to 2^-4: 2.6 % root mean square each, so 3.7 % a product and 6.6 % for
# two in a row. save="mxfp8" alone rounds gate and up for backward: 2.6 % each. One row more is allowed for few tokens.
TOLERANCE = {
    ("bf16", "bf16"): {"out": 6e-3, "dx": 6e-3, "dw_up": 6e-3, "dw_down": 6e-3, "dscores": 6e-3},
    ("bf16", "mxfp8"): {"out": 6e-3, "dx": 0.05, "dw_up": 0.05, "dw_down": 0.06, "dscores": 0.08},
    ("fp8", "bf16"): {"out": 0.085, "dx": 0.09, "dw_up": 0.09, "dw_down": 0.09, "dscores": 0.10},
    ("fp8", "mxfp8"): {"out": 0.085, "dx": 0.10, "dw_up": 0.10, "dw_down": 0.10, "dscores": 0.13},
    ("mxfp8", "mxfp8"): {"out": 0.085, "dx": 0.10, "dw_up": 0.10, "dw_down": 0.10, "dscores": 0.13},
}
SIZES = {"T": 50, "D": 96, "I": 96, "E": 3, "K": 2}
if DEVICE == "cuda":
    SIZES = {"T": 1000, "D": 288, "I": 416, "E": 5, "K": 2}


def tensors(*, T: int, D: int, I: int, E: int, K: int, routing: str = "random", seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g)
    w_up = torch.randn(E, 2 * I, D, generator=g) / D**0.5
    w_down = torch.randn(E, D, I, generator=g) / I**0.5
    logits = torch.randn(T, E, generator=g)
    if routing == "one expert":
        logits[:, 1] += 100
    if routing == "empty expert":
        logits[:, 0] -= 100
    value, index = logits.softmax(-1).topk(K)
    scores = value / value.sum(-1, keepdim=True)
    dy = torch.randn(T, D, generator=g)
    leaves = [t.to(DEVICE).requires_grad_() for t in (x.bfloat16(), w_up.bfloat16(), w_down.bfloat16(), scores)]
    return leaves, index.to(DEVICE), dy.bfloat16().to(DEVICE)


def run(leaves, index, dy, **options) -> dict[str, torch.Tensor]:
    out = grouped_mlp(*leaves[:3], index, leaves[3], **options)
    gradients = torch.autograd.grad(out, leaves, dy)
    return {"out": out.detach(), **dict(zip(("dx", "dw_up", "dw_down", "dscores"), gradients, strict=True))}


def truth(leaves, index, dy) -> dict[str, torch.Tensor]:
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = torch.zeros_like(exact[0])
    for e in range(exact[1].shape[0]):
        token, choice = torch.where(index == e)
        gate, up = (exact[0][token] @ exact[1][e].t()).chunk(2, -1)
        out = (torch.nn.functional.silu(gate) * up) @ exact[2][e].t()
        y = y.index_add(0, token, out * exact[3][token, choice, None])
    gradients = torch.autograd.grad(y, exact, dy.double())
    return {"out": y.detach(), **dict(zip(("dx", "dw_up", "dw_down", "dscores"), gradients, strict=True))}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: dict[str, float]) -> None:
    for name, value in got.items():
        assert value.isfinite().all(), name
        error = (value.double() - want[name]).norm() / want[name].norm()
        assert error < tolerance[name], (name, error.item())
