"""Saved models come back bit by bit, and Hugging Face opens what we export."""

from __future__ import annotations

import json

import pytest
import torch

from genomoe.model import GenoMoEModel, ModelConfig
from genomoe.model.pretrained import export_mixtral, from_pretrained, import_mixtral, save_pretrained
from genomoe.ops.rope import RopeScaling

CONFIG = ModelConfig(
    vocab_size=16, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, expert_size=48,
    num_experts=4, top_k=2, max_context=64,
)  # fmt: skip
TOKENIZER = {"name": "nucleotide", "pad_id": 0, "bos_id": 1, "eos_id": 2}
TOKENS = torch.randint(0, 16, (2, 19), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_embeddings": True},
        {"qk_norm": True, "num_shared_experts": 1, "router_scores": "sigmoid", "router_bias_balancing": True},
        {
            "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_context=16),
            "window": 8,
            "global_every": 2,
        },
    ],
    ids=["mixtral", "tied", "everything", "yarn-window"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_identical(tmp_path, change: dict, dtype: torch.dtype) -> None:
    model = GenoMoEModel(CONFIG.replace(**change), dtype=dtype).eval()
    save_pretrained(model, TOKENIZER, tmp_path / "model", card={"data": "none"})
    back, tokenizer = from_pretrained(tmp_path / "model", verify=True)
    assert tokenizer == TOKENIZER
    assert back.config == model.config
    assert not back.training
    for name, value in model.state_dict().items():
        assert back.state_dict()[name].dtype == value.dtype, name
        assert torch.equal(back.state_dict()[name], value), name
    assert torch.equal(back(TOKENS).logits, model(TOKENS).logits)


def test_saving_again_replaces_and_a_failure_leaves_the_old_one(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "model"
    first = GenoMoEModel(CONFIG)
    save_pretrained(first, TOKENIZER, folder)
    second = GenoMoEModel(CONFIG)
    save_pretrained(second, TOKENIZER, folder)
    assert torch.equal(from_pretrained(folder)[0].embed.weight, second.embed.weight)

    def disk_full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("genomoe.model.pretrained.save_file", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(first, TOKENIZER, folder)
    assert torch.equal(from_pretrained(folder)[0].embed.weight, second.embed.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_of_something_else_is_not_overwritten(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="not a model folder"):
        save_pretrained(GenoMoEModel(CONFIG), TOKENIZER, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_bad_folders_say_what_is_wrong(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        from_pretrained(tmp_path / "absent")
    folder = tmp_path / "model"
    save_pretrained(GenoMoEModel(CONFIG), TOKENIZER, folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["architecture"]["expert_size"] = 40
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"w_up.*\(4, 96, 32\).*\(4, 80, 32\)"):
        from_pretrained(folder)
    fields["format_version"] = 99
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="format version 99"):
        from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        from_pretrained(folder)
    save_pretrained(GenoMoEModel(CONFIG), TOKENIZER, folder)
    weights = folder / "model.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[-1] ^= 1
    weights.write_bytes(flipped)
    with pytest.raises(ValueError, match="SHA-256"):
        from_pretrained(folder, verify=True)
    weights.write_bytes(flipped[: len(flipped) // 2])
    with pytest.raises(ValueError, match="not a whole safetensors"):
        from_pretrained(folder)


def test_loading_in_bfloat16_leaves_the_router_alone(tmp_path) -> None:
    model = GenoMoEModel(CONFIG)
    save_pretrained(model, TOKENIZER, tmp_path / "model")
    back, _ = from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert back.embed.weight.dtype == torch.bfloat16
    assert torch.equal(back.layers[0].moe.router.weight, model.layers[0].moe.router.weight)


class TestMixtralFolders:
    @pytest.mark.parametrize("scaling", [None, "linear", "ntk", "yarn"])
    def test_hugging_face_reads_what_we_export_and_we_read_it_back(self, tmp_path, scaling) -> None:
        transformers = pytest.importorskip("transformers")
        rope = None if scaling is None else RopeScaling(kind=scaling, factor=4.0, original_max_context=16)
        model = GenoMoEModel(CONFIG.replace(rope_scaling=rope)).eval()
        export_mixtral(model, TOKENIZER, tmp_path / "hf")
        theirs = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
        with torch.no_grad():
            expected = model(TOKENS).logits
            torch.testing.assert_close(theirs(TOKENS).logits, expected, atol=1e-5, rtol=0)
            theirs.save_pretrained(tmp_path / "theirs")
            for folder in ("hf", "theirs"):
                back, _ = from_pretrained(tmp_path / folder)
                torch.testing.assert_close(back(TOKENS).logits, expected, atol=1e-6, rtol=0)
        assert import_mixtral(tmp_path / "hf")[1] == TOKENIZER

    def test_export_in_shards(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr("genomoe.model.pretrained.SHARD_BYTES", 20_000)
        model = GenoMoEModel(CONFIG)
        export_mixtral(model, TOKENIZER, tmp_path / "hf")
        assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
        back, _ = import_mixtral(tmp_path / "hf")
        for name, value in model.state_dict().items():
            assert torch.equal(back.state_dict()[name], value), name

    @pytest.mark.parametrize(
        "change",
        [
            {"qk_norm": True},
            {"num_shared_experts": 1},
            {"router_scores": "sigmoid"},
            {"router_bias_balancing": True},
        ],
    )
    def test_what_mixtral_lacks_is_refused_with_its_name(self, tmp_path, change) -> None:
        with pytest.raises(ValueError, match=next(iter(change))):
            export_mixtral(GenoMoEModel(CONFIG.replace(**change)), TOKENIZER, tmp_path / "hf")
        assert not (tmp_path / "hf").exists()

    def test_an_incomplete_checkpoint_names_the_tensor(self, tmp_path) -> None:
        from safetensors.torch import load_file, save_file

        export_mixtral(GenoMoEModel(CONFIG), TOKENIZER, tmp_path / "hf")
        file = tmp_path / "hf" / "model.safetensors"
        state = load_file(file)
        state.pop("model.layers.1.self_attn.k_proj.weight")
        save_file(state, file)
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_proj"):
            import_mixtral(tmp_path / "hf")
