"""`genomoe embed` and `routing` on windows and BED intervals: the right bases in every row, written as it goes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pyarrow import parquet

from genomoe import cli
from genomoe.commands import embed, routing
from genomoe.genome.alphabet import NucleotideTokenizer, reverse_complement
from genomoe.inference.predictor import Predictor, from_pretrained
from genomoe.model.config import ModelConfig
from genomoe.model.pretrained import save_pretrained
from genomoe.model.transformer import GenoMoEModel

BASES = {"chr1": 900, "chr2": 70, "chr3": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    torch.manual_seed(0)
    config = ModelConfig.preset("tiny", num_layers=1, hidden_size=32, head_size=8, expert_size=16, max_context=128)
    save_pretrained(GenoMoEModel(config), NucleotideTokenizer().to_dict(), folder / "model")
    rng = np.random.default_rng(3)
    letters = {name: "".join(rng.choice(list("ACGTacgtN"), size)) for name, size in BASES.items()}
    (folder / "ref.fa").write_text("".join(f">{name}\n{text}\n" for name, text in letters.items()))
    return folder


@pytest.fixture(scope="module")
def predictor(folder: Path) -> Predictor:
    return from_pretrained(folder / "model", device="cpu")


def letters_of(folder: Path) -> dict[str, str]:
    lines = (folder / "ref.fa").read_text().split()
    return {name[1:]: text for name, text in zip(lines[::2], lines[1::2], strict=True)}


def call(folder: Path, *arguments: object, command: str = "embed") -> int:
    with pytest.raises(SystemExit) as done:
        cli.main([command, str(folder / "ref.fa"), "-m", str(folder / "model"), *map(str, arguments)])
    return int(done.value.code or 0)


def check_vectors(table: pd.DataFrame, texts: list[str | bytes], predictor: Predictor, **options: object) -> None:
    vectors = table[[f"e{i}" for i in range(32)]].to_numpy()
    np.testing.assert_allclose(vectors, predictor.embed(texts, **options), rtol=1e-4, atol=1e-5)


def test_a_row_for_every_window(
    folder: Path, tmp_path: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed, "PART_ROWS", 7)
    sizes = []
    whole = Predictor.embed
    monkeypatch.setattr(Predictor, "embed", lambda self, part, **o: sizes.append(len(part)) or whole(self, part, **o))
    assert call(folder, "--window", 64, "--stride", 40, "--out", tmp_path / "w.parquet", "--strands", "both") == 0
    assert sizes == [7, 7, 7, 4], "never more than a part at once"
    assert parquet.ParquetFile(tmp_path / "w.parquet").num_row_groups == 4
    table = pd.read_parquet(tmp_path / "w.parquet")
    assert list(table.columns[:4]) == ["contig", "start", "end", "e0"]
    expected = [("chr1", start, min(start + 64, 900)) for start in range(0, 841, 40)]
    expected += [("chr2", 0, 64), ("chr2", 40, 70), ("chr3", 0, 64)]
    places = list(table[["contig", "start", "end"]].itertuples(index=False, name=None))
    assert places == expected
    letters = letters_of(folder)
    check_vectors(table, [letters[contig][start:end] for contig, start, end in places], predictor, strands="both")
    assert call(folder, "--window", 64, "--stride", 40, "--out", tmp_path / "w.tsv", "--strands", "both") == 0
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "w.tsv", sep="\t"), table, check_dtype=False, rtol=1e-5)


def test_windows_are_those_of_training(folder: Path, tmp_path: Path) -> None:
    from genomoe.data.open import open_corpus
    from genomoe.data.sampling import EpochPlan, SamplingConfig

    assert call(folder, "--window", 50, "--out", tmp_path / "w.parquet") == 0
    table = pd.read_parquet(tmp_path / "w.parquet")
    corpus = open_corpus(folder / "ref.fa")
    config = SamplingConfig(window=50, mode="stride", shuffle=False)
    windows = EpochPlan(corpus.segments, np.ones(1), config, 0)
    assert len(table) == len(windows)
    offsets = table["contig"].map(dict(zip(corpus.contigs.names, corpus.contigs.offsets.tolist(), strict=True)))
    assert sorted(offsets + table["start"]) == sorted(windows.windows(0, len(windows)).starts.tolist())


def test_intervals_of_a_bed_file(folder: Path, tmp_path: Path, predictor: Predictor) -> None:
    lines = ["chr1\t10\t100\tpeak1\t0\t-", "chr3\t0\t64\tpeak#2\t0\t+", "chr1\t0\t1\tpeak3\t0\t."]
    bed = tmp_path / "x.bed"
    bed.write_text("track name=x\n# a comment\n" + "\n".join(lines) + "\n")
    letters = letters_of(folder)
    assert call(folder, "--regions", bed, "--out", tmp_path / "r.tsv") == 0
    table = pd.read_csv(tmp_path / "r.tsv", sep="\t")
    assert table[["contig", "start", "end", "name", "strand"]].to_numpy().tolist() == [
        ["chr1", 10, 100, "peak1", "-"],
        ["chr3", 0, 64, "peak#2", "+"],
        ["chr1", 0, 1, "peak3", "+"],
    ]
    minus = reverse_complement(letters["chr1"][10:100].encode())
    check_vectors(table, [minus, letters["chr3"], letters["chr1"][:1]], predictor)
    assert call(folder, "--regions", bed, "--window", 60, "--out", tmp_path / "rw.parquet") == 0
    table = pd.read_parquet(tmp_path / "rw.parquet")
    assert table["name"].tolist() == ["peak1", "peak1", "peak#2", "peak#2", "peak3"]
    assert table["start"].tolist() == [10, 70, 0, 60, 0]
    check_vectors(table.iloc[[1]], [reverse_complement(letters["chr1"][70:100].encode())], predictor)


def test_memory_does_not_grow_with_the_genome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, predictor: Predictor
) -> None:
    def peak(bases: int) -> int:
        fasta = tmp_path / f"{bases}.fa"
        fasta.write_text(">c\n" + "ACGT" * (bases // 4) + "\n")
        tracemalloc.start()
        try:
            with pytest.raises(SystemExit) as done:
                cli.main(["embed", str(fasta), "-m", "none", "--window", "4", "-o", str(tmp_path / "o.parquet")])
            assert not done.value.code
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    monkeypatch.setattr(embed, "PART_ROWS", 256)
    monkeypatch.setattr(embed, "from_pretrained", lambda *_, **__: predictor)
    monkeypatch.setattr(Predictor, "embed", lambda self, part, **_: np.zeros((len(part), 256), np.float32))
    peak(4096)  # what is made once
    small, large = peak(4 * 1024), peak(4 * 16 * 1024)
    held_whole = 4 * 256 * 16 * 1024  # float32 vectors of the larger one: 16 MiB
    assert large - small < held_whole / 16


def test_mistakes_are_sentences_before_anything_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def bed(text: str) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.bed"
        path.write_text(text)
        return path

    out = ["--out", tmp_path / "o.parquet"]
    for arguments, message in [
        (out, "record 'chr1' has 900 bases, but the model reads at most 128 at once: cut it with --window"),
        (
            [*out, "--window", 129],
            "A window has 129 bases, but the model reads at most 128 at once: give a shorter --window",
        ),
        ([*out, "--stride", 5], "give their length with --window"),
        (["--window", 9, "--out", tmp_path / "o.npz"], "must end in .parquet, .tsv"),
        ([*out, "--window", 9, "--pool", "none"], "go to a .npz file, of whole records"),
        ([*out, "--window", 9, "--layer", 5], "There is no layer 5"),
        ([*out, "--regions", tmp_path / "none.bed"], "none.bed does not exist"),
        ([*out, "--regions", folder / "ref.fa"], "takes a BED file"),
        ([*out, "--regions", bed("chr1\t0\t9\nchr9\t0\t9\n")], "row 2: "),
        ([*out, "--regions", bed("chr1\t880\t901\n")], "reaches beyond contig 'chr1', which has 900 bases"),
        ([*out, "--regions", bed("chr1\t0\t129\n")], "chr1 [0, 129) has 129 bases"),
        ([*out, "--regions", bed("chr1\t7\t7\n"), "--window", 9], "row 1: chr1 [7, 7) has 0 bases: leave it out"),
    ]:
        assert call(folder, *arguments) == 1, message
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not list(tmp_path.glob("*o.*"))


def test_routing_in_windows(
    folder: Path,
    tmp_path: Path,
    predictor: Predictor,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def route(name: str) -> str:
        assert call(folder, "--window", 100, "--out", tmp_path / name, command="routing") == 0
        return capsys.readouterr().out

    in_one = route("one.tsv")
    monkeypatch.setattr(routing, "PART_BASES", 150)
    assert route("parts.tsv") == in_one, "the load that is printed is that of all parts"
    assert route("parts.parquet") == in_one
    assert parquet.ParquetFile(tmp_path / "parts.parquet").num_row_groups == 6
    keys = ["sequence", "position", "token", "layer", "expert_1", "expert_2"]
    table = pd.read_csv(tmp_path / "parts.tsv", sep="\t")
    pd.testing.assert_frame_equal(table[keys], pd.read_csv(tmp_path / "one.tsv", sep="\t")[keys])
    letters = letters_of(folder)
    for name, text in letters.items():
        rows = table[(table["sequence"] == name) & (table["layer"] == 0)]
        assert rows["position"].tolist() == list(range(len(text)))
        assert "".join(rows["token"]) == text.upper()
    window = table[(table["sequence"] == "chr1") & table["position"].between(800, 899)]
    alone = predictor.routing([letters["chr1"][800:900]])
    assert window["expert_1"].tolist() == alone["expert_1"].tolist()
    assert call(folder, "--out", tmp_path / "o.tsv", command="routing") == 1
    assert "cut it with --window" in capsys.readouterr().err
