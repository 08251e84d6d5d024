"""Pictures of variant scores and of how well they tell labels apart; they compute nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

__all__ = ["plot_calibration", "plot_curves", "plot_enrichment", "plot_mutagenesis", "plot_scatter"]


def plot_mutagenesis(matrix: pd.DataFrame, ax: Any = None) -> Any:
    """Bases (rows) by positions (columns); blue lowers, red raises; the range is symmetric about 0."""
    ax = ax or _axes(max(6.0, 0.07 * matrix.shape[1]), 2.2)
    limit = float(np.nanmax(np.abs(matrix.to_numpy()))) or 1.0
    image = ax.imshow(matrix.to_numpy(), aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    ax.set_yticks(range(len(matrix.index)), list(matrix.index))
    ticks = np.linspace(0, matrix.shape[1] - 1, num=min(8, matrix.shape[1]), dtype=int)
    ax.set_xticks(ticks, [f"{matrix.columns[i]:,}" for i in ticks])
    ax.set_xlabel("position")
    ax.set_ylabel("changed to")
    ax.figure.colorbar(image, ax=ax, label="score")
    return ax


def plot_curves(
    curves: dict[str, tuple[np.ndarray, np.ndarray]],
    ax: Any = None,
    *,
    x: str,
    y: str,
    diagonal: bool = False,
) -> Any:
    """Named lines in the unit square: ROC (with the diagonal of chance) or precision over recall."""
    ax = ax or _axes(4.0, 4.0)
    for name, (across, up) in curves.items():
        ax.plot(across, up, label=name, linewidth=1.5)
    if diagonal:
        ax.plot([0, 1], [0, 1], color="0.7", linewidth=1, linestyle=":")
    ax.set(xlabel=x, ylabel=y, xlim=(0, 1), ylim=(0, 1.02))
    ax.legend(fontsize="small", frameon=False)
    return ax


def plot_calibration(table: pd.DataFrame, ax: Any = None) -> Any:
    """Observed share over mean prediction, from `genomoe.evaluation.discrimination.calibration`."""
    ax = ax or _axes(4.0, 4.0)
    low = float(min(table["predicted"].min(), table["observed"].min()))
    high = float(max(table["predicted"].max(), table["observed"].max()))
    ax.plot([low, high], [low, high], color="0.7", linewidth=1, linestyle=":")
    ax.plot(table["predicted"], table["observed"], marker="o", linewidth=1.5)
    ax.set(xlabel="predicted", ylabel="observed")
    return ax


def plot_scatter(x: np.ndarray, y: np.ndarray, ax: Any = None, *, xlabel: str = "", ylabel: str = "") -> Any:
    """Points, faint where many."""
    ax = ax or _axes(4.0, 4.0)
    ax.scatter(x, y, s=3, alpha=min(1.0, 500 / max(len(x), 1)), linewidths=0)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return ax


def plot_enrichment(table: pd.DataFrame, ax: Any = None) -> Any:
    """Labels (rows) by experts (columns), log2; symmetric about 0."""
    ax = ax or _axes(0.5 * table.shape[1] + 2, 0.3 * table.shape[0] + 1.5)
    limit = float(np.nanmax(np.abs(table.to_numpy()))) or 1.0
    image = ax.imshow(table.to_numpy(), aspect="auto", cmap="PuOr", vmin=-limit, vmax=limit)
    ax.set_yticks(range(table.shape[0]), [str(label) for label in table.index])
    ax.set_xticks(range(table.shape[1]), [str(expert) for expert in table.columns])
    ax.set_xlabel("expert")
    ax.figure.colorbar(image, ax=ax, label="log2 enrichment")
    return ax


def _axes(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'genomoe[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained").subplots()
