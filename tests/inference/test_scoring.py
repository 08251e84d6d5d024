"""Rows to scores: every rule for variants, both strands, window modes, and files that are resumed."""

from __future__ import annotations

import copy
import math
import shutil

import numpy as np
import pandas as pd
import pysam
import pytest
import torch
from tiny_models import tiny_model

from genomoe.genome.alphabet import ByteTokenizer, KmerTokenizer
from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.fasta import Reference
from genomoe.genome.variant_files import open_variants
from genomoe.genome.variants import Status
from genomoe.inference.journal import Journal, JournalError
from genomoe.inference.predictor import Predictor
from genomoe.inference.score_file import score_file
from genomoe.inference.scoring import ScoringOptions
from genomoe.model.kernels import KernelOptions


def score(predictor, fasta, *variants, **options):
    options = {"window": 64} | options
    return predictor.score_variants(list(variants), fasta, **options)


def other(base: str) -> str:
    return "ACGT"["ACGT".index(base.upper()) - 1]


def log_likelihood(predictor, sequence: str) -> float:
    ids = torch.from_numpy(predictor.tokenizer.encode(sequence)).long()
    with torch.inference_mode():
        log_p = predictor.model(ids[None]).logits[0].double().log_softmax(-1)
    return sum(float(log_p[i - 1, ids[i]]) for i in range(1, len(ids)) if ids[i] != predictor.tokenizer.unk_id)


@pytest.mark.parametrize("strands", ["fwd", "both"])
@pytest.mark.parametrize("window", [64, 65])
def test_llr_is_the_difference_of_two_window_likelihoods(predictor, fasta, sequences, strands, window):
    sequence, at = sequences["chr1"], 150
    start = at - window // 2
    ref = sequence[start : start + window]
    alt = ref[: at - start] + other(ref[at - start]) + ref[at - start + 1 :]
    complement = str.maketrans("ACGT", "TGCA")
    expected = log_likelihood(predictor, alt) - log_likelihood(predictor, ref)
    if strands == "both":  # the reverse complements of the very same windows: base i is base W-1-i there
        flipped = [log_likelihood(predictor, x[::-1].translate(complement)) for x in (alt, ref)]
        expected = (expected + flipped[0] - flipped[1]) / 2
    variant = Variant("chr1", at, sequence[at], other(sequence[at]))
    got = score(predictor, fasta, variant, strands=strands, window=window)
    assert got["score"][0] == pytest.approx(expected, abs=2e-5)


def test_strand_average_is_the_same_on_the_other_strand(predictor, sequences, tmp_path):
    """Of the reverse-complemented genome the complementary substitution scores the same (odd window: one
    centre).
    """
    complement = str.maketrans("ACGTN", "TGCAN")
    sequence = sequences["chr1"].upper()
    for name, text in (("a.fa", sequence), ("b.fa", sequence[::-1].translate(complement))):
        (tmp_path / name).write_text(f">chr1\n{text}\n")
    at = 420
    ref, alt = sequence[at], other(sequence[at])
    mirrored = Variant("chr1", len(sequence) - 1 - at, ref.translate(complement), alt.translate(complement))
    for kind in ("llr", "marginal", "embedding", "jsd"):
        options = {"score": kind, "strands": "both", "window": 65}
        first = score(predictor, tmp_path / "a.fa", Variant("chr1", at, ref, alt), **options)["score"][0]
        second = score(predictor, tmp_path / "b.fa", mirrored, **options)["score"][0]
        assert first == pytest.approx(second, abs=1e-5)
        assert first != 0


def test_marginal_is_the_next_base(predictor, fasta, sequences):
    at, sequence = 150, sequences["chr1"]
    ids = torch.from_numpy(predictor.tokenizer.encode(sequence[at - 63 : at])).long()
    with torch.inference_mode():
        log_p = predictor.model(ids[None]).logits[0, -1].log_softmax(-1)
    ref, alt = sequence[at], other(sequence[at])
    expected = log_p[predictor.tokenizer.encode(alt)[0]] - log_p[predictor.tokenizer.encode(ref)[0]]
    got = score(predictor, fasta, Variant("chr1", at, ref, alt), score="marginal", strands="fwd")
    assert got["score"][0] == pytest.approx(float(expected), abs=1e-5)


def test_downstream_bounds_what_counts(predictor, fasta, sequences):
    at, sequence = 150, sequences["chr1"]
    variant = Variant("chr1", at, sequence[at], other(sequence[at]))
    one = score(predictor, fasta, variant, strands="fwd", window=126, downstream=1)["score"][0]
    marginal = score(predictor, fasta, variant, strands="fwd", window=64, score="marginal")["score"][0]
    assert one == pytest.approx(marginal, abs=1e-5)  # both read the 63 bases before it
    whole = score(predictor, fasta, variant)["score"][0]
    assert score(predictor, fasta, variant, downstream=32)["score"][0] != pytest.approx(whole, abs=1e-4)
    assert score(predictor, fasta, variant, downstream=1000)["score"][0] == pytest.approx(whole, abs=1e-6)


