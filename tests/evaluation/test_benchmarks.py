"""Small synthetic files in each published layout."""

from __future__ import annotations

import gzip

import pandas as pd
import pytest

from genomoe.evaluation.benchmarks import load_benchmark

CLINVAR = """##fileformat=VCFv4.1
##fileDate=2026-01-01
##source=ClinVar
##reference=GRCh38
##INFO=<ID=CLNSIG,Number=.,Type=String,Description="Aggregate germline classification">
#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO
1\t100\t11\tG\tA\t.\t.\tCLNREVSTAT=criteria_provided,_single_submitter;CLNSIG=Pathogenic;GENEINFO=GENE1:12|GENE2:13;MC=SO:0001583|missense_variant,SO:0001819|synonymous_variant
1\t120\t12\tG\tA\t.\t.\tCLNREVSTAT=reviewed_by_expert_panel;CLNSIG=Benign/Likely_benign;GENEINFO=GENE1:12;MC=SO:0001819|synonymous_variant
1\t130\t13\tG\tC\t.\t.\tCLNREVSTAT=criteria_provided,_single_submitter;CLNSIG=Uncertain_significance
1\t140\t14\tG\tC\t.\t.\tCLNREVSTAT=no_assertion_criteria_provided;CLNSIG=Likely_pathogenic
MT\t150\t15\tGA\tG\t.\t.\tCLNREVSTAT=practice_guideline;CLNSIG=Likely_pathogenic,_low_penetrance
"""


def test_clinvar(tmp_path):
    path = tmp_path / "clinvar.vcf.gz"
    path.write_bytes(gzip.compress(CLINVAR.encode()))
    found = load_benchmark("clinvar", path)
    assert found.table[["contig", "position", "label", "class", "group", "stars"]].values.tolist() == [
        ["1", 100, 1, "missense_variant", "GENE1", 1],
        ["1", 120, 0, "synonymous_variant", "GENE1", 3],
        ["MT", 150, 1, "", "", 4],
    ]
    assert found.dropped == {"no clear significance": 1, "fewer than 1 review stars": 1}


@pytest.mark.parametrize("kind", ["parquet", "tsv"])
def test_traitgym(tmp_path, kind):
    frame = pd.DataFrame(
        {
            "chrom": ["1", "X"],
            "pos": [100, 200],
            "ref": ["A", "C"],
            "alt": ["G", "T"],
            "label": [True, False],
            "tss_dist": [5, 900],
            "consequence": ["dELS", "intron_variant"],
            "match_group": ["dELS_0", "dELS_0"],
        }
    )
    path = tmp_path / f"test.{kind}"
    frame.to_parquet(path) if kind == "parquet" else frame.to_csv(path, sep="\t", index=False)
    table = load_benchmark("traitgym", path).table
    assert table[["contig", "position", "ref", "alt", "label", "class", "group", "tss_dist"]].values.tolist() == [
        ["1", 100, "A", "G", 1, "dELS", "dELS_0", 5],
        ["X", 200, "C", "T", 0, "intron_variant", "dELS_0", 900],
    ]


def test_brca1_table_with_lines_before_its_header(tmp_path):
    path = tmp_path / "brca1.csv"
    path.write_text(
        "Supplementary Table 1,,,,,,\n,,,,,,\n"
        "gene,chromosome,position (hg19),reference,alt,function.score.mean,func.class,consequence\n"
        "BRCA1,17,41276135,T,G,-0.37,FUNC,Missense\n"
        "BRCA1,17,41276134,T,A,-2.1,LOF,Nonsense\n"
        "BRCA1,17,41276133,T,A,-1.1,INT,Missense\n"
        "BRCA1,17,41276132,T,A,,,Missense\n"
    )
    found = load_benchmark("brca1", path)
    assert found.table["label"].tolist() == [0, 1, 0]
    assert found.table["contig"].tolist() == ["17"] * 3
    assert found.table["score"].tolist() == [-0.37, -2.1, -1.1]
    assert found.dropped == {"no function class": 1}


