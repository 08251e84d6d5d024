"""The evaluation of a run: windows cover every base once, equal a plain forward pass, and the report adds up."""

import json
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from genomoe import cli
from genomoe.data.open import open_corpus
from genomoe.evaluation.likelihood import base_bits, token_bits
from genomoe.evaluation.pretraining import evaluate_model, evaluate_run
from genomoe.genome.alphabet import make_tokenizer
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.huggingface_tokenizer import huggingface_tokenizer
from genomoe.model.config import ModelConfig
from genomoe.model.pretrained import export_mixtral, from_pretrained
from genomoe.model.transformer import GenoMoEModel
from genomoe.training.compose import compose_config
from genomoe.training.run import pretrain


@pytest.fixture(scope="module")
def model() -> GenoMoEModel:
    torch.manual_seed(0)
    config = ModelConfig.preset("tiny", num_layers=2, hidden_size=32, head_size=8, expert_size=16, initializer_std=0.3)
    return GenoMoEModel(config).eval()


def plain_bits(model: GenoMoEModel, tokens: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        log_p = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].double().log_softmax(-1)
    return np.array([-log_p[i - 1, token] / np.log(2) for i, token in enumerate(tokens) if i])


@pytest.mark.parametrize("length", [2, 3, 15, 16, 17, 31, 64, 100])
@pytest.mark.parametrize("stride", [1, 7, 8, 15])
def test_windows_score_every_token_once_with_enough_before_it(model: GenoMoEModel, length: int, stride: int) -> None:
    context = 16
    tokens = np.random.default_rng(length).integers(4, 8, length)
    bits = np.concatenate([*token_bits(model, tokens, context=context, stride=stride, batch_tokens=64)])
    assert np.isnan(bits[0])
    assert np.isfinite(bits[1:]).all()
    np.testing.assert_allclose(bits[1:context], plain_bits(model, tokens[:context]), rtol=1e-4, atol=1e-5)
    if length >= context:  # the last token is scored in the last window
        np.testing.assert_allclose(bits[-1], plain_bits(model, tokens[-context:])[-1], rtol=1e-4, atol=1e-5)


def test_a_sequence_of_one_base_has_no_score(model: GenoMoEModel) -> None:
    (bits,) = token_bits(model, np.array([4]), context=16, stride=8)
    np.testing.assert_array_equal(bits, [np.nan])


@pytest.mark.parametrize("stride", [0, 16, 99])
def test_a_stride_that_leaves_gaps_is_refused(model: GenoMoEModel, stride: int) -> None:
    with pytest.raises(ValueError, match="from 1 to the context less one, 15"):
        next(token_bits(model, np.arange(4, 8), context=16, stride=stride))


def test_bits_of_a_k_mer_are_spread_over_its_bases() -> None:
    tokenizer = make_tokenizer("kmer3")
    config = ModelConfig.preset("tiny", num_layers=1, vocab_size=tokenizer.vocab_size)
    letters = np.frombuffer(b"ACGTTGCAACG" * 3 + b"GT", np.uint8)  # 35 bases, 11 tokens and 2
    model = GenoMoEModel(config).eval()
    bits = np.concatenate([*base_bits(model, tokenizer, letters, context=8, stride=4, batch_tokens=8)])
    tokens = np.concatenate([*token_bits(model, tokenizer.encode(letters), context=8, stride=4, batch_tokens=8)])
    assert bits.shape == letters.shape
    assert np.isnan(bits[:3]).all()
    np.testing.assert_array_equal(bits, [*np.repeat(tokens[:11] / 3, 3), *tokens[11:]])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    (folder / "train.fa").write_text(">t\n" + "".join(rng.choice(list("ACGT"), 4000)) + "\n")
    (folder / "val.fa").write_text(">v1\nACGTNNACG" + "acgtt" * 40 + "\n>v2\n" + "GATTACA" * 30 + "\n")
    overrides = [
        "debug=fast",
        "data=fasta",
        f"data.train={folder / 'train.fa'}",
        f"data.val={folder / 'val.fa'}",
        "data.context_length=32",
        f"paths.run_dir={folder / 'run'}",
    ]
    return pretrain(compose_config("pretrain", overrides)).run.path


def test_report_scores_the_same_bases_for_all(run_dir: Path) -> None:
    report = evaluate_run(run_dir)
    assert report.contigs == {"v1": 209, "v2": 210}
    assert {score.bases for score in report.scores.values()} == {209 + 210 - 2 - 2}  # not the 2 N, nor the first bases
    assert report.scores["uniform"].bits_per_base == 2.0
    assert report.stride == 16
    table = report.table()
    assert list(table.columns) == ["model", "bits_per_base", "bits_per_base_weighted", "bases"]
    assert table["bits_per_base"].is_monotonic_increasing
    lengths = {"v1": 206, "v2": 209}
    mean = sum(report.per_contig[name] * n for name, n in lengths.items()) / sum(lengths.values())
    assert mean == pytest.approx(report.scores["model"].bits_per_base)


