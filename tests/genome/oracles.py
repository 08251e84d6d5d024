"""Runs bcftools on tests/data/normalise and writes what it says beside the input: `python
tests/genome/oracles.py`.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data" / "normalise"
HEADER = "##fileformat=VCFv4.2\n##contig=<ID=ctg>\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"


def run_norm() -> str:
    """`bcftools norm -f` of input.vcf as a table id, pos, ref, alt in input order."""
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "ref.fa"
        reference.write_bytes((FOLDER / "ref.fa").read_bytes())
        command = ["bcftools", "norm", "-f", str(reference), str(FOLDER / "input.vcf")]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = sorted(
        (line.split("\t")[:5] for line in text.splitlines() if line[0] != "#"),
        key=lambda row: int(row[2][1:]),
    )
    return "id\tpos\tref\talt\n" + "".join(f"{row[2]}\t{row[1]}\t{row[3]}\t{row[4]}\n" for row in rows)


def run_consensus(every: int = 8) -> str:
    """`bcftools consensus` of every eighth variant alone, the whole contig, as a table id, sequence."""
    lines = [line for line in (FOLDER / "input.vcf").read_text().splitlines() if line[0] != "#"][::every]
    out = "id\tsequence\n"
    with tempfile.TemporaryDirectory() as folder:
        reference, vcf = Path(folder) / "ref.fa", Path(folder) / "one.vcf"
        reference.write_bytes((FOLDER / "ref.fa").read_bytes())
        for line in lines:
            vcf.write_text(HEADER + line + "\n")
            subprocess.run(["bcftools", "view", "-Oz", "-o", f"{vcf}.gz", str(vcf)], check=True, capture_output=True)
            subprocess.run(["bcftools", "index", "-f", f"{vcf}.gz"], check=True, capture_output=True)
            command = ["bcftools", "consensus", "-f", str(reference), f"{vcf}.gz"]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            out += f"{line.split(chr(9))[2]}\t{''.join(text.splitlines()[1:])}\n"
    return out


if __name__ == "__main__":
    (FOLDER / "bcftools_norm.tsv").write_text(run_norm())
    (FOLDER / "bcftools_consensus.tsv").write_text(run_consensus())