def test_one_indel_written_in_several_ways_scores_the_same(predictor, tmp_path):
    (tmp_path / "r.fa").write_text(">c\n" + "GATTACA" * 4 + "TG" + "CA" * 6 + "CTTGGACC" * 4 + "\n")
    at = 30  # inside the CA repeat
    reference = Reference(tmp_path / "r.fa")
    spellings = []
    for start, length in ((at, 4), (at + 2, 4), (at + 4, 6)):
        ref = reference.fetch(Interval("c", start, start + length)).decode()
        spellings.append(Variant("c", start, ref, ref[:-2]))
    table = score(predictor, tmp_path / "r.fa", *spellings)
    assert table["score"].nunique() == 1
    assert table["score"][0] != 0


def test_rows_without_a_score_say_why(predictor, fasta, sequences):
    a = sequences["chr1"][10]
    rows = pd.DataFrame(
        [
            ("chr1", 11, a, other(a), "ok"),
            ("1", 11, a.lower(), other(a).lower(), "ok"),
            ("chrM", 1, sequences["chrM"][0], other(sequences["chrM"][0]), "ok"),
            ("MT", 120, sequences["chrM"][-1], other(sequences["chrM"][-1]), "ok"),
            ("chr1", 0, "N", "A", "position_out_of_range"),
            ("chr1", 901, "A", "C", "position_out_of_range"),
            ("chr1", 900, "AC", "A", "position_out_of_range"),
            ("chr1", 305, "N", "A", "ref_not_acgt"),
            ("chr1", 11, a, "<DEL>", "alt_symbolic"),
            ("chr1", 11, a, "*", "alt_symbolic"),
            ("chr1", 11, a, ".", "alt_missing"),
            ("chr1", 11, a, "R", "alt_not_acgt"),
            ("chr1", 11, a, a, "ref_equals_alt"),
            ("chr1", 11, other(a), a, "ref_mismatch"),
            ("chr1", 101, sequences["chr1"][100:180], sequences["chr1"][100], "allele_too_long"),
            ("chr9", 11, "A", "C", "unknown_contig"),
        ],
        columns=["chrom", "pos", "ref", "alt", "expected"],
        index=range(100, 116),
    )
    got = predictor.score_variants(rows, fasta, window=64, ref_mismatch="skip", unknown_contig="skip")
    assert got["status"].tolist() == got["expected"].tolist()
    assert list(got.index) == list(rows.index)
    assert got["score"].notna().tolist() == [status == "ok" for status in got["expected"]]
    assert got["score"].iloc[0] == got["score"].iloc[1]


def test_ref_mismatch_and_unknown_contig_stop_with_the_line(predictor, fasta, tmp_path, sequences):
    a = sequences["chr1"][10]
    path = tmp_path / "in.vcf"
    path.write_text(f"##x\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\nchr1\t11\t.\t{other(a)}\t{a}\t.\t.\t.\n")
    with pytest.raises(ValueError, match=r"in\.vcf, line 3: REF of chr1:11 is ., the reference has .*assembly"):
        predictor.score_variants(path, fasta, window=64)
    path.write_text(path.read_text().replace("chr1\t11", "chr10\t11"))
    with pytest.raises(ValueError, match=r"in\.vcf, line 3: Contig 'chr10' .*nearest are chr1"):
        predictor.score_variants(path, fasta, window=64)


def test_substituted_ref_scores_as_in_a_reference_that_has_it(predictor, fasta, sequences, tmp_path):
    sequence = sequences["chr1"]
    ref, alt = other(sequence[150]), sequence[150].upper()
    edited = sequence[:150] + ref + sequence[151:]
    (tmp_path / "edited.fa").write_text(f">chr1\n{edited}\n")
    variant = Variant("chr1", 150, ref, alt)
    got = score(predictor, fasta, variant, ref_mismatch="substitute")
    assert got["status"][0] == "ref_substituted"
    assert got["score"][0] == pytest.approx(score(predictor, tmp_path / "edited.fa", variant)["score"][0], abs=1e-6)


def test_n_in_the_window_and_case_do_not_break_a_score(predictor, fasta, sequences, tmp_path):
    near_n = score(predictor, fasta, Variant("chr1", 295, sequences["chr1"][295], other(sequences["chr1"][295])))
    assert math.isfinite(near_n["score"][0])
    (tmp_path / "upper.fa").write_text(f">chr1\n{sequences['chr1'].upper()}\n")
    variant = Variant("chr1", 600, sequences["chr1"][600].upper(), other(sequences["chr1"][600]))
    assert score(predictor, fasta, variant)["score"][0] == score(predictor, tmp_path / "upper.fa", variant)["score"][0]


