"""RoPE: frequencies equal Hugging Face's rules, angles are right at a million positions, dot products are relative."""

from __future__ import annotations

import math

import pytest
import torch

from genomoe.ops.rope import RopeScaling, apply_rope_qkv, rope_frequencies, rope_table, rotate


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_frequencies_equal_hugging_face(kind) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import MixtralConfig

    rope = {"rope_type": kind, "rope_theta": 5e7}
    if kind != "default":
        rope |= {"factor": 16.0, "original_max_position_embeddings": 8192}
    config = MixtralConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=rope)
    scaling = None if kind == "default" else RopeScaling(kind=kind, factor=16.0, original_max_context=8192)
    got, scale = rope_frequencies(64, 5e7, scaling)
    if kind == "default":
        want, want_scale = 5e7 ** -(torch.arange(0, 64, 2) / 64), 1.0
    else:
        want, want_scale = utils.ROPE_INIT_FUNCTIONS[kind](config)
    torch.testing.assert_close(got.float(), want, rtol=2e-6, atol=0)
    assert scale == pytest.approx(want_scale)


def test_ntk_stretches_the_slowest_pair_by_the_factor_and_leaves_the_fastest() -> None:
    plain, _ = rope_frequencies(64, 1e4, None)
    ntk, _ = rope_frequencies(64, 1e4, RopeScaling(kind="ntk", factor=8.0, original_max_context=512))
    assert ntk[0] == plain[0]
    assert plain[-1] / ntk[-1] == pytest.approx(8.0)


@pytest.mark.parametrize("position", [1 << 20, (1 << 20) + 12_345, (1 << 22) - 1])
def test_angles_past_a_million_positions(position) -> None:
    table = rope_table(position + 1, 8, 5e7)
    for pair in range(4):
        angle = position * 5e7 ** (-pair / 4)
        assert table.cos_SP[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-6)
        assert table.sin_SP[position, pair].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_scores_depend_on_distance_only() -> None:
    table = rope_table(1000, 16, 1e4)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(i: int, j: int) -> float:
        a = rotate(q, table.cos_SP[i : i + 1], table.sin_SP[i : i + 1])
        b = rotate(k, table.cos_SP[j : j + 1], table.sin_SP[j : j + 1])
        return (a * b).sum().item()

    assert score(10, 3) == pytest.approx(score(907, 900), abs=1e-4)


def test_packed_positions_restart() -> None:
    table = rope_table(8, 4, 1e4)
    qkv = torch.randn(8, (2 + 2) * 4, generator=torch.Generator().manual_seed(0))
    fixed = apply_rope_qkv(qkv, table, 2, 1, None, 4)
    packed = apply_rope_qkv(qkv, table, 2, 1, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]), 8)
    for a, b in zip(fixed, packed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "dynamic", "factor": 2.0, "original_max_context": 8},
        {"kind": "linear", "factor": 0.5, "original_max_context": 8},
        {"kind": "linear", "factor": 2.0, "original_max_context": 0},
        {"kind": "yarn", "factor": 2.0, "original_max_context": 8, "beta_fast": 1.0, "beta_slow": 2.0},
        {"kind": "yarn", "factor": 2.0},
        {"kind": "yarn", "factor": 2.0, "original_max_context": 8, "alpha": 1},
    ],
)
def test_bad_scalings_are_refused(fields) -> None:
    with pytest.raises(ValueError, match="rope_scaling"):
        RopeScaling.from_dict(fields)
