"""Activation policies: the same gradients, bit by bit where the policy promises it, and less kept."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from genomoe.model import GenoMoEModel, KernelOptions, ModelConfig
from genomoe.training.activation import POLICIES, apply_policy

CONFIG = ModelConfig(
    vocab_size=16, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_size=16, expert_size=64,
    num_experts=4, top_k=2, max_context=64,
)  # fmt: skip
EVERYTHING = CONFIG.replace(
    qk_norm=True, num_shared_experts=1, router_scores="sigmoid", router_bias_balancing=True, window=8, global_every=2
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # the same tests on the real thing
TOKENS = torch.randint(0, 16, (2, 24), generator=torch.Generator().manual_seed(0)).to(DEVICE)
VALID = (torch.arange(24, device=DEVICE) < 20).expand(2, 24)
# an input rounded to e4m3 is off by up to 2^-4, 3 % in the mean, in every layer; its gradients by as much
MXFP8_BOUND = 0.12


def step(config: ModelConfig, policy, dtype: torch.dtype = torch.float32, **options) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = GenoMoEModel(config, device=DEVICE, dtype=dtype, kernels=KernelOptions(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    apply_policy(model, policy)
    out = model(TOKENS, valid=VALID)
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].float().flatten(0, 1), TOKENS[:, 1:].flatten())
    losses = model.router_losses(out.routing)
    (loss + losses["balance"] + 0.1 * losses["z"]).backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("config", [CONFIG, EVERYTHING], ids=["mixtral", "everything"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "none" and "mxfp8" not in p])
@pytest.mark.parametrize("experts", ["reference", "grouped_mm"])
def test_gradients_are_equal_bit_by_bit(policy, dtype, config, experts) -> None:
    if DEVICE == "cuda" and experts == "grouped_mm" and dtype == torch.float32:
        pytest.skip("grouped products of torch are bfloat16 only on CUDA")
    want = step(config, "none", dtype, experts=experts)
    got = step(config, policy, dtype, experts=experts)
    for name, value in want.items():
        same(got[name], value, name)


def same(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """Bit by bit on the CPU; on CUDA attention and embedding gradients are summed by atomics, in any order."""
    if DEVICE == "cpu":
        assert torch.equal(got, want), name
    else:
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error < (2e-2 if got.dtype == torch.bfloat16 else 1e-4), (name, error.item())


@pytest.mark.parametrize("policy", [p for p in POLICIES if "mxfp8" in p])
def test_eight_bit_inputs_stay_within_their_bound(policy) -> None:
    pytest.importorskip("genomoe.ops.mxfp8")
    want, got = step(CONFIG, "none", torch.bfloat16), step(CONFIG, policy, torch.bfloat16)
    assert torch.equal(got["loss"], want["loss"])  # the forward pass is not rounded
    for name, value in want.items():
        error = (got[name].float() - value.float()).norm() / value.float().norm()
        assert error < MXFP8_BOUND, (name, error.item())


def test_policies_mix_layer_by_layer() -> None:
    want = step(CONFIG, "none")
    got = step(CONFIG, ["mlp", "none", "layer+attention"])
    for name, value in want.items():
        same(got[name], value, name)


def test_chunked_experts_change_nothing_but_the_order_of_sums() -> None:
    want = step(CONFIG, "none")
    for policy in ("none", "mlp", "layer"):
        got = step(CONFIG, policy, chunk_tokens=7)
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, atol=1e-5, rtol=1e-4, msg=name)


def kept_bytes(policy: str, dtype: torch.dtype) -> float:
    """Bytes per token and layer that the outermost graph keeps, parameters not counted, each storage once."""
    torch.manual_seed(0)
    model = GenoMoEModel(CONFIG, device=DEVICE, dtype=dtype, kernels=KernelOptions(experts="grouped_mm"))
    apply_policy(model, policy)
    import genomoe.training.activation as activation

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    weights |= {t.untyped_storage().data_ptr() for t in model.rope(24)}
    storages: dict[int, int] = {}

    def count(kept):
        parts = (kept.elements, kept.scales) if isinstance(kept, activation.Quantized) else (kept,)
        for part in parts:
            if isinstance(part, torch.Tensor) and part.untyped_storage().data_ptr() not in weights:
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        return kept

    patched = {
        name: (lambda t, pack=pack: count(pack(t)), unpack) for name, (pack, unpack) in activation._STORES.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation, "_STORES", patched)
        pack_recipe = activation._pack_recipe
        patch.setattr(activation, "_pack_recipe", lambda t: count(pack_recipe(t)))
        if policy == "none":
            with saved_tensors_hooks(lambda t: count(t.detach()), lambda t: t):
                out = model(TOKENS, compute_logits=False)
        else:
            out = model(TOKENS, compute_logits=False)
    assert out.hidden.requires_grad
    return sum(storages.values()) / TOKENS.numel() / CONFIG.num_layers


def test_each_policy_keeps_less_than_the_one_before() -> None:
    pytest.importorskip("genomoe.ops.mxfp8")
    kept = {policy: kept_bytes(policy, torch.bfloat16) for policy in ("none", "mlp", "layer", "layer+mxfp8")}
    assert kept["none"] > 1.5 * kept["mlp"]
    assert kept["mlp"] > 2 * kept["layer"]
    D = CONFIG.hidden_size
    assert kept["layer"] == 2 * D
    assert kept["layer+mxfp8"] == D * 33 / 32


def test_routing_is_not_made_again(monkeypatch) -> None:
    calls: list[bool] = []
    from genomoe.model import moe

    real = moe.route

    def counting(*args, **kwargs):
        calls.append(kwargs["expert_index_TK"] is None)
        return real(*args, **kwargs)

    monkeypatch.setattr(moe, "route", counting)
    step(CONFIG, "layer")
    assert calls.count(True) == CONFIG.num_layers
    assert calls.count(False) == CONFIG.num_layers


def test_a_policy_can_be_replaced_and_inference_ignores_it() -> None:
    model = GenoMoEModel(CONFIG).to(DEVICE)
    apply_policy(model, "layer")
    assert model.kernels.activation == "layer"
    with torch.no_grad():
        inside = model(TOKENS).logits
    apply_policy(model, "none")
    assert model.kernels == dataclasses.replace(model.kernels, activation="none")
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, inside)


def test_unknown_policies_are_named() -> None:
    model = GenoMoEModel(CONFIG)
    with pytest.raises(ValueError, match=r"no activation policy 'layers'.*layer\+mxfp8"):
        apply_policy(model, "layers")
    with pytest.raises(ValueError, match="2 layers were given, but the model has 3"):
        apply_policy(model, ["mlp", "mlp"])