@pytest.mark.parametrize("mode", ["centred", "block"])
def test_mutagenesis_is_score_variants(predictor, fasta, sequences, mode):
    table = predictor.mutagenesis("chr1:140-149", fasta, window=64, window_mode=mode)
    assert len(table) == 30
    variants = [Variant("chr1", p - 1, r, a) for p, r, a in zip(table.position, table.ref, table.alt, strict=True)]
    again = score(predictor, fasta, *reversed(variants), window_mode=mode)
    np.testing.assert_allclose(table["score"], again["score"][::-1], atol=1e-5)


def test_options_that_do_not_fit(predictor, fasta):
    for bad, message in [
        ({"window": 1000}, "longer than the model's context of 512"),
        ({"window": 1}, "at least 2"),
        ({"score": "x"}, "one of llr"),
        ({"strands": "rev"}, "one of fwd, both"),
        ({"downstream": 0}, "at least 1"),
        ({"score": "marginal", "window_mode": "block"}, "centred"),
    ]:
        with pytest.raises(ValueError, match=message):
            score(predictor, fasta, Variant("chr1", 5, "A", "C"), **bad)


# ---- files -----------------------------------------------------------------------------------------------


@pytest.fixture
def vcf(tmp_path, sequences):
    sequence = sequences["chr1"].upper()
    rows = []
    for at in range(20, 280, 5):
        alts = other(sequence[at]) if at % 2 else f"{other(sequence[at])},<DEL>"
        rows.append(f"chr1\t{at + 1}\tv{at}\t{sequence[at]}\t{alts}\t.\tPASS\tDP={at}\n")
    path = tmp_path / "in.vcf"
    path.write_text("##fileformat=VCFv4.2\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n" + "".join(rows))
    return path


def run(predictor, fasta, vcf, out, **options):
    scorer = predictor.scorer(fasta, window=64, **options)
    told: list[tuple[str, int, int | None]] = []
    done = score_file(
        scorer,
        open_variants(vcf),
        out,
        model_id="tiny",
        reference=fasta,
        chunk_rows=8,
        progress=lambda *what: told.append(what),
    )
    return done, told


def test_progress_goes_through_every_row_in_each_phase(predictor, fasta, vcf, tmp_path):
    _, told = run(predictor, fasta, vcf, tmp_path / "out.tsv")
    for phase, total in (("checking the input", None), ("scoring", 52), ("writing", 52)):
        last = 48 if total is None else 52
        assert [what for what in told if what[0] == phase] == [
            (phase, min(done, last), total) for done in range(8, last + 8, 8)
        ]


def test_file_equals_table(predictor, fasta, vcf, tmp_path):
    out = tmp_path / "out.vcf.gz"
    summary, _ = run(predictor, fasta, vcf, out)
    assert (summary.rows, summary.alts) == (52, 78)
    assert summary.statuses == {"ok": 52, "alt_symbolic": 26}
    table = predictor.score_variants(vcf, fasta, window=64)
    with pysam.VariantFile(str(out)) as file:
        scores = [value for record in file for value in record.info["GENOMOE"]]
    np.testing.assert_allclose(
        [np.nan if value is None else value for value in scores], table["score"], rtol=1e-5, atol=1e-5
    )
    assert not list(tmp_path.glob(".out*"))


