"""`genomoe export` and `genomoe import`: there and back gives the same weights, and mistakes are sentences."""

import json
from pathlib import Path

import pytest
import torch

from genomoe import cli
from genomoe.genome.alphabet import make_tokenizer
from genomoe.model.config import ModelConfig
from genomoe.model.pretrained import from_pretrained, save_pretrained
from genomoe.model.transformer import GenoMoEModel


def call(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(argument) for argument in arguments])
    return int(exit_info.value.code or 0), capsys.readouterr().err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = GenoMoEModel(ModelConfig.preset("tiny", num_layers=1, hidden_size=32, head_size=8, expert_size=16))
    save_pretrained(model, make_tokenizer("nucleotide").to_dict(), tmp_path / "run" / "model")
    return tmp_path / "run"


def test_there_and_back_is_bit_identical(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("export", run, "--out", tmp_path / "hf", capsys=capsys)[0] == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "mixtral"
    assert call("import", tmp_path / "hf", "--out", tmp_path / "back", capsys=capsys)[0] == 0
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (run / "model" / name).read_bytes(), name


def test_transformers_opens_the_exported_folder(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    assert call("export", run, "--out", tmp_path / "hf", capsys=capsys)[0] == 0
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("ACGTN", return_tensors="pt")["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(tokens).logits
    model, tokenizer = from_pretrained(run / "model")
    assert tokens[0].tolist() == make_tokenizer(tokenizer).encode("ACGTN").tolist()
    torch.testing.assert_close(theirs, model(tokens).logits, rtol=1e-4, atol=1e-5)
    (tmp_path / "hf" / "genomoe_tokenizer.json").unlink()  # now as any other project's folder
    assert call("import", tmp_path / "hf", "--out", tmp_path / "back", capsys=capsys)[0] == 0
    assert make_tokenizer(str(tmp_path / "back" / "tokenizer.json")).encode("ACGTN").tolist() == tokens[0].tolist()


def test_an_incomplete_configuration_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "vocab_size": 16}')
    code, err = call("import", tmp_path, "--out", tmp_path / "out", capsys=capsys)
    assert (code, "config.json lacks hidden_size, num_hidden_layers" in err) == (1, True)


def test_mistakes_are_sentences(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    code, err = call("export", tmp_path, "--out", out, capsys=capsys)
    assert (code, "is not a model folder" in err) == (1, True)
    assert call("export", run, "--out", tmp_path / "hf", capsys=capsys)[0] == 0
    code, err = call("import", tmp_path / "hf", "--out", out, "--tokenizer", "kmer4", capsys=capsys)
    assert (code, "only 16 rows" in err) == (1, True)
    for name in ("tokenizer.json", "genomoe_tokenizer.json"):
        (tmp_path / "hf" / name).unlink(missing_ok=True)
    code, err = call("import", tmp_path / "hf", "--out", out, capsys=capsys)
    assert (code, "give --tokenizer" in err) == (1, True)
    assert not out.exists()
