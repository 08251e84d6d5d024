"""A variant report as one self-contained HTML file: tables, warnings, and the pictures as embedded PNG."""

from __future__ import annotations

import base64
import html
import io
from typing import Any

import numpy as np
import pandas as pd

from genomoe.evaluation.discrimination import calibration, precision_recall_curve, roc_curve
from genomoe.evaluation.variant_effects import VariantReport, probability

__all__ = ["draw_report", "html_report"]

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}th,td{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}"
    "th:first-child,td:first-child{text-align:left}.warning{background:#fff3cd;padding:.5em 1em;margin:.5em 0}"
    "img{max-width:100%}"
)
MOST_CURVES = 6


def draw_report(report: VariantReport) -> Any:
    """A matplotlib figure: ROC, precision-recall and calibration, or a scatter for a continuous label."""
    from matplotlib.figure import Figure

    from genomoe.plot.variants import plot_calibration, plot_curves, plot_scatter

    rows = report.rows
    labels = rows["label"].to_numpy(dtype=float)
    names = list(dict.fromkeys(report.overall["score"]))[:MOST_CURVES]
    if not report.binary:
        figure = Figure(figsize=(4.5, 4), layout="constrained")
        plot_scatter(rows["model"].to_numpy(), labels, figure.subplots(), xlabel="model", ylabel="label")
        return figure
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    roc = {name: roc_curve(labels, rows[name].to_numpy()) for name in names}
    plot_curves(roc, axes[0], x="false positive rate", y="true positive rate", diagonal=True)
    recall = {name: precision_recall_curve(labels, rows[name].to_numpy())[::-1] for name in names}
    plot_curves(recall, axes[1], x="recall", y="precision")
    plot_calibration(calibration(labels, probability(rows)), axes[2])
    axes[2].set_title("logistic regression on the model's score, held-out folds", fontsize="small")
    return figure


def html_report(report: VariantReport) -> str:
    """The whole report; needs matplotlib for its pictures."""
    rows = report.rows
    positives = f", {int((rows['label'] > 0).sum()):,} of them positive" if report.binary else ""
    parts = [
        f"<h1>{html.escape(report.name)}</h1>",
        f"<p>{len(rows):,} variants{positives}. {html.escape(str(report.settings['score']))}. Model: "
        f"{html.escape(str(report.settings['model']))}. Intervals are 95 % bootstrap. "
        "Larger always means a larger effect.</p>",
        *(f'<p class="warning">{html.escape(text)}</p>' for text in report.warnings),
        "<h2>All variants</h2>",
        _overall(report.overall),
        f'<img alt="curves" src="data:image/png;base64,{_png(report)}">',
        "<h2>Within classes and groups</h2>",
        _within(report.within, report.within_mean),
    ]
    if report.groupings:
        told = ", ".join(f"{name}: {value:.3f}" for name, value in report.groupings.items())
        parts.append(f"<p>AUROC of the grouping alone, learnt on other variants: {html.escape(told)}.</p>")
    if report.left_out:
        told = "; ".join(f"{reason}: {count:,}" for reason, count in report.left_out.items())
        parts.append(f"<h2>Left out</h2><p>{html.escape(told)}</p>")
    head = f'<meta charset="utf-8"><title>{html.escape(report.name)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html><html lang="en">{head}{body}</html>\n'


def _overall(table: pd.DataFrame) -> str:
    cells = table.assign(text=[f"{r.value:.3f} ({r.low:.3f} to {r.high:.3f})" for r in table.itertuples()]).pivot(
        index="score", columns="metric", values="text"
    )
    return _table(cells.reindex(list(dict.fromkeys(table["score"]))))


def _within(within: pd.DataFrame, means: pd.DataFrame) -> str:
    if not len(within):
        return "<p>The set has no classes or groups.</p>"
    parts = []
    for grouping, part in within.groupby("grouping"):
        scores = list(dict.fromkeys(part["score"]))
        cells = part.pivot(index="group", columns="score", values="value")[scores]
        counts = part.drop_duplicates("group").set_index("group")[["rows", "positives"]]
        shown = counts.join(cells).sort_values("rows", ascending=False).head(25)
        mean = means[means["grouping"] == grouping].set_index("score")["value"]
        shown.loc["mean, weighted by rows"] = [counts["rows"].sum(), counts["positives"].sum(), *mean[scores]]
        shown[["rows", "positives"]] = shown[["rows", "positives"]].astype(int)
        parts.append(f"<h3>{html.escape(str(grouping))}</h3>" + _table(shown))
    return "\n".join(parts)


def _table(table: pd.DataFrame) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, float | np.floating):
            return "" if np.isnan(value) else f"{value:.3f}"
        return html.escape(str(value))

    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in ["", *table.columns])
    rows = "".join(
        f"<tr><td>{html.escape(str(index))}</td>" + "".join(f"<td>{cell(v)}</td>" for v in values) + "</tr>"
        for index, values in zip(table.index, table.itertuples(index=False), strict=True)
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _png(report: VariantReport) -> str:
    stream = io.BytesIO()
    draw_report(report).savefig(stream, format="png", dpi=110)
    return base64.b64encode(stream.getvalue()).decode()
