"""Files of a draft-head checkpoint: config.json and its tensors, safetensors or PyTorch, sharded or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

# Prefixes under which tools store one and the same head.
PREFIXES = ("model.", "draft_model.", "eagle.", "drafter.", "module.")


def read_files(path: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    """Reads (config, tensors by stored name, what was read) from a folder, or from a weight file beside a
    config.json.

    Raises FileNotFoundError where a file is missing, ValueError where one cannot be read safely. Pickles are
    read with `weights_only=True`: nothing in them is executed.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"head: {path} does not exist")
    if path.suffix == ".gguf" or (
        path.is_dir() and not list(path.glob("config.json")) and list(path.glob("*.gguf"))
    ):
        raise ValueError(f"head: {path}: GGUF draft heads are not supported; use the safetensors checkpoint")
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"head: {folder} holds no config.json")
    try:
        config = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"head: {folder / 'config.json'} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"head: {folder / 'config.json'}: expected an object, got {type(config).__name__}")
    files = _weight_files(path) if path.is_dir() else [path]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in _read_weights(file).items():
            if name in tensors:
                raise ValueError(f"head: tensor {name} stands in several files of {folder}")
            tensors[name] = tensor
    return config, tensors, ", ".join(file.name for file in files)


def _weight_files(folder: Path) -> list[Path]:
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if missing := [name for name in names if not (folder / name).is_file()]:
                raise FileNotFoundError(
                    f"head: {folder}: files named by the index are missing: {', '.join(missing)}"
                )
            return [folder / name for name in names]
        if (folder / single).is_file():
            return [folder / single]
    found = ", ".join(sorted(file.name for file in folder.iterdir())[:8])
    raise FileNotFoundError(
        f"head: {folder} holds neither model.safetensors nor pytorch_model.bin; found: {found}"
    )


def _read_weights(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(file)
        except SafetensorError as error:
            raise ValueError(f"head: {file} is not a safetensors file: {error}") from error
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling errors have many types; all mean the same to the caller
        raise ValueError(
            f"head: {file} cannot be read as plain tensors: {str(error).splitlines()[0]}"
        ) from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise ValueError(f"head: {file}: expected a dictionary of tensors")
    return dict(loaded)


def strip_prefixes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names without the leading words of PREFIXES, and the one layer of official EAGLE-3 heads as
    `layers.0`."""
    stripped: dict[str, torch.Tensor] = {}
    origin: dict[str, str] = {}
    for stored, tensor in tensors.items():
        name = stored
        while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
            name = name[len(prefix) :]
        if name.startswith("midlayer."):
            name = "layers.0." + name[len("midlayer.") :]
        if name in stripped:
            raise ValueError(f"head: tensors {origin[name]} and {stored} are the same tensor {name}")
        stripped[name], origin[name] = tensor, stored
    return stripped
