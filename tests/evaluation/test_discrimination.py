"""Ranking metrics beside scikit-learn, and what a grouping explains, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from genomoe.evaluation.discrimination import (
    METRICS,
    auprc,
    auroc,
    bootstrap,
    calibration,
    grouping_auroc,
    precision_recall_curve,
    roc_curve,
    spearman,
    summary,
    within_groups,
)


@pytest.fixture(params=[0, 1])
def data(request):
    random = np.random.default_rng(request.param)
    labels = (random.random(200) < 0.3).astype(float)
    scores = random.normal(size=200) + labels
    return labels, np.round(scores, 1) if request.param else scores  # the second has ties


def test_metrics_equal_scikit_learns(data):
    sklearn = pytest.importorskip("sklearn.metrics")
    stats = pytest.importorskip("scipy.stats")
    labels, scores = data
    assert auroc(labels, scores) == pytest.approx(sklearn.roc_auc_score(labels, scores))
    assert auprc(labels, scores) == pytest.approx(sklearn.average_precision_score(labels, scores))
    assert spearman(labels, scores) == pytest.approx(stats.spearmanr(labels, scores)[0])
    assert METRICS["mcc"](labels, scores) == pytest.approx(sklearn.matthews_corrcoef(labels, scores > 0.5))
    false, true, _ = sklearn.roc_curve(labels, scores, drop_intermediate=False)
    for got, expected in zip(roc_curve(labels, scores), (false, true), strict=True):
        np.testing.assert_allclose(got, expected)
    precision, recall = precision_recall_curve(labels, scores)
    expected_precision, expected_recall, _ = sklearn.precision_recall_curve(labels, scores)
    np.testing.assert_allclose(precision[::-1], expected_precision[:-1])
    np.testing.assert_allclose(recall[::-1], expected_recall[:-1])


def test_one_class_only_is_undefined():
    assert np.isnan(auroc(np.ones(4), np.arange(4.0)))
    assert np.isnan(bootstrap(auroc, np.ones(4), np.arange(4.0), repeats=5).low)
    assert np.isnan(spearman(np.arange(3.0), np.ones(3)))


def test_bootstrap_interval_holds_the_value_and_is_seeded(data):
    labels, scores = data
    first = bootstrap(auroc, labels, scores, repeats=200)
    assert first.low < first.value < first.high
    assert first == bootstrap(auroc, labels, scores, repeats=200)
    groups = np.repeat(np.arange(10), 20)
    assert bootstrap(auroc, labels, scores, groups=groups, repeats=200) != first


def test_grouping_alone_is_told():
    random = np.random.default_rng(0)
    groups = np.repeat(["a", "b"], 200)
    labels = (random.random(400) < np.repeat([0.1, 0.8], 200)).astype(float)
    scores = labels.mean() + np.repeat([0.0, 5.0], 200) + random.normal(size=400)
    assert grouping_auroc(labels, groups) > 0.8
    assert auroc(labels, scores) > 0.8
    table, mean = within_groups(auroc, labels, scores, groups)
    assert abs(mean - 0.5) < 0.1
    assert table["rows"].tolist() == [200, 200]
    assert abs(grouping_auroc(labels, random.permutation(groups)) - 0.5) < 0.1
    assert abs(grouping_auroc(labels, np.arange(400)) - 0.5) < 0.1  # groups of one row tell nothing


def test_small_groups_have_no_value():
    table, mean = within_groups(auroc, np.array([1.0, 0, 0]), np.array([1.0, 2, 3]), np.array(["a"] * 3))
    assert table["value"].isna().all()
    assert np.isnan(mean)


def test_calibration_bins():
    table = calibration(np.array([0.0, 0, 1, 1]), np.array([0.1, 0.2, 0.7, 0.8]), bins=2)
    assert table.values.tolist() == [[pytest.approx(0.15), 0.0, 2], [pytest.approx(0.75), 1.0, 2]]


def test_summary_is_one_row_a_score_and_metric(data):
    labels, scores = data
    table = summary(labels, {"model": scores, "none": np.zeros(200)}, ["auroc", "auprc"], repeats=20)
    assert table[["score", "metric"]].values.tolist() == [
        ["model", "auroc"], ["model", "auprc"], ["none", "auroc"], ["none", "auprc"]
    ]  # fmt: skip
    assert table["value"][2] == 0.5
    with pytest.raises(ValueError, match="one of auroc"):
        summary(labels, {"m": scores}, ["f1"])
