"""Labelled tables in the layouts their publishers use, each turned into one form.

Variant sets become a table with the columns contig, position (1-based), ref, alt, label (1 or 0, or a
number), class (consequence or locus, "" if unknown) and group (gene or matched set), and whatever else the
source had that is worth keeping. Sequence sets become sequence, label, split. What is left out is counted in
`dropped`.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from genomoe.genome.errors import GenoMoEError
from genomoe.genome.variant_files import open_variants

__all__ = [
    "LAYOUTS",
    "LabelledSet",
    "load_benchmark",
    "load_brca1_sge",
    "load_clinvar",
    "load_genomic_benchmarks",
    "load_mitomap",
    "load_proteingym",
    "load_traitgym",
]

STARS = {
    "practice_guideline": 4,
    "reviewed_by_expert_panel": 3,
    "criteria_provided,_multiple_submitters,_no_conflicts": 2,
    "criteria_provided,_single_submitter": 1,
    "criteria_provided,_conflicting_classifications": 1,
    "criteria_provided,_conflicting_interpretations": 1,
}
PATHOGENIC = {"Pathogenic", "Likely_pathogenic", "Pathogenic/Likely_pathogenic"}
BENIGN = {"Benign", "Likely_benign", "Benign/Likely_benign"}


@dataclass(frozen=True, kw_only=True)
class LabelledSet:
    """A labelled table and what was left out of it."""

    name: str
    table: pd.DataFrame
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason to number of rows."""

    @property
    def is_sequences(self) -> bool:
        return "sequence" in self.table.columns


def load_clinvar(path: str | Path, *, min_stars: int = 1) -> LabelledSet:
    """ClinVar's VCF: (likely) pathogenic 1, (likely) benign 0, by CLNSIG, at least `min_stars` review stars.

    class is the first molecular consequence of MC, group the first gene of GENEINFO.
    """
    source = open_variants(path)
    if "INFO" not in source.columns:
        raise GenoMoEError(f"{path} has no INFO column: ClinVar's layout is its VCF; a table is --task table.")
    rows, dropped = [], Counter[str]()
    for row in source.rows():
        info = _info(row.fields[7])
        significance = info.get("CLNSIG", "").split(",_")[0].split("|")[0]
        if significance not in PATHOGENIC | BENIGN:
            dropped["no clear significance"] += 1
            continue
        stars = STARS.get(info.get("CLNREVSTAT", ""), 0)
        if stars < min_stars:
            dropped[f"fewer than {min_stars} review stars"] += 1
            continue
        consequence = info.get("MC", "").split(",")[0].partition("|")[2]
        gene = info.get("GENEINFO", "").split("|")[0].split(":")[0]
        for alt in row.alts:
            label = int(significance in PATHOGENIC)
            rows.append((row.contig, row.position + 1, row.ref, alt, label, consequence, gene, row.id, stars))
    names = ["contig", "position", "ref", "alt", "label", "class", "group", "id", "stars"]
    return _labelled("ClinVar", pd.DataFrame(rows, columns=names), dropped, path)


def load_traitgym(path: str | Path) -> LabelledSet:
    """TraitGym's Parquet (or TSV): chrom, pos, ref, alt, label; consequence and match_group where present."""
    frame = _read_table(path)
    _need(frame, path, "chrom", "pos", "ref", "alt", "label")
    table = pd.DataFrame(
        {
            "contig": frame["chrom"].astype(str),
            "position": frame["pos"].astype(int),
            "ref": frame["ref"],
            "alt": frame["alt"],
            "label": frame["label"].astype(int),
            "class": frame["consequence"].astype(str) if "consequence" in frame else "",
            "group": frame["match_group"].astype(str) if "match_group" in frame else "",
        }
    )
    extra = frame.drop(columns=["chrom", "pos", "ref", "alt", "label", "consequence", "match_group"], errors="ignore")
    return _labelled("TraitGym", pd.concat([table, extra], axis=1), Counter(), path)


