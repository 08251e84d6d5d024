"""Figures: `plot_x(data, ax=None) -> Axes`. They compute nothing, and import matplotlib when called."""

from genomoe.plot.precision import plot_precision
from genomoe.plot.training import plot_loss_curve

__all__ = ["plot_loss_curve", "plot_precision"]
