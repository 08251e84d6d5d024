"""Fine-tuning on small made-up tasks: every mode learns, nothing leaks, and the run directory is whole."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

from genomoe.cli import main
from genomoe.commands.finetune import run_config
from genomoe.evaluation.discrimination import METRICS, auroc, pearson
from genomoe.evaluation.finetuning import comparison, ridge_baselines
from genomoe.genome.alphabet import MappedTokenizer, NucleotideTokenizer, reverse_complement
from genomoe.genome.huggingface_tokenizer import huggingface_tokenizer
from genomoe.model.config import ModelConfig
from genomoe.model.pretrained import export_mixtral, from_pretrained, save_pretrained
from genomoe.model.transformer import GenoMoEModel
from genomoe.training.compose import compose_config
from genomoe.training.features import FeatureModel, TokenTable, cache_features, one_hot_features
from genomoe.training.finetune import FineTuneOptions, finetune, split_metrics, train_on_one_hot
from genomoe.training.finetuned import load_finetuned
from genomoe.training.options import ConfigError
from genomoe.training.tasks import TaskConfig, build_task

TOKENIZER = NucleotideTokenizer()


def make_model() -> GenoMoEModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ModelConfig(
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_size=8,
            expert_size=32,
            num_experts=4,
            top_k=2,
            max_context=256,
            initializer_std=0.1,
        )
        return GenoMoEModel(config)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    """Labels: G at position 3 and the product of two others, so that a linear model does not have it all."""
    random = np.random.default_rng(0)
    sequences = random.choice(list("ACGT"), size=(600, 12))
    label = (sequences[:, 3] == "G") + 1.0 * (sequences[:, 6] == "A") * (sequences[:, 8] == "T")
    return pd.DataFrame(
        {
            "sequence": ["".join(row) for row in sequences],
            "label": label + random.normal(0, 0.1, 600),
            "split": random.choice(["train", "validation", "test"], 600, p=[0.6, 0.2, 0.2]),
        }
    )


def task_config(**changes) -> TaskConfig:
    return TaskConfig(**({"name": "toy", "table": "toy.csv"} | changes))


def options(**changes) -> FineTuneOptions:
    usual = {"seeds": [1, 2], "max_epochs": 12, "batch_size": 64, "learning_rate": 5e-3, "dropout": 0.0}
    return FineTuneOptions(**(usual | changes))


@pytest.mark.parametrize("mode", ["probe", "head", "lora", "full"])
def test_every_mode_learns(table, mode):
    task = task_config()
    data = build_task(task, table)
    before = {name: value.clone() for name, value in make_model().state_dict().items()}
    result = finetune(
        data,
        task,
        options(mode=mode, seeds=[1], backbone_learning_rate=3e-3),
        make_model,
        TOKENIZER,
        metric=pearson,
    )
    (value,) = split_metrics(result, data, {"pearson": pearson})["pearson"]
    assert value > 0.6
    changed = {name for name, tensor in result.model.state_dict().items() if not torch.equal(tensor, before[name])}
    if mode in ("probe", "head"):
        assert not changed
    else:
        assert any("experts.w_up" in name for name in changed)
        assert any("qkv" in name for name in changed)
        assert any("router" in name for name in changed) == (mode == "full")


def test_seeds_differ_and_repeat(table):
    task = task_config()
    data = build_task(task, table)
    first, second = (
        finetune(data, task, options(max_epochs=2), make_model, TOKENIZER, metric=pearson) for _ in range(2)
    )
    assert not np.array_equal(first.seeds[0].predictions, first.seeds[1].predictions)
    for one, other in zip(first.seeds, second.seeds, strict=True):
        np.testing.assert_array_equal(one.predictions, other.predictions)


def test_stops_early_and_keeps_the_best_epoch(table):
    task = task_config()
    data = build_task(task, table)
    scrambled = data.labels.copy()
    train = data.where("train")
    scrambled[train] = np.random.default_rng(0).permutation(scrambled[train])
    import dataclasses

    noise = dataclasses.replace(data, labels=scrambled)
    result = finetune(noise, task, options(seeds=[1], max_epochs=50, patience=2), make_model, TOKENIZER, metric=pearson)
    (seed,) = result.seeds
    assert seed.epochs < 50
    assert seed.validation == max(row["validation"] for row in seed.history)


def test_classification_with_class_weights_and_average_strands(table):
    labelled = table.assign(label=np.where(table["label"] > 0.5, "high", "low"))
    task = task_config(kind="classification", metric="auroc", metrics=["auroc", "mcc"])
    data = build_task(task, labelled)
    assert data.classes == ("high", "low")
    result = finetune(
        data,
        task,
        options(strands="average", class_weights="balanced", seeds=[1]),
        make_model,
        TOKENIZER,
        metric=auroc,
    )
    np.testing.assert_allclose(result.seeds[0].predictions.sum(1), 1)
    assert split_metrics(result, data, {"auroc": auroc})["auroc"][0] > 0.8


@pytest.mark.parametrize("pooling", ["mean", "max", "last"])
def test_sequences_of_several_lengths_pool(table, pooling):
    ragged = table.assign(sequence=[s[: 8 + i % 5] for i, s in enumerate(table["sequence"])])
    task = task_config()
    data = build_task(task, ragged)
    result = finetune(
        data, task, options(pooling=pooling, seeds=[1], max_epochs=2), make_model, TOKENIZER, metric=pearson
    )
    assert np.isfinite(result.seeds[0].predictions).all()
    with pytest.raises(ValueError, match="pooling=position is not allowed: it must be mean, max or last"):
        finetune(data, task, options(), make_model, TOKENIZER, metric=pearson)


def test_features_are_those_of_the_models_own_strand_order(table):
    """The minus strand's features stand at the base they belong to, and flanks are left out."""
    data = build_task(task_config(), table.head(40))
    model, layer = make_model(), 1
    tokens = TokenTable(data, TOKENIZER, both_strands=True)
    feature_model = FeatureModel(model, layer=layer, strands="concat", pair=False, pad_id=TOKENIZER.pad_id)
    features, mask = cache_features(feature_model, tokens, batch=7)
    assert features.shape == (40, 1, 12, 64)
    assert mask.all()
    for row in (0, 39):
        for part, strand in ((slice(0, 32), "+"), (slice(32, 64), "-")):
            sequence = data.alt[row] if strand == "+" else reverse_complement(data.alt[row])
            ids = torch.from_numpy(TOKENIZER.encode(sequence).copy()).long()[None]
            hidden = model(ids, output_hidden_states=True).hidden_states[layer][0]
            expected = hidden if strand == "+" else hidden.flip(0)
            torch.testing.assert_close(features[row, 0, :, part].float(), expected, atol=2e-3, rtol=2e-3)


