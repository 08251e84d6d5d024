"""Loss curves: what is drawn, on the axes that were given, without global state."""

import sys

import pandas as pd
import pytest

from genomoe.plot import plot_loss_curve
from genomoe.plot.training import new_axes

pytest.importorskip("matplotlib")

METRICS = pd.DataFrame(
    {
        "step": [10, 20, 30],
        "train/bits_per_base": [2.0, 1.95, None],
        "val/bits_per_base": [None, 1.97, 1.96],
    }
)


def test_curves_and_baselines_are_lines_with_their_data() -> None:
    axes = plot_loss_curve(METRICS, baselines={"uniform": 2.0})
    train, held_out, uniform = axes.get_lines()
    assert list(train.get_xdata()) == [10, 20]
    assert list(held_out.get_ydata()) == [1.97, 1.96]
    assert set(uniform.get_ydata()) == {2.0}
    assert axes.get_xlabel() == "optimizer step"
    assert "uniform: 2.000" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_it_draws_where_it_is_told_and_leaves_pyplot_alone() -> None:
    pyplot_was_loaded = "matplotlib.pyplot" in sys.modules
    axes = new_axes()
    assert plot_loss_curve(METRICS.drop(columns="val/bits_per_base"), axes) is axes
    assert len(axes.get_lines()) == 1
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_was_loaded


def test_a_missing_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"genomoe\[plot\]"):
        plot_loss_curve(METRICS)
