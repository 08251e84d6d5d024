"""A whole model on the fused pointwise kernels equals one on plain PyTorch, under every activation policy."""

from __future__ import annotations

import pytest
import torch

from genomoe.model import GenoMoEModel, KernelOptions, ModelConfig
from genomoe.ops.loss import linear_cross_entropy
from genomoe.training.activation import POLICIES, apply_policy

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # the same tests on the real thing
CONFIG = ModelConfig(
    vocab_size=16, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=16, expert_size=32,
    num_experts=4, top_k=2, max_context=64,
)  # fmt: skip
LENGTHS = torch.tensor([9, 1, 14])


def step(
    pointwise: str,
    policy: str,
    config: ModelConfig = CONFIG,
    *,
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
    **options,
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    kernels = KernelOptions(pointwise=pointwise, **{"experts": "reference", **options})
    model = GenoMoEModel(config, dtype=dtype, kernels=kernels)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    tokens = torch.randint(0, 16, (2, 12)).to(DEVICE)
    model.to(DEVICE)
    apply_policy(model, policy)
    if packed:
        cu = torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0)).to(torch.int32).to(DEVICE)
        out = model(tokens.flatten(), cu_seqlens=cu, max_seqlen=14, compute_logits=False)
    else:
        out = model(tokens, compute_logits=False, valid=tokens != 3)
    hidden, labels = out.hidden.flatten(0, -2), tokens.flatten().roll(-1)
    sums = linear_cross_entropy(hidden, model.lm_head.weight, labels, torch.ones_like(labels, dtype=torch.float32))
    losses = model.router_losses(out.routing)
    loss = sums.weighted_nats / 24 + losses["balance"] + losses["z"]
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        assert ((got[name] - value).norm() / value.norm()).item() < 2e-5, name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "change", [{}, {"qk_norm": True, "router_scores": "sigmoid", "window": 4}], ids=["plain", "more"]
)
def test_fused_equals_plain(packed, change) -> None:
    config = CONFIG.replace(**change)
    assert_close(step("triton", "none", config, packed=packed), step("torch", "none", config, packed=packed))


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "none" and "mxfp8" not in p])
def test_fused_is_bitwise_the_same_under_a_policy(policy) -> None:
    want, got = step("triton", "none"), step("triton", policy)
    if DEVICE == "cuda":  # attention and embedding gradients are summed by atomics there
        assert_close(got, want)
        return
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("save", ["bf16", "mxfp8", "recompute"])
@pytest.mark.parametrize("policy", ["layer", "layer+attention"])
def test_layers_run_again_without_their_experts_output(policy, save) -> None:
    fused = {"dtype": torch.bfloat16, "experts": "fused", "save": save}
    want, got = step("torch", "none", **fused), step("torch", policy, **fused)
    for name, value in want.items():
        if DEVICE == "cuda":  # sums by atomics, as above
            assert ((got[name] - value).norm() / value.norm()).item() < 2e-2, name
        else:
            assert torch.equal(got[name], value), name