def test_the_size_of_the_pieces_changes_no_score(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate_run(run_dir)
    monkeypatch.setattr("genomoe.evaluation.pretraining.base_bits", partial(base_bits, batch_tokens=64))
    pieces = evaluate_run(run_dir)
    assert pieces.scores.keys() == whole.scores.keys()
    for key, score in whole.scores.items():
        assert pieces.scores[key] == pytest.approx(score, rel=1e-6 if key == "model" else 1e-12)
    assert pieces.per_contig == pytest.approx(whole.per_contig, rel=1e-6)


class Uniform(torch.nn.Module):
    """Gives every token the same logits."""

    config = ModelConfig.preset("tiny", max_context=64)

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(16))

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits.expand(*tokens.shape, 16))


def test_memory_grows_with_the_longest_contig_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genomoe.data.fasta_corpus.SMALL_FILE", 0)  # letters are read from the file when asked for
    predictor = SimpleNamespace(model=Uniform(), tokenizer=make_tokenizer("nucleotide"), name="uniform")
    monkeypatch.setattr("genomoe.evaluation.pretraining.from_pretrained", lambda path, device: predictor)

    def peak(contigs: int, length: int) -> int:
        file = tmp_path / f"{contigs}x{length}.fa"
        file.write_text("".join(f">c{i}\n{'ACGTTGCA' * (length // 8)}\n" for i in range(contigs)))
        corpus = open_corpus([file])
        monkeypatch.setattr("genomoe.evaluation.pretraining.open_corpus", lambda files: corpus)
        tracemalloc.start()
        report = evaluate_model("uniform", [file], stride=63)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert report.scores["model"].bases == contigs * (length - 1)
        return used

    peak(1, 80)  # what is imported and cached once
    one, several, long = peak(1, 200_000), peak(8, 200_000), peak(1, 1_600_000)
    assert several < one + 100_000  # half a byte for every base of one contig
    assert long < one + 3 * 1_400_000  # letters and tokens, and one copy while those are made


def test_evaluate_command_prints_json_and_draws(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["evaluate", str(run_dir), "--json", "--stride", "8", "--device", "cpu"])
    assert not exit_info.value.code
    out, _ = capsys.readouterr()
    figures = json.loads(out)
    assert figures["stride"] == 8
    assert set(figures["baselines"]) == {"markov", "markov_low", "composition", "uniform"}
    assert figures["model"]["bits_per_base"] > 0
    assert json.loads((run_dir / "report" / "evaluation.json").read_text()) == figures
    assert len(pd.read_csv(run_dir / "report" / "evaluation.csv")) == 5
    assert (run_dir / "report" / "loss_curve.png").read_bytes()[:4] == b"\x89PNG"


def test_a_report_is_dated_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dates = iter(range(9))
    monkeypatch.setattr("genomoe.evaluation.pretraining.environment", lambda: {"date": next(dates)})
    report = evaluate_run(run_dir)
    assert report.to_dict() == report.to_dict()
    assert report.to_dict()["environment"] == {"date": 0}


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*map(str, arguments), "--device", "cpu"])
    return int(exit_info.value.code or 0)


def test_a_model_folder_scores_files_as_its_run_does(run_dir: Path, tmp_path: Path) -> None:
    held_out = run_dir.parent / "val.fa"
    of_run, of_model = evaluate_run(run_dir), evaluate_model(run_dir / "model", [held_out])
    assert (of_model.context, of_model.stride) == (32, 16)
    assert of_model.per_contig == of_run.per_contig
    for row in ("model", "uniform"):
        assert of_model.scores[row] == of_run.scores[row]
    model, tokenizer = from_pretrained(run_dir / "model")
    ids = make_tokenizer(tokenizer)
    hugging_face = export_mixtral(model, ids.to_dict(), tmp_path / "hf", files=huggingface_tokenizer(ids))
    (hugging_face / "genomoe_tokenizer.json").unlink(missing_ok=True)  # as any other project's folder
    foreign = evaluate_model(hugging_face, [held_out])
    assert foreign.scores["model"].bits_per_base == pytest.approx(of_run.scores["model"].bits_per_base, abs=1e-6)