def test_locus_puts_sequences_in_their_surroundings(tmp_path):
    (tmp_path / "r.fa").write_text(">c\nAAAACCCCGGGGTTTT\n")
    task = task_config(reference=str(tmp_path / "r.fa"), locus="c:5-8:-", flank=3)
    frame = pd.DataFrame(
        {"sequence": ["GGGG", "ACGT"] * 3, "label": range(6), "split": ["train", "validation", "test"] * 2}
    )
    data = build_task(task, frame)
    assert data.alt[:2] == [b"CCC" + b"GGGG" + b"TTT", b"CCC" + b"ACGT" + b"TTT"]
    assert data.centre == slice(3, 7)
    tokens = TokenTable(data, TOKENIZER, both_strands=True)
    assert tokens.positions == 4
    hot, _ = one_hot_features(tokens, TOKENIZER)
    assert hot[1, 0].argmax(-1).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="row 1: the sequence has 2 bases, its locus 4"):
        build_task(task, frame.assign(sequence="AC"))


def test_pairs_of_windows_around_variants(tmp_path):
    random = np.random.default_rng(1)
    sequence = "".join(random.choice(list("ACGT"), 400))
    (tmp_path / "r.fa").write_text(f">chr1\n{sequence}\n>chr2\n{sequence[::-1]}\n")
    rows = [
        (contig, at + 1, s[at], "ACGT"["ACGT".index(s[at]) - 1])
        for contig, s in (("1", sequence), ("2", sequence[::-1]))
        for at in range(30, 370, 2)
    ]
    frame = pd.DataFrame(rows, columns=["contig", "position", "ref", "alt"])
    frame["label"] = (frame["alt"] == "G").astype(int)
    frame.loc[0, "ref"] = "A" if frame.loc[0, "ref"] != "A" else "C"
    task = task_config(
        input="pair",
        kind="classification",
        reference=str(tmp_path / "r.fa"),
        window=16,
        splits={"by": "random", "validation": 0.2, "test": 0.2},
        metric="auroc",
    )
    data = build_task(task, frame)
    assert sum(data.dropped.values()) == 1
    assert all(len(a) == len(r) == 16 and a != r for a, r in zip(data.alt, data.ref, strict=True))
    result = finetune(data, task, options(seeds=[1]), make_model, TOKENIZER, metric=auroc)
    assert split_metrics(result, data, {"auroc": auroc})["auroc"][0] > 0.8
    by_contig = task_config(
        input="pair",
        kind="classification",
        reference=str(tmp_path / "r.fa"),
        splits={"by": "contig", "validation": ["2"], "test": ["1"]},
    )
    with pytest.raises(ValueError, match=r"no row of .* is in the train split"):
        build_task(by_contig, frame)


def test_baselines_are_on_the_same_rows(table):
    task = task_config()
    data = build_task(task, table)
    results = {
        "one-hot": train_on_one_hot(data, options(), TOKENIZER, metric=pearson),
        **ridge_baselines(data, task, k=2),
    }
    compared = comparison(results, data, task)
    assert compared.groupby("predictor")["seeds"].first().to_dict() == {
        "one-hot": 2, "one-hot ridge": 1, "2-mer ridge": 1
    }  # fmt: skip
    by_name = compared[compared["metric"] == "pearson"].set_index("predictor")["mean"]
    assert by_name["one-hot"] > by_name["one-hot ridge"] > by_name["2-mer ridge"]
    assert set(compared["metric"]) <= set(METRICS)


