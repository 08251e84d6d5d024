"""`genomoe bench loader` measures what it says, and its result file appears whole."""

import json

import numpy as np
import pytest

from genomoe.bench.loader import LoaderOptions, _bare, _dataset, make_inputs, measure_loaders, mixing
from genomoe.bench.report import envelope, write_result
from genomoe.data.store import ZarrCorpus


def test_rows_cover_every_implementation_and_are_flat(tmp_path):
    options = LoaderOptions(bases=2_000_000, windows=(1024,), workers=(1,), repeats=1, seconds=0.05)
    rows = measure_loaders(tmp_path, options)
    names = {(row["implementation"], row["workers"]) for row in rows}
    assert {(f"genomoe {kind}", n) for kind in ("zarr", "fasta", "bgzip") for n in (0, 1)} <= names
    assert {("bare pysam", 0), ("bare pyfaidx", 0), ("bare Biopython in memory", 0)} <= names
    for row in rows:
        assert row["mb_per_s"] > 0
        assert all(isinstance(value, str | int | float) for value in row.values())
        if row["implementation"].startswith("genomoe"):
            assert row["times_pysam_bgzip"] > 0
            assert 0 <= row["neighbours_in_one_block"] <= 1
    result = write_result(tmp_path / "sub" / "loader.json", rows)
    assert json.loads((tmp_path / "sub" / "loader.json").read_text()) == result
    assert set(result) == {"hardware", "versions", "commit", "date", "rows"}
    assert [file.name for file in (tmp_path / "sub").iterdir()] == ["loader.json"]


def test_every_bare_library_fetches_the_same_letters(tmp_path):
    paths = make_inputs(tmp_path, 2_000_000)
    store = ZarrCorpus(paths["genome.zarr"])
    rng = np.random.default_rng(0)
    fetchers = _bare(paths, {"zarr": store})
    for start in rng.integers(0, 190_000, 20).tolist():
        row = start % 10
        expected = store.read(int(store.contigs.offsets[row]) + start, int(store.contigs.offsets[row]) + start + 500)
        for name, fetch in fetchers.items():
            found = fetch((store.contigs.names[row], start, start + 500))
            letters = found if isinstance(found, bytes | str) else found.tobytes()
            assert (letters.encode() if isinstance(letters, str) else letters) == expected.tobytes(), name


def test_mixing_of_a_perfect_shuffle_is_recognised(tmp_path):
    paths = make_inputs(tmp_path, 2_000_000)
    mixed = mixing(_dataset(ZarrCorpus(paths["genome.zarr"]), 1024))  # all of it fits into one group
    assert mixed["neighbour_distance_part_of_corpus"] == pytest.approx(0.293, abs=0.03)


def test_a_failed_write_leaves_the_old_result(tmp_path):
    write_result(tmp_path / "x.json", [{"case": "a"}])
    with pytest.raises(ValueError, match="float"):
        write_result(tmp_path / "x.json", [{"case": float("nan")}])
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == [{"case": "a"}]
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
    assert envelope()["versions"]["python"]
