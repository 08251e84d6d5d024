"""How trainings in different precisions compare."""

from typing import TYPE_CHECKING, Any

from genomoe.plot.training import new_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def plot_precision(rows: "pd.DataFrame", axes: "tuple[Axes, Axes] | None" = None) -> "tuple[Axes, Axes]":
    """Loss curves above, one a seed, and held-out bits per base as dots; below, their differences to the mean of bf16.

    Args:
        rows: of `genomoe bench precision`: columns `kind`, `precision`, `seed`, `step`, `loss_bits_per_base`,
            `difference_to_bf16` and `held_out_bits_per_base`.
        axes: where to draw; a new figure by default.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message says what to install.
    """
    curves, differences = axes if axes is not None else _two_axes()
    colors = {name: f"C{number}" for number, name in enumerate(rows["precision"].unique())}
    for (precision, seed), own in rows.dropna(subset=["seed"]).groupby(["precision", "seed"], sort=False):
        steps, held_out = own[own["kind"] == "step"], own[own["kind"] == "held_out"]
        style: dict[str, Any] = {"color": colors[precision], "linewidth": 1.0, "alpha": 0.7}
        named = seed == 1
        curves.plot(steps["step"], steps["loss_bits_per_base"], label=precision if named else None, **style)
        curves.plot(
            held_out["step"], held_out["held_out_bits_per_base"], marker="o", markersize=3, linestyle=":",
            label=f"{precision}, held out" if named else None, **style,
        )  # fmt: skip
        if "difference_to_bf16" in steps:
            differences.plot(steps["step"], steps["difference_to_bf16"], **style)
    curves.set_ylabel("bits per base")
    curves.legend(fontsize="small", ncols=2)
    differences.axhline(0.0, color="0.6", linewidth=0.8)
    differences.set_yscale("symlog", linthresh=0.01)  # the first steps differ by far the most
    differences.set_xlabel("optimizer step")
    differences.set_ylabel("minus mean of bf16")
    return curves, differences


def _two_axes() -> "tuple[Axes, Axes]":
    above, below = new_figure(7.0, 6.0).subplots(2, 1, sharex=True, height_ratios=(2, 1))
    return above, below
