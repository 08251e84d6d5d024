"""The epoch plan: every window once, nothing outside a segment, weights respected, order a function of the seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genomoe.data.corpus import Segments
from genomoe.data.sampling import EpochPlan, SamplingConfig, Windows, hash64, permutation, uniform
from genomoe.genome.errors import GenoMoEError


@st.composite
def layouts(draw):
    """Disjoint segments of up to two sources, with gaps."""
    count = draw(st.integers(1, 12))
    place, starts, ends, sources = 0, [], [], []
    for number in range(count):
        place += draw(st.integers(0, 30))
        length = draw(st.integers(1, 120))
        starts.append(place)
        ends.append(place + length)
        sources.append(min(1, number * 2 // count))
        place += length
    return Segments(np.array(starts), np.array(ends), np.array(sources, dtype=np.int32))


small = {
    "window": st.integers(1, 40),
    "stride": st.one_of(st.none(), st.integers(1, 60)),
    "mode": st.sampled_from(["stride", "random"]),
    "block_bases": st.integers(1, 200),
    "group_bases": st.integers(1, 400),
    "lanes": st.integers(1, 5),
    "lane_run": st.integers(1, 5),
    "seed": st.integers(-3, 3),
    "shuffle": st.booleans(),
}


def everything(plan: EpochPlan) -> Windows:
    return plan.windows(0, len(plan))


@settings(max_examples=100, deadline=None)
@given(layouts(), st.fixed_dictionaries(small), st.booleans(), st.randoms(use_true_random=False))
def test_windows_do_not_depend_on_how_they_are_asked_for(segments, options, replacement, random):
    config = SamplingConfig(**options, replacement=replacement)
    plan, other = EpochPlan(segments, np.ones(2), config, 0), EpochPlan(segments, np.ones(2), config, 0)
    whole = everything(plan)
    for _ in range(10):
        lo, hi = sorted(random.randint(0, len(plan)) for _ in range(2))
        for found, column in zip(other.windows(lo, hi), whole, strict=True):
            assert np.array_equal(found, column[lo:hi])
    first, last = plan.block_spans
    assert (first[whole.blocks] <= whole.starts).all()
    assert (whole.ends <= last[whole.blocks]).all()
    if not replacement:  # the spans are as tight as can be
        for block in np.unique(whole.blocks):
            mine = whole.blocks == block
            assert (first[block], last[block]) == (whole.starts[mine].min(), whole.ends[mine].max())


@settings(max_examples=300, deadline=None)
@given(layouts(), st.fixed_dictionaries(small), st.integers(0, 3))
def test_without_replacement_every_window_comes_once(segments, options, epoch):
    config = SamplingConfig(**options)
    plan = EpochPlan(segments, np.ones(2), config, epoch)
    windows = everything(plan)
    assert np.array_equal(windows.number, np.arange(len(plan)))
    assert len(np.unique(windows.starts)) == len(plan)
    rows = np.searchsorted(segments.starts, windows.starts, side="right") - 1
    assert (windows.ends <= segments.ends[rows]).all()
    assert (windows.ends > windows.starts).all()
    assert np.array_equal(windows.sources, segments.sources[rows])
    assert (plan.block_starts[windows.blocks] <= windows.starts).all()
    assert (windows.starts < plan.block_ends[windows.blocks]).all()
    stride = config.stride or config.window
    for row in range(len(segments.starts)):
        mine = np.sort(windows.starts[rows == row])
        length = segments.ends[row] - segments.starts[row]
        assert (np.diff(mine) == stride).all()
        if config.mode == "stride":
            assert mine[0] == segments.starts[row]
            if stride <= config.window:  # every base is covered
                assert mine[-1] + config.window >= segments.ends[row]
        elif length >= config.window:
            assert (windows.ends - windows.starts)[rows == row].min() == config.window
            reach = length - config.window
            assert len(mine) == 1 + ((reach - stride + 1) // stride if reach >= 4 * stride else reach // stride)
    if not config.shuffle:
        assert (np.diff(windows.starts) > 0).all()


@settings(max_examples=200, deadline=None)
@given(layouts(), st.fixed_dictionaries(small), st.data())
def test_any_run_of_windows_is_that_part_of_the_whole(segments, options, data):
    replacement = data.draw(st.booleans())
    plan = EpochPlan(segments, np.array([1.0, 2.0]), SamplingConfig(**options, replacement=replacement), 1)
    whole = everything(plan)
    low = data.draw(st.integers(0, len(plan)))
    high = data.draw(st.integers(low, len(plan)))
    fresh = EpochPlan(segments, np.array([1.0, 2.0]), SamplingConfig(**options, replacement=replacement), 1)
    for part, column in zip(fresh.windows(low, high), whole, strict=True):
        assert np.array_equal(part, column[low:high])


@settings(max_examples=100, deadline=None)
@given(layouts(), st.fixed_dictionaries(small), st.integers(1, 300))
def test_with_replacement_windows_stay_inside_and_the_count_is_kept(segments, options, samples):
    config = SamplingConfig(**options, replacement=True, samples_per_epoch=samples)
    plan = EpochPlan(segments, np.ones(2), config, 0)
    windows = everything(plan)
    assert len(plan) == samples
    rows = np.searchsorted(segments.starts, windows.starts, side="right") - 1
    assert (windows.starts >= segments.starts[rows]).all()
    assert (windows.ends <= segments.ends[rows]).all()
    assert np.array_equal(windows.sources, segments.sources[rows])
    lengths = segments.ends[rows] - segments.starts[rows]
    if config.mode == "random":
        assert ((windows.ends - windows.starts) == np.minimum(config.window, lengths)).all()
    assert (plan.block_starts[windows.blocks] <= windows.starts).all()
    assert (windows.starts < plan.block_ends[windows.blocks]).all()


def two_sources(bases: int = 400_123) -> Segments:
    return Segments(np.array([0, bases]), np.array([bases, 2 * bases]), np.array([0, 1], dtype=np.int32))


@pytest.mark.parametrize("mode", ["stride", "random"])
def test_source_weights_with_replacement(mode):
    config = SamplingConfig(
        window=100, replacement=True, mode=mode, samples_per_epoch=40_000, block_bases=1000, group_bases=50_000
    )
    windows = everything(EpochPlan(two_sources(), np.array([1.0, 3.0]), config, 0))
    assert np.mean(windows.sources == 1) == pytest.approx(0.75, abs=0.02)
    zero = everything(EpochPlan(two_sources(), np.array([0.0, 3.0]), config, 0))
    assert (zero.sources == 1).all()


def test_source_weights_without_replacement_thin_the_lighter_source():
    config = SamplingConfig(window=100, block_bases=1000, group_bases=50_000)
    first, second = (everything(EpochPlan(two_sources(), np.array([1.0, 4.0]), config, e)) for e in (0, 1))
    for windows in (first, second):
        assert len(np.unique(windows.starts)) == len(windows.starts)
        assert (windows.sources == 1).sum() == 4000
        assert (windows.sources == 0).sum() == pytest.approx(1000, abs=60)
    assert set(first.starts[first.sources == 0]) != set(second.starts[second.sources == 0])


def test_random_starts_are_uniform():
    segments = Segments(np.array([0]), np.array([100_000]), np.array([0], dtype=np.int32))
    config = SamplingConfig(window=1000, replacement=True, samples_per_epoch=100_000, block_bases=5000)
    starts = everything(EpochPlan(segments, np.ones(1), config, 0)).starts
    counts, _ = np.histogram(starts, bins=20, range=(0, 99_001))
    assert counts.min() > 0.85 * counts.mean()
    assert counts.max() < 1.15 * counts.mean()


def test_the_grid_of_a_long_segment_takes_every_shift():
    segments = Segments(np.array([0]), np.array([1200]), np.array([0], dtype=np.int32))  # exactly 100 windows
    config = SamplingConfig(window=12)
    shifts = {int(everything(EpochPlan(segments, np.ones(1), config, e)).starts.min() % 12) for e in range(200)}
    assert shifts == set(range(12))


def test_strands_are_half_and_half_and_fixed_by_the_seed():
    config = SamplingConfig(window=100)
    windows = everything(EpochPlan(two_sources(), np.ones(2), config, 0))
    assert windows.minus.mean() == pytest.approx(0.5, abs=0.02)
    again = everything(EpochPlan(two_sources(), np.ones(2), config, 0))
    assert np.array_equal(windows.minus, again.minus)
    other = everything(EpochPlan(two_sources(), np.ones(2), SamplingConfig(window=100, seed=1), 0))
    assert not np.array_equal(windows.starts, other.starts)


def test_batches_mix_places_and_blocks_are_read_once():
    """Ten megabases in blocks of 2^18: neighbours in a batch are megabases apart, yet each block is visited once."""
    segments = Segments(np.array([0]), np.array([10_000_000]), np.array([0], dtype=np.int32))
    config = SamplingConfig(window=1000, block_bases=1 << 18, group_bases=1 << 22, lanes=2, lane_run=16)
    windows = everything(EpochPlan(segments, np.ones(1), config, 0))
    distance = np.abs(np.diff(windows.starts))
    assert np.median(distance) > 1_000_000
    for lane in range(2):
        blocks = windows.blocks[(np.arange(len(windows.blocks)) // 16) % 2 == lane]
        groups = [set(part) for part in np.array_split(blocks, max(1, len(blocks) // 4200))]
        assert sum(map(len, groups)) <= len(set(blocks)) + max(map(len, groups))


def test_a_hundred_thousand_small_contigs_are_planned_quickly():
    lengths = np.random.default_rng(0).integers(200, 3000, 100_000)
    ends = np.cumsum(lengths)
    segments = Segments(ends - lengths, ends, np.zeros(100_000, dtype=np.int32))
    plan = EpochPlan(segments, np.ones(1), SamplingConfig(window=1024, mode="stride"), 0)
    windows = everything(plan)
    assert len(np.unique(windows.starts)) == len(plan)
    assert int((windows.ends - windows.starts).sum()) == int(lengths.sum())


def test_positions_past_two_to_the_31():
    start = (1 << 31) - 5000
    segments = Segments(np.array([start]), np.array([start + 10_000]), np.array([0], dtype=np.int32))
    windows = everything(EpochPlan(segments, np.ones(1), SamplingConfig(window=100, mode="stride"), 0))
    assert windows.starts.min() == start
    assert windows.ends.max() == start + 10_000


def test_hashes_are_what_they_were():
    """The order of every published run hangs on these numbers."""
    assert hash64((1, 2, 3), np.arange(3)).tolist() == [
        10367161747497984765,
        11162872676378339006,
        11341791844062387154,
    ]
    assert permutation((7,), 8).tolist() == [3, 4, 6, 0, 1, 7, 2, 5]
    assert abs(uniform((5,), np.arange(10_000)).mean() - 0.5) < 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0},
        {"window": 5, "stride": 0},
        {"window": 5, "mode": "x"},
        {"window": 5, "reverse_complement": 2},
        {"window": 5, "samples_per_epoch": 5},
        {"window": 5, "replacement": True, "samples_per_epoch": 0},
        {"window": 5, "lanes": 0},
    ],
)
def test_bad_settings_are_refused(options):
    with pytest.raises(GenoMoEError):
        SamplingConfig(**options)


def test_nothing_to_sample_from_is_an_error():
    empty = Segments(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))
    with pytest.raises(GenoMoEError, match="No bases"):
        EpochPlan(empty, np.ones(1), SamplingConfig(window=5), 0)
    with pytest.raises(GenoMoEError, match="weights"):
        EpochPlan(two_sources(), np.zeros(2), SamplingConfig(window=5), 0)