def test_proteingym_of_dna_and_of_protein(tmp_path):
    path = tmp_path / "dms.csv"
    path.write_text("mutant,mutated_sequence,DMS_score,DMS_score_bin\nA1C,CCGT,0.5,1\nA1G,GCGT,-0.5,0\n")
    table = load_benchmark("proteingym", path).table
    assert table[["sequence", "label", "mutant", "DMS_score_bin"]].values.tolist() == [
        ["CCGT", 0.5, "A1C", 1],
        ["GCGT", -0.5, "A1G", 0],
    ]
    path.write_text("mutant,mutated_sequence,DMS_score\nM1K,KLVE,0.5\n")
    with pytest.raises(ValueError, match="protein sequences"):
        load_benchmark("proteingym", path)


def test_genomic_benchmarks_folder(tmp_path):
    for split in ("train", "test"):
        for name, sequence in (("negative", "acgt"), ("positive", "TTTT")):
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            (folder / "0.txt").write_text(sequence + "\n")
    (folder / "1.txt").write_text("")
    found = load_benchmark("genomic-benchmarks", tmp_path / "set")
    assert found.table.sort_values(["split", "label"]).values.tolist() == [
        ["ACGT", 0, "test", "negative"],
        ["TTTT", 1, "test", "positive"],
        ["ACGT", 0, "train", "negative"],
        ["TTTT", 1, "train", "positive"],
    ]
    assert found.dropped == {"empty file": 1}


def test_mitomap_folder(tmp_path):
    header = "##fileformat=VCFv4.2\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"
    files = {
        "mitomap_confirmed_mutations.vcf.gz": "MT\t583\t.\tG\tA\t.\t.\tLocus=MT-TF\nMT\t590\t.\tGA\tG\t.\t.\t.\n",
        "mitomap_disease.vcf.gz": "MT\t583\t.\tG\tA\t.\t.\tAF=0\nMT\t601\t.\tT\tC\t.\t.\tAF=1\n",
        "mitomap_polymorphisms.vcf.gz": "MT\t5\t.\tA\tC,G\t.\t.\tAC=1,2;AF=0.0242,0.2\n"
        "MT\t601\t.\tT\tC\t.\t.\tAC=2;AF=1.0\nMT\t3310\t.\tT\tC\t.\t.\tAF=3.0\n",
    }
    for name, rows in files.items():
        (tmp_path / name).write_bytes(gzip.compress((header + rows).encode()))
    bed = 'MT\t576\t647\t"MT-TF"\t"Mt_tRNA"\nMT\t3306\t4262\t"MT-ND1"\t"protein_coding"\n'
    (tmp_path / "gtf_annotations.bed.gz").write_bytes(gzip.compress(bed.encode()))
    found = load_benchmark("mitomap", tmp_path)
    assert found.table[["position", "alt", "label", "class", "group"]].values.tolist() == [
        [583, "A", 1, "tRNA", "MT-TF"],
        [5, "G", 0, "control", "control"],
        [3310, "C", 0, "CDS", "MT-ND1"],
    ]
    assert found.dropped == {
        "not a single-base change": 1,
        "polymorphism below 0.1 %": 1,
        "polymorphism also reported with a disease": 1,
    }


def test_layout_errors(tmp_path):
    with pytest.raises(ValueError, match="one of clinvar"):
        load_benchmark("gnomad", tmp_path)
    with pytest.raises(ValueError, match="no SPLIT/CLASS"):
        load_benchmark("genomic-benchmarks", tmp_path)
    path = tmp_path / "t.tsv"
    path.write_text("chrom\tpos\n1\t5\n")
    with pytest.raises(ValueError, match=r"no column ref, alt, label; it has chrom, pos"):
        load_benchmark("traitgym", path)
    path.write_text("chrom\tpos\tref\talt\nchr1\t5\tA\tC\n")
    with pytest.raises(ValueError, match="no INFO column"):
        load_benchmark("clinvar", path)
