"""The command line: readable one-sentence failures, exit codes, speed of import, an untouched sys.argv."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer
from typer.core import TyperGroup

from genomoe import cli
from genomoe.cli import models
from genomoe.inference.embedding import Pool
from genomoe.inference.engine import SCORES
from genomoe.inference.scoring import ScoringOptions
from genomoe.model.kernels import KernelOptions
from genomoe.ops import attention, grouped_mlp
from genomoe.training.precision import DTYPES


def call(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run `genomoe ARGUMENTS` in this process: exit code, stdout, stderr."""
    argv = list(sys.argv)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(list(arguments))
    assert sys.argv == argv
    out, err = capsys.readouterr()
    return int(exit_info.value.code or 0), out, err


def test_import_of_package_and_cli_loads_nothing_heavy() -> None:
    code = (
        "import sys, genomoe, genomoe.cli;"
        "heavy = {'torch', 'lightning', 'hydra', 'pandas', 'numpy', 'zarr', 'pysam'} & set(sys.modules);"
        "assert not heavy, heavy; assert 'Interval' in dir(genomoe)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_lazy_and_real() -> None:
    code = "import sys, genomoe; genomoe.Interval; genomoe.Variant; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    import genomoe

    assert genomoe.ModelConfig.__module__ == "genomoe.model.config"
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        _ = genomoe.Nope


BAD_OVERRIDES = {
    "trainer.max_stps=3": "did you mean trainer.max_steps?",
    "max_steps=3": "did you mean trainer.max_steps?",
    "model.hiden_size=64": "did you mean model.hidden_size?",
    "modle=yeast": "did you mean model?",
    "model=yaest": "did you mean yeast?",
    "trainer.max_steps=many": "expected a whole number",
    "trainer.max_steps=1.5": "expected a whole number",
    "trainer.max_steps=true": "expected a whole number",
    "optim.learning_rate=fast": "expected a number",
    "trainer.deterministic=perhaps": "expected true or false",
    "trainer.max_steps=[1": "cannot read the override",
    "steps": "is not an override",
    "+nonsense=1": "has no key nonsense",
    "trainer.max_steps=0": "at least 1",
    "trainer.log_every_n_steps=-1": "at least 1",
    "optim.learning_rate=-1": "above 0",
    "optim.schedule=cosin": "one of cosine, linear, constant",
    "optim.betas=[0.9]": "two numbers",
    "seed=-1": "seed=-1 is not allowed",
    "resume=maybe": "one of auto, always, never",
    "model.top_k=9": "greater than model.num_experts=8",
    "model.num_heads=5": "not a multiple of model.num_kv_heads",
    "model.hidden_size=0": "at least 1",
    "data.batch_size=0": "at least 1",
    "model.max_context=128": "data.context_length=256 is longer than model.max_context=128",
    "data._target_=os.system": "must be a class of genomoe.data",
    "trainer.accelerator=tpu": "one of auto, cpu, cuda",
    "kernels.experts=fussed": "no expert backend 'fussed'",
    "data.train=nowhere.fa": "nowhere.fa does not exist",
    "precision.compute=float16": "one of float32, bfloat16",
}


@pytest.mark.parametrize(("override", "words"), BAD_OVERRIDES.items(), ids=BAD_OVERRIDES)
def test_a_bad_override_is_one_sentence_and_exit_1(
    override: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call("pretrain", "debug=fast", f"paths.run_dir={tmp_path / 'run'}", override, capsys=capsys)
    assert code == 1
    assert not out
    assert words in err
    assert err.startswith("genomoe: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_missing_mandatory_value_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call("pretrain", "data=fasta", capsys=capsys)
    assert code == 1
    assert "data.train must be given" in err


def test_a_protein_fasta_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fasta = tmp_path / "p53.fa"
    fasta.write_text(">P04637\nMEEPQSDPSVEPPLSQETFSDLWKLLPENNVLSPLPSQAMDDLMLSPDDIEQWFTEDPGPDEAPRMPEAAPPVAPAPAAPTPAA\n")
    code, _, err = call("pretrain", "debug=fast", "data=fasta", f"data.train={fasta}", capsys=capsys)
    assert code == 1
    assert "protein" in err
    assert str(fasta) in err


def test_evaluate_of_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call("evaluate", str(tmp_path / "gone"), capsys=capsys)
    assert code == 1
    assert "is not a run directory" in err


def test_a_damaged_run_directory_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("data: [")
    code, _, err = call("evaluate", str(tmp_path), capsys=capsys)
    assert code == 1
    assert "config.yaml is not valid YAML" in err


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("pretrian", capsys=capsys)[0] == 2
    assert call("evaluate", capsys=capsys)[0] == 2


def test_a_wrong_choice_is_refused_before_any_file_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call("score", "a.vcf", "-r", "a.fa", "-m", "a", "-o", "a.tsv", "--score", "lrr", capsys=capsys)
    assert code == 2
    assert "'lrr' is not one of 'llr', 'marginal'" in err
    assert "(see genomoe score --help)." in err
    assert err.count("\n") == 1


def test_the_choices_are_those_of_the_modules_behind() -> None:
    score, embed, options = (get_type_hints(owner) for owner in (models.score, models.embed, ScoringOptions))
    for name in ("window_mode", "strands", "ref_mismatch", "unknown_contig"):
        assert score[name] == options[name], name
    assert get_args(models.ScoreName) == tuple(SCORES)
    assert embed["pool"] == Pool
    assert get_args(models.DtypeName) == tuple(DTYPES)
    assert {*get_args(score["precision"])} == {*get_args(get_type_hints(KernelOptions)["precision"])} - {"nvfp4"}


def test_a_warning_is_one_line_without_code() -> None:
    code = (
        "import warnings; from genomoe import cli; import genomoe.commands.doctor as doctor;"
        "doctor.run = lambda **_: warnings.warn('one\\ntwo'); cli.main(['doctor'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "genomoe: warning: one two\n"


@pytest.mark.parametrize("arguments", [("doctor",), ("corpus", "validate", "{folder}/naïve genome.fa")], ids=" ".join)
def test_a_terminal_without_the_characters_gets_question_marks(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "naïve genome.fa").write_text(">a\nACGT\n")
    command = [sys.executable, "-m", "genomoe", *(argument.format(folder=tmp_path) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, check=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert not done.stderr
    assert done.stdout.isascii()


def test_debug_shows_the_traceback() -> None:
    command = [sys.executable, "-m", "genomoe", "pretrain", "trainer.max_stps=3", "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def _names(group: TyperGroup) -> list[str]:
    names = []
    for name, command in group.commands.items():
        names += [f"{name} {inner}" for inner in _names(command)] if isinstance(command, TyperGroup) else [name]
    return names


COMMANDS = _names(typer.main.get_command(cli.app))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call(*command.split(), "--help", capsys=capsys)
    assert code == 0
    assert f"Example: genomoe {command}" in out


@pytest.mark.parametrize(
    ("command", "default"),
    {
        "evaluate": "half the context",
        "plan": "this machine's",
        "score": "to the window's end",
        "generate": "stdout",
    }.items(),
)
def test_help_tells_defaults_that_are_no_value(
    command: str, default: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert f"[default: ({default})]" in call(command, "--help", capsys=capsys)[1]


def test_plan_counts_genos(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call("plan", "model=genos-1.2b", "precision=bf16", "--json", capsys=capsys)
    assert code == 0
    figures = json.loads(out)
    assert figures["parameters"] == pytest.approx(1.25e9, rel=0.01)
    assert figures["active_parameters"] < figures["parameters"] / 3
    assert sum(figures["memory_bytes"].values()) == figures["total_bytes"]


def test_doctor_names_every_backend_and_every_reason_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    code, out, _ = call("doctor", "--json", capsys=capsys)
    assert code == 0
    findings = json.loads(out)
    assert {row["part"] for row in findings["backends"]} == {"experts", "attention"}
    assert all(row["why"] for row in findings["backends"])
    everything = {"experts": set(grouped_mlp.BACKENDS), "attention": set(attention.BACKENDS) - {"auto"}}
    for row in findings["backends"]:
        assert row["picked"] == "none" or {row["picked"], *row["others"]} == everything[row["part"]]
        assert all(row["others"].values())
    code, out, _ = call("doctor", capsys=capsys)
    assert code == 0
    for why in {row["why"] for row in findings["backends"]}:
        assert out.count(why) == 1
    assert out.count("grouped_mm multiplies and keeps") == 1
    assert "Not taken" in out
    assert "genomoe[te]" in "".join(out.split())
