"""The same weights give Hugging Face's MixtralForCausalLM and ours the same logits and gradients."""

from __future__ import annotations

import pytest
import torch

from genomoe.model import GenoMoEModel, KernelOptions, ModelConfig
from genomoe.model.mixtral import from_mixtral_state, to_mixtral_config, to_mixtral_state

transformers = pytest.importorskip("transformers")

CONFIG = ModelConfig(
    vocab_size=32, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_size=16, expert_size=96,
    num_experts=8, top_k=2, rope_theta=5e4, max_context=256,
)  # fmt: skip


def pair(config: ModelConfig, experts: str = "reference"):
    torch.manual_seed(0)
    ours = GenoMoEModel(config, dtype=torch.float32, kernels=KernelOptions(experts=experts))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms off 1, routing well spread
    theirs = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**to_mixtral_config(config), attn_implementation="eager")
    )
    missing, unexpected = theirs.load_state_dict(fused(to_mixtral_state(ours.state_dict(), config)), strict=False)
    assert not unexpected
    assert all("rotary" in name or name == "lm_head.weight" for name in missing), missing
    return ours, theirs


def fused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checkpoint names (w1, w2, w3 per expert) to the parameter names of transformers 5 (stacked)."""
    out: dict[str, torch.Tensor] = {}
    layers = sorted({name.split(".")[2] for name in state if ".block_sparse_moe." in name}, key=int)
    for name, value in state.items():
        if ".experts." not in name:
            out[name.replace(".block_sparse_moe.", ".mlp.")] = value
    for layer in layers:
        stem = f"model.layers.{layer}.block_sparse_moe.experts"
        count = 1 + max(int(n.split(".")[5]) for n in state if n.startswith(stem))
        w = {k: torch.stack([state[f"{stem}.{e}.{k}.weight"] for e in range(count)]) for k in ("w1", "w2", "w3")}
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([w["w1"], w["w3"]], dim=1)
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = w["w2"]
    return out


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("experts", ["reference", "grouped_mm"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"top_k": 8},
        {"num_kv_heads": 4, "num_experts": 4, "top_k": 1},
        {"tie_embeddings": True},
        {"window": 7},
    ],
    ids=["plain", "k=e", "mha-top1", "tied", "window"],
)
def test_logits_and_gradients_equal_hugging_face(experts: str, change: dict) -> None:
    config = CONFIG.replace(**change)
    ours, theirs = pair(config, experts)
    tokens = torch.randint(0, config.vocab_size, (2, 37), generator=torch.Generator().manual_seed(1))
    out = ours(tokens)
    expected = theirs(input_ids=tokens, use_cache=False, output_router_logits=True)
    torch.testing.assert_close(out.logits, expected.logits, atol=1e-5, rtol=0)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    loss(out.logits).backward()
    loss(expected.logits).backward()
    got = to_mixtral_state({n: p.grad for n, p in ours.named_parameters(remove_duplicate=False)}, config)
    want = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    got = fused(got)
    assert set(want) <= set(got)
    for name, gradient in want.items():
        if config.top_k == 1 and name.endswith("gate.weight"):
            # the only chosen score is divided by itself: 1, whatever the router says; both are rounding noise
            assert got[name].abs().max() < 1e-6
            continue
        assert relative(got[name], gradient) < 1e-4, name


def test_state_converts_there_and_back_bit_identically() -> None:
    ours = GenoMoEModel(CONFIG)
    state = ours.state_dict()
    back = from_mixtral_state(to_mixtral_state(state, CONFIG), CONFIG)
    assert back.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(back[name], value), name