def load_brca1_sge(path: str | Path) -> LabelledSet:
    """BRCA1 saturation genome editing (Findlay 2018): LOF 1; functional and intermediate 0. hg19 positions.

    The supplementary table as .xlsx (needs openpyxl), or saved as CSV or TSV; lines before its header are
    skipped. Columns kept: score (function.score.mean; low is loss of function) and class (consequence).
    """
    frame = _read_table(path, header_with="func.class")
    _need(frame, path, "chromosome", "position (hg19)", "reference", "alt", "func.class", "function.score.mean")
    known = frame["func.class"].isin(["LOF", "INT", "FUNC"])
    kept = frame[known]
    table = pd.DataFrame(
        {
            "contig": kept["chromosome"].astype(str).str.removesuffix(".0"),
            "position": kept["position (hg19)"].astype(int),
            "ref": kept["reference"],
            "alt": kept["alt"],
            "label": (kept["func.class"] == "LOF").astype(int),
            "class": kept["consequence"].astype(str) if "consequence" in kept else "",
            "group": "BRCA1",
            "score": kept["function.score.mean"].astype(float),
        }
    )
    return _labelled("BRCA1 SGE", table, Counter({"no function class": int((~known).sum())}), path)


def load_proteingym(path: str | Path) -> LabelledSet:
    """A ProteinGym-style table of DNA: mutated_sequence, DMS_score and, where present, mutant and
    DMS_score_bin.
    """
    frame = _read_table(path)
    _need(frame, path, "mutated_sequence", "DMS_score")
    letters = set("".join(frame["mutated_sequence"].astype(str).head(100)).upper())
    if not letters <= set("ACGTUN"):
        odd = "".join(sorted(letters - set("ACGTUN")))
        raise GenoMoEError(
            f"{path}: mutated_sequence holds {odd}, so these are protein sequences; give the coding sequences."
        )
    table = pd.DataFrame({"sequence": frame["mutated_sequence"], "label": frame["DMS_score"].astype(float)})
    for name in ("mutant", "DMS_score_bin"):
        if name in frame:
            table[name] = frame[name]
    table["split"] = frame.get("split", "")
    return _labelled(Path(path).name, table, Counter(), path)


def load_genomic_benchmarks(path: str | Path) -> LabelledSet:
    """A genomic-benchmarks folder: SPLIT/CLASS/NUMBER.txt, one sequence a file; labels by order of class
    names.
    """
    root = Path(path)
    files = sorted(root.glob("*/*/*.txt"))
    if not files:
        raise GenoMoEError(f"{root} holds no SPLIT/CLASS/*.txt, the layout of genomic-benchmarks.")
    classes = sorted({file.parent.name for file in files})
    rows = [
        (
            file.read_text().strip().upper(),
            classes.index(file.parent.name),
            file.parent.parent.name,
            file.parent.name,
        )
        for file in files
    ]
    table = pd.DataFrame(rows, columns=["sequence", "label", "split", "class"])
    empty = table["sequence"] == ""
    return _labelled(root.name, table[~empty], Counter({"empty file": int(empty.sum())}), path)


def load_mitomap(folder: str | Path, *, min_frequency: float = 0.1) -> LabelledSet:
    """MITOMAP from a folder of its annotation files: confirmed pathogenic SNVs 1, common polymorphisms 0.

    Negatives are SNVs of the polymorphism file with an allele frequency of at least `min_frequency` per cent
    (its AF is in per cent) that the disease file does not have. class is the kind of locus (CDS, tRNA, rRNA
    or control), group the locus, both from gtf_annotations.bed.gz.
    """
    root = Path(folder)
    loci = _mitochondrial_loci(root / "gtf_annotations.bed.gz")
    dropped = Counter[str]()
    positive = set(_snvs(root / "mitomap_confirmed_mutations.vcf.gz", dropped))
    disease = {key for key, _ in _snvs(root / "mitomap_disease.vcf.gz", Counter())}
    rows = [(*key, 1) for key, _ in sorted(positive)]
    confirmed = {key for key, _ in positive}
    for key, frequency in _snvs(root / "mitomap_polymorphisms.vcf.gz", dropped):
        if frequency < min_frequency:
            dropped[f"polymorphism below {min_frequency} %"] += 1
        elif key in disease or key in confirmed:
            dropped["polymorphism also reported with a disease"] += 1
        else:
            rows.append((*key, 0))
    table = pd.DataFrame(rows, columns=["contig", "position", "ref", "alt", "label"])
    table["class"] = [loci.get(position, ("control", ""))[0] for position in table["position"]]
    table["group"] = [loci.get(position, ("", "control"))[1] for position in table["position"]]
    return _labelled("MITOMAP", table, dropped, root)