def test_mistakes_are_told():
    for bad, message in [
        ({"mode": "all"}, "mode=all is not allowed"),
        ({"pooling": "sum"}, "pooling=sum"),
        ({"seeds": []}, "at least one"),
        ({"patience": 0}, "patience=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            options(**bad)
    with pytest.raises(ValueError, match="no column label"):
        build_task(task_config(), pd.DataFrame({"sequence": ["A"]}))
    with pytest.raises(ValueError, match="no column split"):
        build_task(task_config(), pd.DataFrame({"sequence": ["A"], "label": [1.0]}))
    with pytest.raises(ValueError, match="a FASTA file for variants"):
        task_config(input="pair")


def test_a_foreign_folder_is_read_with_its_own_ids(table, tmp_path):
    ids = MappedTokenizer(
        ids={"A": 7, "C": 6, "G": 5, "T": 4, "N": 3}, special={"pad": 0, "bos": 1, "eos": 2}, vocab_size=16
    )
    export_mixtral(make_model(), ids.to_dict(), tmp_path / "hf", files=huggingface_tokenizer(ids))
    (tmp_path / "hf" / "genomoe_tokenizer.json").unlink()
    table.to_csv(tmp_path / "toy.csv", index=False)
    config = compose_config(
        "finetune",
        [
            "task=sequences", f"task.table={tmp_path / 'toy.csv'}", "task.kind=regression", "task.metric=pearson",
            "task.metrics=[pearson]", f"pretrained={tmp_path / 'hf'}", f"paths.run_dir={tmp_path / 'run'}",
            "max_epochs=1", "seeds=[1]", "control=false", "baselines=false", "device=cpu",
        ],
    )  # fmt: skip
    run_config(config)
    assert load_finetuned(tmp_path / "run").tokenizer.base_ids == (7, 6, 5, 4)


def test_sequences_longer_than_the_context_are_told():
    long = pd.DataFrame(
        {"sequence": ["ACGT" * 70] * 6, "label": [0.0, 1.0, 0.5] * 2, "split": ["train", "validation", "test"] * 2}
    )
    data = build_task(task_config(), long)
    with pytest.raises(ConfigError, match="longest sequence has 280 tokens, but the model reads at most 256"):
        finetune(data, task_config(), options(), make_model, TOKENIZER, metric=METRICS["pearson"])


def test_command_writes_a_run(table, tmp_path, capsys):
    save_pretrained(make_model(), TOKENIZER.to_dict(), tmp_path / "pre" / "model")
    table.to_csv(tmp_path / "toy.csv", index=False)
    arguments = [
        "finetune", "task=sequences", f"task.table={tmp_path / 'toy.csv'}", "task.kind=regression",
        "task.metric=pearson", "task.metrics=[pearson,spearman]", f"model={tmp_path / 'pre'}",
        f"paths.run_dir={tmp_path / 'run'}", "max_epochs=2", "seeds=[1,2]", "device=cpu",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert not done.value.code
    assert "one-hot ridge" in capsys.readouterr().out
    report = json.loads((tmp_path / "run" / "report" / "finetune.json").read_text())
    assert {row["predictor"] for row in report["comparison"]} == {
        "pretrained", "random weights", "head on one-hot bases", "one-hot ridge", "5-mer ridge"
    }  # fmt: skip
    assert from_pretrained(tmp_path / "run" / "model")[0].config.hidden_size == 32
    for name in (
        "config.yaml",
        "metrics.csv",
        "environment.json",
        "head.safetensors",
        "report/predictions.csv",
    ):
        assert (tmp_path / "run" / name).is_file()
    fine_tuned, rows = load_finetuned(tmp_path / "run"), pd.read_csv(tmp_path / "run" / "report" / "predictions.csv")
    best = pd.read_csv(tmp_path / "run" / "metrics.csv").query("predictor == 'pretrained'")
    seed = best.loc[best["validation"].idxmax(), "seed"]
    again = fine_tuned.predict(table.iloc[rows["row"]])  # float16 was kept while training
    np.testing.assert_allclose(again, rows[f"pretrained {seed}"], atol=5e-3)
    with pytest.raises(ValueError, match="reads sequences of 12 bases"):
        fine_tuned.predict(pd.DataFrame({"sequence": ["ACGT"]}))
    with pytest.raises(FileNotFoundError, match=r"no head\.json"):
        load_finetuned(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 1
    assert "already holds a finished run" in capsys.readouterr().err
    for wrong, message in [
        (["task=sortsec", "model=x"], "did you mean sortseq"),
        ([], "model must be given: add model=VALUE"),
        ([f"model={tmp_path / 'pre'}", "mode=all"], "genomoe: mode=all is not allowed"),
    ]:
        with pytest.raises(SystemExit):
            main(["finetune", *wrong])
        assert message in capsys.readouterr().err
