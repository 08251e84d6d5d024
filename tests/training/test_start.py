"""Starting from earlier weights, and the stages of the context extension that do."""

import dataclasses
import itertools

import pytest
import torch

from genomoe.genome.alphabet import MappedTokenizer, NucleotideTokenizer, make_tokenizer
from genomoe.genome.huggingface_tokenizer import huggingface_tokenizer
from genomoe.model.config import ModelConfig
from genomoe.model.pretrained import export_mixtral, from_pretrained, save_pretrained
from genomoe.model.transformer import GenoMoEModel
from genomoe.training.compose import compose_config
from genomoe.training.options import ConfigError
from genomoe.training.run import model_config, pretrain
from genomoe.training.start import MAY_DIFFER, start_from

CONFIG = ModelConfig.preset("tiny", hidden_size=32, num_layers=1, expert_size=32, num_experts=4, max_context=64)
TOKENIZER = NucleotideTokenizer().to_dict()
IDS = MappedTokenizer(
    ids={"A": 7, "C": 6, "G": 5, "T": 4, "N": 3}, special={"pad": 0, "bos": 1, "eos": 2}, vocab_size=16
)
YARN = {"kind": "yarn", "factor": 4.0, "original_max_context": 64}
STAGES = ("8k", "32k", "131k", "1m")


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    return save_pretrained(GenoMoEModel(CONFIG), TOKENIZER, tmp_path / "run" / "model").parent


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_taken_over_in_the_new_runs_dtype_and_rope(tmp_path, tied, dtype) -> None:
    config = CONFIG.replace(tie_embeddings=tied)
    source = GenoMoEModel(config)
    save_pretrained(source, TOKENIZER, tmp_path / "model")
    model = GenoMoEModel(config.replace(max_context=256, rope_scaling=YARN), dtype=dtype)
    start_from(model, TOKENIZER, tmp_path / "model")
    assert model.config.max_context == 256
    for name, tensor in source.state_dict().items():
        got = model.state_dict()[name]
        assert got.dtype == (torch.float32 if "router" in name else dtype)
        assert torch.equal(got, tensor.to(got.dtype)), name


def test_every_field_that_may_differ_is_one_no_weight_depends_on(folder) -> None:
    assert {field.name for field in dataclasses.fields(ModelConfig)} >= MAY_DIFFER
    changed = CONFIG.replace(
        max_context=128, rope_theta=1e6, window=16, global_every=2, aux_loss_coef=0.0, z_loss_coef=0.0,
        router_bias_rate=0.1, initializer_std=0.5,
    )  # fmt: skip
    start_from(GenoMoEModel(changed), TOKENIZER, folder)


def test_another_architecture_or_tokenizer_is_refused_by_name(folder, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"expert_size=32, this run model.expert_size=64"):
        start_from(GenoMoEModel(CONFIG.replace(expert_size=64)), TOKENIZER, folder)
    with pytest.raises(ConfigError, match="tokenizer"):
        start_from(GenoMoEModel(CONFIG), make_tokenizer("byte").to_dict(), folder)
    foreign = export_mixtral(GenoMoEModel(CONFIG), TOKENIZER, tmp_path / "hf", files=huggingface_tokenizer(IDS))
    (foreign / "genomoe_tokenizer.json").unlink()
    start_from(GenoMoEModel(CONFIG), IDS.to_dict(), foreign)
    with pytest.raises(ConfigError, match=r"other ids than nucleotide.*`genomoe import`"):
        start_from(GenoMoEModel(CONFIG), TOKENIZER, foreign)
    with pytest.raises(FileNotFoundError, match="not a model folder"):
        start_from(GenoMoEModel(CONFIG), TOKENIZER, tmp_path / "nowhere")


def test_a_second_stage_goes_on_where_the_first_ended(tiny, tmp_path) -> None:
    first = pretrain(compose_config("pretrain", [*tiny, f"paths.run_dir={tmp_path}/a"]))
    longer = ["data.context_length=128", "trainer.max_steps=1", "+model.rope_scaling.kind=yarn"]
    longer += ["+model.rope_scaling.factor=2.0", "+model.rope_scaling.original_max_context=64"]
    longer += ["optim.learning_rate=1e-12", f"start_from={tmp_path}/a", f"paths.run_dir={tmp_path}/b"]
    second = pretrain(compose_config("pretrain", [*tiny, *longer]))
    before, after = (from_pretrained(run.run.model)[0] for run in (first, second))
    assert after.config.max_context == 128
    for name, tensor in before.state_dict().items():
        assert (after.state_dict()[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    assert f"{tmp_path}/a" in (second.run.model / "README.md").read_text()


def test_the_stages_follow_each_other(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    configs = [compose_config("pretrain", [f"experiment=context_extension_{stage}"]) for stage in STAGES]
    models = [model_config(config, 16) for config in configs]
    assert [config.data.context_length for config in configs] == [8192, 32768, 131072, 1048576]
    assert configs[0].start_from is None
    for earlier, later in itertools.pairwise(configs):
        assert later.start_from == earlier.paths.run_dir
    for config, model in zip(configs, models, strict=True):
        assert model.max_context == config.data.context_length
        assert {k for k, v in model.to_dict().items() if v != models[0].to_dict()[k]} <= MAY_DIFFER
        if model.rope_scaling is None:
            assert model.rope_theta > 0.0424 * model.max_context**1.628  # arXiv:2405.14591
        else:
            assert model.rope_scaling.longest_context == model.max_context
            assert model.rope_scaling.original_max_context == models[2].max_context
            assert model.rope_theta == models[2].rope_theta
