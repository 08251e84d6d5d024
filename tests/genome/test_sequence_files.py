"""GenBank beside FASTA, and which files a path stands for."""

import gzip

import pytest
from Bio import SeqIO
from Bio.Seq import Seq
from Bio.SeqRecord import SeqRecord

from genomoe.genome.coordinates import Interval
from genomoe.genome.errors import GenoMoEError, InputError
from genomoe.genome.fasta import Reference
from genomoe.genome.sequence_files import expand_paths, read_genbank, resolve_path, sequence_format


def genbank(path, records: dict[str, str]):
    SeqIO.write(
        [
            SeqRecord(Seq(text), id=name, name=name.split(".")[0], annotations={"molecule_type": "DNA"})
            for name, text in records.items()
        ],
        path,
        "genbank",
    )
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["x.gb", "x.gbff", "x.txt"])
def test_genbank_letters_come_upper_case(tmp_path, name, packed):
    path = genbank(tmp_path / name, {"AB1.1": "acgtnACGTRY" * 20, "AB2.1": "TTTT"})
    if packed:
        path = tmp_path / f"{name}.gz"
        path.write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert sequence_format(path) == "genbank"
    assert [record.header.name for record in read_genbank(path)] == ["AB1.1", "AB2.1"]
    reference = Reference(path)
    assert reference.contigs == {"AB1.1": 220, "AB2.1": 4}
    assert reference.fetch(Interval("AB1.1", 0, 11)) == b"ACGTNACGTRY"  # ORIGIN's lower case is no masking
    with pytest.raises(GenoMoEError, match="by position"):
        Reference(path, in_memory=False)


def test_broken_genbank_is_one_sentence(tmp_path):
    path = genbank(tmp_path / "x.gb", {"AB1.1": "acgt" * 40})
    text = path.read_text()
    (tmp_path / "no-origin.gb").write_text(text[: text.index("ORIGIN")] + "CONTIG      join(AB9.1:1..160)\n//\n")
    with pytest.raises(InputError, match="no sequence"):
        list(read_genbank(tmp_path / "no-origin.gb"))
    (tmp_path / "twice.gb").write_text(text + text)
    with pytest.raises(InputError, match="used twice"):
        list(read_genbank(tmp_path / "twice.gb"))
    (tmp_path / "empty.gb").write_text("")
    with pytest.raises(InputError, match="no GenBank record"):
        list(read_genbank(tmp_path / "empty.gb"))
    (tmp_path / "broken.gb").write_text(text.replace("ORIGIN", "ORIGIN\n        x acgt"))
    with pytest.raises(InputError):
        list(read_genbank(tmp_path / "broken.gb"))
    (tmp_path / "protein.gb").write_text(text.replace("acgtacgtac", "acgtelpqac", 1))
    with pytest.raises(InputError, match="nucleotide"):
        Reference(tmp_path / "protein.gb")


def test_a_folder_stands_for_the_sequence_files_below_it(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("a.fa", "b.fna.gz", "deep/c.gbk", "notes.txt", "a.fa.fai", "x.fa.tmp"):
        (tmp_path / name).write_bytes(b">a\nAC\n")
    found = [str(path.relative_to(tmp_path)) for path in expand_paths(tmp_path)]
    assert found == ["a.fa", "b.fna.gz", "deep/c.gbk"]
    assert resolve_path("bundled:yeast").is_dir()