def test_killed_run_goes_on_with_no_row_lost_or_twice(predictor, fasta, vcf, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.tsv", tmp_path / "out.tsv"
    run(predictor, fasta, vcf, whole)
    scorer = predictor.scorer(fasta, window=64)
    calls = []

    def killed(rows, where):
        calls.append(len(rows))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return type(scorer).score_rows(scorer, rows, where)

    monkeypatch.setattr(scorer, "score_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        score_file(scorer, open_variants(vcf), out, model_id="tiny", reference=fasta, chunk_rows=8)
    assert not out.exists()
    (part,) = (tmp_path / ".out.tsv.scoring").glob("*.part")
    with open(part, "ab") as file:
        file.write(part.read_bytes()[:40])  # a record cut off in the middle
    monkeypatch.undo()
    summary, _ = run(predictor, fasta, vcf, out)
    assert summary.resumed_rows == 24
    assert out.read_text() == whole.read_text()


def test_other_settings_do_not_go_on_with_a_run(predictor, fasta, vcf, tmp_path):
    out = tmp_path / "out.tsv"
    job = {"window": 32, "model": "tiny", "ref_mismatch": "error"}
    journal = Journal(out, job)
    journal.append(0, [(0.5, Status.OK)])
    journal.close(remove=False)
    with pytest.raises(JournalError, match=r"had another .*window.*--restart"):
        run(predictor, fasta, vcf, out)
    assert 0 in Journal(out, job | {"ref_mismatch": "skip"})  # what stopped a run may be skipped
    Journal(tmp_path / "empty.tsv", job).close(remove=False)
    assert not (tmp_path / ".empty.tsv.scoring").exists()


def test_other_precision_does_not_go_on_with_a_run(predictor, fasta, vcf, tmp_path, monkeypatch):
    scorer = predictor.scorer(fasta, window=64)
    out, source = tmp_path / "out.tsv", open_variants(vcf)
    real, calls = scorer.score_rows, []

    def fail_at_second(rows, where):
        calls.append(rows)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(rows, where)

    monkeypatch.setattr(scorer, "score_rows", fail_at_second)
    with pytest.raises(KeyboardInterrupt):
        score_file(scorer, source, out, model_id="tiny", reference=fasta, chunk_rows=8)
    rounded, quantised = copy.deepcopy(predictor.model).bfloat16(), copy.deepcopy(predictor.model)
    quantised.kernels = KernelOptions(precision="fp8")
    for model, what in ((rounded, "dtype"), (quantised, "precision")):
        other = Predictor(model, predictor.tokenizer).scorer(fasta, window=64)
        with pytest.raises(JournalError, match=f"had another {what}"):
            score_file(other, source, out, model_id="tiny", reference=fasta, chunk_rows=8)


def test_a_process_with_nothing_to_do_leaves_the_journal_to_the_others(tmp_path):
    out, job = tmp_path / "out.tsv", {"window": 32}
    first, second = (Journal(out, job, process=rank) for rank in (0, 1))
    second.close(remove=False)
    first.append(0, [(0.5, Status.OK)])
    first.refresh()
    assert first.read(0) == [(0.5, Status.OK)]
    first.close(remove=True)
    assert not list(tmp_path.iterdir())


def test_chunks_never_outlive_their_job(tmp_path, monkeypatch):
    """A kill while the folder is removed must not leave chunks that a run with other settings would take up."""
    out = tmp_path / "out.tsv"
    journal = Journal(out, {"window": 32})
    journal.append(0, [(0.5, Status.OK)])

    def killed(folder, ignore_errors):
        (folder / "job.json").unlink(missing_ok=True)

    monkeypatch.setattr(shutil, "rmtree", killed)
    journal.close(remove=True)
    monkeypatch.undo()
    again = Journal(out, {"window": 64})
    assert 0 not in again
    again.close(remove=True)
    assert not list(tmp_path.iterdir())


def test_several_processes_share_the_chunks(predictor, fasta, vcf, tmp_path, monkeypatch):
    out, alone = tmp_path / "out.tsv", tmp_path / "alone.tsv"
    run(predictor, fasta, vcf, alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run(predictor, fasta, vcf, out)[0] is None
    monkeypatch.setenv("RANK", "0")
    summary, _ = run(predictor, fasta, vcf, out)
    assert summary.rows == 52
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "7")
    assert run(predictor, fasta, vcf, tmp_path / "late.tsv")[0] is None, "seven chunks, none for an eighth process"
    assert not (tmp_path / ".late.tsv.scoring").exists()
    pd.testing.assert_frame_equal(pd.read_csv(out, sep="\t"), pd.read_csv(alone, sep="\t"), atol=1e-5)


def test_options_are_described_for_the_header():
    text = ScoringOptions(score="jsd", downstream=40).description
    assert "Jensen-Shannon" in text
    assert "40 bases" in text


@pytest.mark.parametrize("name", ["3mer", "byte"])
def test_other_tokenizers_score_whole_windows_too(fasta, sequences, name):
    tokenizer = KmerTokenizer(3) if name == "3mer" else ByteTokenizer()
    predictor = Predictor(tiny_model(vocab_size=tokenizer.vocab_size), tokenizer)
    sequence, at, window = sequences["chr1"], 150, 66
    start = at - window // 2
    for ref, alt in ((sequence[at], other(sequence[at])), (sequence[at], sequence[at] + "GAT")):
        whole = sequence[:at] + alt + sequence[at + 1 :]
        expected = log_likelihood(predictor, whole[start : start + window])
        expected -= log_likelihood(predictor, sequence[start : start + window])
        got = score(predictor, fasta, Variant("chr1", at, ref, alt), strands="fwd", window=window)
        assert got["score"][0] == pytest.approx(expected, abs=2e-5)
    for kind in ("marginal", "embedding", "jsd"):
        got = score(predictor, fasta, Variant("chr1", at, sequence[at], other(sequence[at])), score=kind, window=window)
        assert math.isfinite(got["score"][0])