def test_composition_is_the_entropy_of_the_scored_files(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "x.fa").write_text(">c\n" + "A" + "AAAC" * 10 + "NNN\n")  # scored: 30 A, 10 C
    report = evaluate_model(run_dir / "model", [tmp_path / "x.fa"])
    shares = np.array([31, 10]) / 41
    assert report.scores["composition"].bits_per_base == pytest.approx(-np.log2(shares) @ [0.75, 0.25])
    assert report.scores["composition"].bases == 40


def test_contigs_of_one_name_in_two_files_are_told_apart(run_dir: Path, tmp_path: Path) -> None:
    files = [tmp_path / "x.fa", tmp_path / "y.fa"]
    files[0].write_text(">chr1\n" + "ACGT" * 20 + "\n")
    files[1].write_text(">chr1\n" + "GGGT" * 10 + "\n")
    report = evaluate_model(run_dir / "model", files)
    assert report.contigs == {"x.fa/chr1": 80, "y.fa/chr1": 40}
    assert report.scores["model"].bases == 79 + 39
    assert len(report.per_contig) == 2


def test_evaluate_command_on_files(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--data", run_dir.parent / "val.fa", "--data", run_dir.parent / "train.fa"]
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert call("evaluate", run_dir / "model", *files, "--window", 20, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["context"], figures["stride"]) == (20, 10)
    assert set(figures["contigs"]) == {"t", "v1", "v2"}
    assert set(figures["baselines"]) == {"composition", "uniform"}
    assert figures["baselines"]["composition"]["counted_on"] == "these sequences"
    assert {row["bases"] for row in figures["baselines"].values()} == {figures["model"]["bases"]}
    assert call("evaluate", run_dir / "model", *files) == 0
    assert "Markov baselines need training data" in capsys.readouterr().out
    assert call("evaluate", run_dir, *files, "--json") == 0
    with_markov = json.loads(capsys.readouterr().out)
    assert with_markov["baselines"]["markov"]["training_bases"] == 4000
    assert with_markov["contigs"] == figures["contigs"]
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_mistakes_of_evaluate_on_files_are_sentences(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "n.fa").write_text(">a\nNNNN\n")
    good = run_dir.parent / "val.fa"
    for arguments, message in [
        ([run_dir / "model"], "a model without its run: name sequences to evaluate it on with --data"),
        ([run_dir / "model", "--data", tmp_path / "none.fa"], "none.fa does not exist"),
        ([tmp_path, "--data", good], "is not a model folder"),
        ([run_dir / "model", "--data", good, "--window", 33], "A window of 33 tokens is not possible"),
        ([run_dir / "model", "--data", good, "--window", 0], "A window of 0 tokens is not possible"),
        ([run_dir / "model", "--data", good, "--stride", 32], "stride=32 is not allowed"),
        ([run_dir / "model", "--data", tmp_path / "n.fa"], "there is no base to score"),
    ]:
        assert call("evaluate", *arguments) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert call("evaluate", run_dir / "model", "--data", good, "--task", "table") == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_run_without_held_out_contigs_says_so(run_dir: Path, tmp_path: Path) -> None:
    overrides = ["debug=fast", "data=fasta", f"data.train={run_dir.parent / 'train.fa'}", "data.context_length=32"]
    run = pretrain(compose_config("pretrain", [*overrides, f"paths.run_dir={tmp_path / 'run'}"])).run
    with pytest.raises(GenoMoEError, match="holds no contig out"):
        evaluate_run(run.path)


def test_pretrain_without_held_out_contigs_ends_well(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["debug=fast", "data=fasta", f"data.train={run_dir.parent / 'train.fa'}", "data.context_length=32"]
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["pretrain", *overrides, f"paths.run_dir={tmp_path / 'run'}"])
    assert not exit_info.value.code
    assert "nothing is held out" in capsys.readouterr().err


def test_held_out_contigs_that_are_trained_on_are_warned_of(run_dir: Path, tmp_path: Path) -> None:
    same = f"{run_dir.parent / 'train.fa'}"
    overrides = ["debug=fast", "data=fasta", f"data.train={same}", f"data.val={same}", "data.context_length=32"]
    with pytest.warns(UserWarning, match=r"train\.fa/t is held out, but train\.fa/t .* is the same sequence"):
        pretrain(compose_config("pretrain", [*overrides, f"paths.run_dir={tmp_path / 'run'}"]))


def test_an_unfinished_run_says_so(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    with pytest.raises(FileNotFoundError, match="no finished model"):
        evaluate_run(tmp_path)


def test_a_run_config_cannot_name_code_to_run(run_dir: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(run_dir, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("genomoe.data.datamodule.GenomeDataModule", "os.system"))
    with pytest.raises(GenoMoEError, match="must be a class of genomoe"):
        evaluate_run(tmp_path / "run")
