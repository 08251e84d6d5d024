"""(seed, epoch, index) -> window: a pure function, arranged so that a block of the genome is read once and used often.

Reading a few kilobases at random is slow in every store; reading megabases in a row is fast. So an epoch is planned
in three levels, all of them functions of (seed, epoch) alone, never of the number of workers or ranks:

1. The global axis is cut into **blocks** on a fixed grid and between sources; a window belongs to the block in
   which it starts.
2. Blocks are shuffled and dealt into **groups** that together fit in memory; the windows of a group are shuffled
   among themselves. A batch therefore mixes windows of as many places as the group has blocks.
3. Groups are dealt to **lanes**; the epoch takes a run of windows (a batch) from each lane in turn. Workers and ranks
   that take every n-th batch stay within their own lanes, so a block is decoded once, whatever the number of workers.

Shuffles sort by a 64-bit hash (SplitMix64), so they don't depend on the NumPy version.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from genomoe.data.corpus import Segments
from genomoe.genome.errors import GenoMoEError

# Streams of random numbers: one tag each, so that no two uses share a hash.
_BLOCK_ORDER, _WINDOW_ORDER, _PHASE, _DRAW, _START, _STRAND, _THIN = range(1, 8)


def mix64(values: np.ndarray | np.uint64 | int) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea & Flood 2014): 64-bit integers to well-mixed 64-bit integers."""
    z = np.asarray(values, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def hash64(key: tuple[int, ...], values: np.ndarray) -> np.ndarray:
    """A uniform 64-bit hash of each value under `key` (integers such as seed, epoch and stream)."""
    return mix64(mix64(np.asarray(values).astype(np.uint64) + np.uint64(1)) ^ _key_hash(key))


@lru_cache
def _key_hash(key: tuple[int, ...]) -> np.uint64:
    state: np.ndarray | np.uint64 = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for part in key:
            state = mix64(state + np.uint64(part & 0xFFFFFFFFFFFFFFFF) * np.uint64(0x9E3779B97F4A7C15))
    return np.uint64(state)


def uniform(key: tuple[int, ...], values: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) for each value under `key`."""
    return (hash64(key, values) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(key: tuple[int, ...], count: int) -> np.ndarray:
    """A permutation of range(count) that depends on `key` only."""
    return np.argsort(hash64(key, np.arange(count)), kind="stable")


AHEAD = 1024
"""Windows worked out at a time: for one of them it takes as long as for hundreds."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How windows are cut and ordered. Everything here is part of what a resumed run must share."""

    window: int
    """Bases of a window."""
    seed: int = 0
    """Any integer."""
    stride: int | None = None
    """Bases between window starts; None means `window`, so that windows don't overlap."""
    mode: Literal["stride", "random"] = "random"
    """'stride' cuts windows on a fixed grid from each segment's start, the last one short, so that every base is
    covered. 'random' without replacement cuts whole windows on a grid shifted anew each epoch, and leaves out what
    is over at the two ends (less than two windows, another stretch each epoch); with replacement windows start
    anywhere. A segment shorter than the window always gives one window of its own length."""
    replacement: bool = False
    """False: every window of the grid once an epoch. True: independent draws by source weight."""
    samples_per_epoch: int | None = None
    """Windows in an epoch with replacement; None means as many as the grid has."""
    reverse_complement: float = 0.5
    """Probability that a window is read from the minus strand."""
    shuffle: bool = True
    """False keeps genome order (validation)."""
    block_bases: int = 1 << 20
    """Bases of a block, raised to at least four windows."""
    group_bases: int = 1 << 24
    """Bases of the blocks that are shuffled together."""
    lanes: int = 8
    """Groups in use at the same time; total memory is about lanes x group_bases, shared by the workers."""
    lane_run: int = 1
    """Windows taken from a lane before the next lane's turn: the batch size."""

    def __post_init__(self) -> None:
        for name in ("window", "block_bases", "group_bases", "lanes", "lane_run"):
            if getattr(self, name) < 1:
                raise GenoMoEError(f"sampling.{name} must be at least 1, got {getattr(self, name)}.")
        if self.stride is not None and self.stride < 1:
            raise GenoMoEError(f"sampling.stride must be at least 1, got {self.stride}.")
        if self.samples_per_epoch is not None and self.samples_per_epoch < 1:
            raise GenoMoEError(f"sampling.samples_per_epoch must be at least 1, got {self.samples_per_epoch}.")
        if self.samples_per_epoch is not None and not self.replacement:
            raise GenoMoEError("sampling.samples_per_epoch needs sampling.replacement=true.")
        if self.mode not in ("stride", "random"):
            raise GenoMoEError(f"sampling.mode must be 'stride' or 'random', got {self.mode!r}.")
        if not 0 <= self.reverse_complement <= 1:
            raise GenoMoEError(f"reverse_complement is a probability, got {self.reverse_complement}.")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class Windows(NamedTuple):
    """Some windows of an epoch, in order; the columns are parallel."""

    number: np.ndarray
    """int64, within the epoch."""
    starts: np.ndarray
    """int64, first base on the global axis."""
    ends: np.ndarray
    """int64, one past the last; ends - starts is shorter than the window at a segment's end."""
    blocks: np.ndarray
    """int64, the block each window starts in: row of EpochPlan.block_starts and block_ends."""
    sources: np.ndarray
    """int32, row of Corpus.sources."""
    minus: np.ndarray
    """bool, whether the window is read from the minus strand."""


class _Grid:
    """The windows of every segment on its grid, numbered along the global axis.

    A segment no longer than a window gives one window of its own length. A longer one gives, with `covering`, windows
    at 0, stride, 2 stride, ... of which the last is cut short at the segment's end; without it, whole windows, shifted
    by part of the slack. Where a segment has room for five windows or more, one is given up if need be, so that the
    slack allows every shift. The number of windows is the same in every epoch.
    """

    def __init__(
        self,
        segments: Segments,
        window: int,
        stride: int,
        *,
        covering: bool,
        slack_part: np.ndarray | float = 0.0,
    ) -> None:
        self.segments, self.window, self.stride = segments, window, stride
        lengths = segments.ends - segments.starts
        reach = np.maximum(lengths - window, 0)
        if covering:
            steps = np.minimum(-(-reach // stride), (lengths - 1) // stride)
        else:
            steps = np.where(reach >= 4 * stride, (reach - stride + 1) // stride, reach // stride)
        self.counts = 1 + steps
        slack = np.maximum(reach - steps * stride, 0)
        self.phases = (slack_part * (slack + 1)).astype(np.int64)
        self.ends = np.cumsum(self.counts)
        self.total = int(self.ends[-1]) if len(self.ends) else 0

    def starts(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Segment rows, first bases and ends of windows by number."""
        rows = np.searchsorted(self.ends, numbers, side="right")
        step = numbers - (self.ends[rows] - self.counts[rows])
        starts = self.segments.starts[rows] + self.phases[rows] + step * self.stride
        return rows, starts, np.minimum(starts + self.window, self.segments.ends[rows])

    def before(self, positions: np.ndarray) -> np.ndarray:
        """How many windows start before each global position."""
        rows = np.searchsorted(self.segments.starts, positions, side="left") - 1
        safe = np.maximum(rows, 0)
        inside = positions - self.segments.starts[safe] - self.phases[safe]
        within = np.clip(-(-inside // self.stride), 0, self.counts[safe])
        return np.where(rows < 0, 0, self.ends[safe] - self.counts[safe] + within)


class EpochPlan:
    """The windows of one epoch in order; `windows(lo, hi)` gives any run of them.

    Memory is proportional to the number of blocks and runs, not of windows.
    """

    def __init__(self, segments: Segments, source_weights: np.ndarray, config: SamplingConfig, epoch: int) -> None:
        if not len(segments.starts):
            raise GenoMoEError("No bases are left to sample from; loosen the filters of the corpus.")
        self.config, self.epoch, self.segments = config, epoch, segments
        self._key = (config.seed, epoch)
        stride = config.stride or config.window
        self.block_bases = max(config.block_bases, 4 * config.window)
        self._tiles = _Grid(segments, config.window, stride, covering=config.mode == "stride")
        self._grid = self._tiles
        if config.mode == "random" and config.replacement:
            self._grid = _Grid(segments, config.window, 1, covering=False)  # every possible start
        elif config.mode == "random":
            part = uniform((*self._key, _PHASE), np.arange(len(segments.starts)))
            self._grid = _Grid(segments, config.window, stride, covering=False, slack_part=part)
        self._make_blocks(np.asarray(source_weights, dtype=np.float64))
        self._make_groups()
        self._make_runs()
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()
        self._ahead = 0, self._windows(0, 0)

    def __len__(self) -> int:
        return int(self._run_ends[-1])

    def windows(self, lo: int, hi: int) -> Windows:
        """The windows number lo..hi-1 of the epoch."""
        if not 0 <= lo <= hi <= len(self):
            raise IndexError(f"windows {lo}..{hi} of an epoch of {len(self)}")
        first, ahead = self._ahead  # one attribute read: threads may share the plan
        if not first <= lo <= hi <= first + len(ahead.number):
            first, ahead = lo, self._windows(lo, min(max(hi, lo + AHEAD), len(self)))
            self._ahead = first, ahead
        return Windows(*(column[lo - first : hi - first] for column in ahead))

    def _windows(self, lo: int, hi: int) -> Windows:
        index = np.arange(lo, hi)
        runs = np.searchsorted(self._run_ends, index, side="right")
        place = self._run_first[runs] + index - (self._run_ends[runs] - self._run_sizes[runs])
        groups = self._lane_group(self._run_lanes[runs], place)
        numbers = np.empty(hi - lo, dtype=np.int64)
        blocks = np.empty(hi - lo, dtype=np.int64)
        for group in np.unique(groups):
            chosen = groups == group
            within = place[chosen] - self._group_place[group]
            units, offsets = self._unit_of(group, within)
            numbers[chosen], blocks[chosen] = offsets, units
        return self._resolve(index, blocks, numbers)

    def _make_blocks(self, weights: np.ndarray) -> None:
        """Units to be shuffled: a block, or one draw of a block, and how many windows each gives."""
        segments, grid = self.segments, self._grid
        cells = [
            np.arange(start // self.block_bases, (end - 1) // self.block_bases + 1) * self.block_bases
            for start, end in _merged_spans(segments, self.block_bases)
        ]
        borders = segments.starts[np.flatnonzero(np.diff(segments.sources, prepend=-1))]
        lows = np.unique(np.concatenate([*cells, borders]))  # a block holds one source, so that weights are exact
        highs = np.minimum((lows // self.block_bases + 1) * self.block_bases, np.append(lows[1:], np.iinfo(int).max))
        first = grid.before(lows)
        count = grid.before(highs) - first
        keep = count > 0
        self.block_starts, self.block_ends = lows[keep], highs[keep]
        first, count = first[keep], count[keep]
        self._block_first, self._block_counts = first, count
        rows, starts, _ = grid.starts(first)
        self.block_spans = starts, grid.starts(first + count - 1)[2]
        """Where the first window of each block starts and its last one ends, which may lie beyond the block."""
        sources = segments.sources[rows]
        if (weights < 0).any() or not (weights[np.unique(segments.sources)] > 0).any():
            raise GenoMoEError("Source weights must be non-negative, and one of them positive.")
        if self.config.replacement:
            self._draw_blocks(weights[sources] * count)
            return
        part = weights[sources] / weights[np.unique(segments.sources)].max()
        exact = count * part
        kept = np.floor(exact + uniform((*self._key, _THIN), self.block_starts)).astype(np.int64)
        self._units = np.flatnonzero(kept > 0)
        self._unit_sizes = kept[self._units]

    def _draw_blocks(self, mass: np.ndarray) -> None:
        wanted = self.config.samples_per_epoch or self._tiles.total
        size = max(1, round(self._tiles.total / len(mass)))
        draws = -(-wanted // size)
        targets = uniform((*self._key, _DRAW), np.arange(draws)) * mass.sum()
        self._units = np.minimum(np.searchsorted(np.cumsum(mass), targets, side="right"), len(mass) - 1)
        self._unit_sizes = np.full(draws, size, dtype=np.int64)
        self._unit_sizes[-1] = wanted - size * (draws - 1)

    def _make_groups(self) -> None:
        count = len(self._units)
        order = permutation((*self._key, _BLOCK_ORDER), count) if self.config.shuffle else np.arange(count)
        self._unit_order = order
        span = min(self.block_bases, int((self.segments.ends - self.segments.starts).sum())) + self.config.window
        spans = np.minimum(self._unit_sizes[order] * self.config.window, span)
        before = np.cumsum(spans) - spans
        group_of = before // self.config.group_bases
        self._group_starts = np.flatnonzero(np.diff(group_of, prepend=-1))
        sizes = np.add.reduceat(self._unit_sizes[order], self._group_starts)
        lanes = min(self.config.lanes, len(sizes)) if self.config.shuffle else 1
        self._lanes = lanes
        lane_of = np.arange(len(sizes)) % lanes
        self._group_place = np.empty(len(sizes), dtype=np.int64)
        self._lane_ends: list[np.ndarray] = []
        for lane in range(lanes):
            ends = np.cumsum(sizes[lane_of == lane])
            self._lane_ends.append(ends)
            self._group_place[lane_of == lane] = ends - sizes[lane_of == lane]

    def _make_runs(self) -> None:
        run = self.config.lane_run
        turns, lanes, sizes, firsts = [], [], [], []
        for lane, ends in enumerate(self._lane_ends):
            total = int(ends[-1])
            first = np.arange(0, total, run)
            turns.append(np.arange(len(first)))
            lanes.append(np.full(len(first), lane))
            firsts.append(first)
            sizes.append(np.minimum(run, total - first))
        turn, lane_of = np.concatenate(turns), np.concatenate(lanes)
        order = np.lexsort((lane_of, turn))
        self._run_lanes = lane_of[order]
        self._run_sizes = np.concatenate(sizes)[order]
        self._run_first = np.concatenate(firsts)[order]
        self._run_ends = np.cumsum(self._run_sizes)

    def _lane_group(self, lanes: np.ndarray, place: np.ndarray) -> np.ndarray:
        out = np.empty(len(lanes), dtype=np.int64)
        for lane in np.unique(lanes):
            chosen = lanes == lane
            nth = np.searchsorted(self._lane_ends[lane], place[chosen], side="right")
            out[chosen] = nth * self._lanes + lane
        return out

    def _unit_of(self, group: int, within: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For places inside a group's shuffled windows: the unit and the window's rank inside that unit."""
        stop = self._group_starts[group + 1] if group + 1 < len(self._group_starts) else len(self._unit_order)
        units = self._unit_order[self._group_starts[group] : stop]
        ends = np.cumsum(self._unit_sizes[units])
        order = self._orders.get(group)
        if order is None:
            order = (
                permutation((*self._key, _WINDOW_ORDER, int(group)), int(ends[-1]))
                if self.config.shuffle
                else np.arange(int(ends[-1]))
            )
            self._orders[group] = order
            if len(self._orders) > self._lanes + 1:
                self._orders.popitem(last=False)
        else:
            self._orders.move_to_end(group)
        flat = order[within]
        row = np.searchsorted(ends, flat, side="right")
        return units[row], flat - (ends[row] - self._unit_sizes[units[row]])

    def _resolve(self, index: np.ndarray, units: np.ndarray, ranks: np.ndarray) -> Windows:
        blocks = self._units[units]
        first, count = self._block_first[blocks], self._block_counts[blocks]
        if self.config.replacement:
            numbers = first + (uniform((*self._key, _START), index) * count).astype(np.int64)
        else:
            numbers = first + ranks
            thinned = self._unit_sizes[units] < count
            if thinned.any():
                numbers = numbers.copy()
                for unit in np.unique(units[thinned]):
                    chosen = units == unit
                    block = self._units[unit]
                    key = (*self._key, _THIN, int(self.block_starts[block]))
                    subset = permutation(key, int(self._block_counts[block]))
                    numbers[chosen] = (
                        self._block_first[block] + np.sort(subset[: self._unit_sizes[unit]])[ranks[chosen]]
                    )
        rows, starts, ends = self._grid.starts(numbers)
        strand = uniform((*self._key, _STRAND), index) < self.config.reverse_complement
        return Windows(index, starts, ends, blocks, self.segments.sources[rows], strand)


def _merged_spans(segments: Segments, gap: int) -> list[tuple[int, int]]:
    """Segments joined where less than `gap` bases lie between them: few spans even for 100,000 contigs."""
    breaks = np.flatnonzero(segments.starts[1:] - segments.ends[:-1] >= gap) + 1
    firsts = np.concatenate([[0], breaks])
    lasts = np.concatenate([breaks, [len(segments.starts)]]) - 1
    return list(zip(segments.starts[firsts].tolist(), segments.ends[lasts].tolist(), strict=True))