def _snvs(path: Path, dropped: Counter[str]) -> list[tuple[tuple[str, int, str, str], float]]:
    """((contig, position from 1, ref, alt), AF or 0) of every SNV."""
    found = []
    for row in open_variants(path).rows():
        info = _info(row.fields[7])
        frequencies = [float(text) for text in info.get("AF", "").split(",") if text not in ("", ".")]
        for index, alt in enumerate(row.alts):
            if len(row.ref) != 1 or len(alt) != 1 or alt not in "ACGT":
                dropped["not a single-base change"] += 1
                continue
            frequency = frequencies[index] if index < len(frequencies) else 0.0
            found.append(((row.contig, row.position + 1, row.ref, alt), frequency))
    return found


def _mitochondrial_loci(path: Path) -> dict[int, tuple[str, str]]:
    """Position from 1 to (kind, locus); where two overlap, the first listed."""
    kinds = {"Mt_tRNA": "tRNA", "Mt_rRNA": "rRNA", "protein_coding": "CDS"}
    loci = {}
    with gzip.open(path, "rt") as lines:
        for line in lines:
            _, start, end, locus, kind = line.rstrip("\n").replace('"', "").split("\t")[:5]
            for position in range(int(start) + 1, int(end) + 1):
                loci[position] = (kinds.get(kind.split(";")[0], "other"), locus.split(";")[0])
    return loci


def _info(text: str) -> dict[str, str]:
    return dict(item.partition("=")[::2] for item in text.split(";") if item)


def _read_table(path: str | Path, header_with: str | None = None) -> pd.DataFrame:
    """CSV, TSV (also gzip), Parquet or Excel; the header is the first line that holds `header_with`."""
    path = Path(path)
    if not path.is_file():
        raise GenoMoEError(f"There is no file {path}.")
    name = path.name.lower()
    if name.endswith(".parquet"):
        return pd.read_parquet(path)
    if name.endswith((".xlsx", ".xls")):
        frame = pd.read_excel(path, header=None, dtype=object)
        at = next((i for i, row in enumerate(frame.values.tolist()) if header_with in row), 0) if header_with else 0
        return pd.DataFrame(frame.values[at + 1 :], columns=frame.values[at].tolist())
    separator = "," if ".csv" in name else "\t"
    skip = 0
    if header_with:
        with gzip.open(path, "rt") if name.endswith(".gz") else open(path) as lines:
            skip = next((i for i, line in enumerate(lines) if header_with in line), 0)
    return pd.read_csv(path, sep=separator, skiprows=skip, dtype={"chrom": str, "chromosome": str})


def _need(frame: pd.DataFrame, path: str | Path, *names: str) -> None:
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise GenoMoEError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(map(str, frame.columns[:20]))}."
        )


def _labelled(name: str, table: pd.DataFrame, dropped: Counter[str], path: str | Path) -> LabelledSet:
    if not len(table):
        raise GenoMoEError(f"{path} gave no labelled row ({dict(dropped) or 'it is empty'}).")
    reasons = {reason: count for reason, count in dropped.items() if count}
    return LabelledSet(name=name, table=table.reset_index(drop=True), dropped=reasons)


LAYOUTS: dict[str, Callable[..., LabelledSet]] = {
    "clinvar": load_clinvar,
    "traitgym": load_traitgym,
    "brca1": load_brca1_sge,
    "proteingym": load_proteingym,
    "genomic-benchmarks": load_genomic_benchmarks,
    "mitomap": load_mitomap,
}


def load_benchmark(layout: str, path: str | Path, **options: object) -> LabelledSet:
    """A labelled set by the name of its layout (a key of LAYOUTS)."""
    if layout not in LAYOUTS:
        raise GenoMoEError(f"Unknown layout '{layout}': it is one of {', '.join(LAYOUTS)}.")
    return LAYOUTS[layout](path, **options)
