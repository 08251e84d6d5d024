"""SonicMoE (arXiv 2512.14080) as a peer of `genomoe bench layer`, and its compilation ahead of the measurement.

Axis legend: T tokens, D hidden size, E experts, K experts chosen per token, I expert width.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

import torch
from torch import Tensor

Tile = tuple[int, int, bool]
TILES: tuple[Tile, ...] = (
    (128, 192, True), (256, 128, False), (128, 256, False), (128, 128, True), (192, 128, True),
)  # fmt: skip
"""(rows, columns, ping-pong) that SonicMoE's products are tuned over here: its default and the usual best ones. Its own
list has 20 to 40 tiles for each of six products, whose compilation takes minutes for every layer shape."""


def _bound_tuning(tiles: Sequence[Tile]) -> None:
    from quack import gemm_interface
    from quack.autotuner import AutotuneConfig
    from quack.gemm_config import GemmConfig

    configs = [
        AutotuneConfig(
            config=GemmConfig(
                tile_m=rows, tile_n=columns, pingpong=pingpong, cluster_m=2, cluster_n=1, swap_ab=False,
                device_capacity=9, is_dynamic_persistent=False,
            )
        )
        for rows, columns, pingpong in tiles
    ]  # fmt: skip
    for name in ("gemm_tuned", "gemm_gated_tuned", "gemm_dgated_tuned"):
        getattr(gemm_interface, name).configs = configs


def layer(
    w_up: Tensor, w_down: Tensor, tiles: Sequence[Tile] = TILES
) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], list[Tensor]]:
    """Its layer, given the routing, from stacked weights [E, 2I, D] and [E, D, I]."""
    _bound_tuning(tiles)
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    E = w_up.shape[0]
    w_up, w_down = (weight.detach().requires_grad_() for weight in (w_up, w_down))

    def run(x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        T, K = index.shape
        tokens = torch.arange(T, device=x.device, dtype=torch.int32).repeat_interleave(K)
        return moe_general_routing_inputs(
            x, scores.reshape(-1), tokens, index.reshape(-1).int(), w_up.permute(1, 2, 0), None,
            w_down.permute(1, 2, 0), None, E, torch.cuda.current_stream().cuda_stream, ActivationType.SWIGLU, False,
            True,
        )[0]  # fmt: skip

    return run, [w_up, w_down]


class Shape(NamedTuple):
    """What its kernels are compiled for."""

    hidden: int
    width: int
    experts: int
    top_k: int


def prepare(shapes: Iterable[Shape], report: Callable[[str], None]) -> None:
    """Compile the kernels for these layers into SonicMoE's caches on disk, all at the same time.

    One after another they take one to two minutes a shape. Its products leave the sizes open, so every tile is compiled
    for one shape; its Triton passes are compiled for every shape, in many variants.

    Args:
        report: told how each compilation ended.
    """
    first, *others = dict.fromkeys(shapes)
    jobs = [(tile, first) for tile in TILES] + [(TILES[0], shape) for shape in others]
    with ProcessPoolExecutor(len(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_run_once, tile, shape): f"tile {tile}, {shape}" for tile, shape in jobs}
        for future in as_completed(futures):
            error = future.exception()
            report(f"SonicMoE, {futures[future]}: " + (f"{type(error).__name__}: {error}" if error else "compiled"))


def _run_once(tile: Tile, shape: Shape, tokens: int = 4096) -> None:
    """Forward and backward with one tile."""
    os.environ["QUACK_COMPILE_WORKERS"] = "1"  # the jobs are the parallelism
    D, I, E, K = shape

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    run, _ = layer(random(E, 2 * I, D), random(E, D, I), tiles=[tile])
    scores, index = torch.randn(tokens, E, device="cuda").softmax(-1).topk(K)
    x = random(tokens, D).requires_grad_()
    run(x, index, scores.detach().requires_grad_()).backward(random(tokens, D))
    torch.cuda.synchronize()
