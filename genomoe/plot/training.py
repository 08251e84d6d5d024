"""How a training run went."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_loss_curve(
    metrics: "pd.DataFrame", ax: "Axes | None" = None, *, baselines: Mapping[str, float] | None = None
) -> "Axes":
    """Bits per base against optimizer steps, training and held-out, with baselines as horizontal lines.

    Args:
        metrics: a run's metrics.csv: columns `step`, `train/bits_per_base` and, if validated,
            `val/bits_per_base`; rows without a value are skipped.
        ax: where to draw; a new figure by default.
        baselines: name and bits per base of each line.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message says what to install.
    """
    axes = ax if ax is not None else new_axes()
    for column, label, style in (
        ("train/bits_per_base", "training batch", {"alpha": 0.6, "linewidth": 1.0}),
        ("val/bits_per_base", "held-out windows", {"marker": "o", "markersize": 4}),
    ):
        if column in metrics:
            rows = metrics.dropna(subset=[column])
            axes.plot(rows["step"], rows[column], label=label, **style)
    for number, (name, value) in enumerate((baselines or {}).items()):
        axes.axhline(value, linestyle="--", linewidth=1.0, color=f"C{number + 2}", label=f"{name}: {value:.3f}")
    axes.set_ylim(top=min(axes.get_ylim()[1], 2.1))  # the first steps, above a uniform guess, would flatten the rest
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("bits per base")
    axes.legend()
    return axes


def new_axes(width: float = 7.0, height: float = 4.5) -> "Axes":
    """Axes of a figure of `new_figure`."""
    return new_figure(width, height).subplots()


def new_figure(width: float, height: float) -> "Figure":
    """A figure that belongs to no window system, so that nothing global is touched."""
    figure_module: Any
    try:
        from matplotlib import figure as figure_module
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "plots need matplotlib, which is not installed: pip install 'genomoe[plot]'."
        ) from None
    return figure_module.Figure(figsize=(width, height), layout="constrained")
