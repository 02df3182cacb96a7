"""Tokenizers of targets: through transformers, for Hugging Face folders and GGUF files alike.

tokenizer = load_tokenizer("smollm2-135m")
ids = chat_prompt(tokenizer, "What is a tree?")      # list of int, chat template applied, answer to begin
stops = stop_token_ids(tokenizer, checkpoint.config)
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle_decode.models.checkpoint import cache_folder, resolve_target

# Text whose encoding must decode to itself: digits, indentation, accents, ideographs, an emoji.
_ROUND_TRIP = "Hello, world!  def f(x):\n\treturn x**2 + 1234567\n\nnaïve café — 東京 🙂 x=1;  \n  \n"


def load_tokenizer(target: str | Path):
    """Returns the transformers tokenizer of `target` (a folder, a .gguf file, or the name of a packaged
    target).

    For a GGUF file of the `smollm` pre-tokenizer kind, the step that splits numbers into single digits, which
    the conversion loses, is put back. Raises ValueError where text does not survive encoding and decoding.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    path = resolve_target(target)
    if path.is_file():
        converted = _converted_folder(path)
        if not converted.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
            if _gguf_pre_tokenizer(path) == "smollm":
                _split_digits(tokenizer)
            check_round_trip(tokenizer, path)
            _keep(tokenizer, converted)
            return tokenizer
        path = converted
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    check_round_trip(tokenizer, path)
    return tokenizer


def check_round_trip(tokenizer, source: str | Path) -> None:
    """Raises ValueError where encoding and decoding change digits, indentation or foreign scripts."""
    decoded = tokenizer.decode(encode(tokenizer, _ROUND_TRIP), clean_up_tokenization_spaces=False)
    for token in tokenizer.all_special_tokens:  # a beginning-of-text token that encoding adds is no damage
        decoded = decoded.replace(token, "")
    if decoded.strip() != _ROUND_TRIP.strip():
        raise ValueError(f"{source}: the tokenizer does not round-trip: {_ROUND_TRIP!r} became {decoded!r}")


def encode(tokenizer, text: str) -> list[int]:
    """Token ids of plain text; special tokens written out in the text (`<|im_start|>`) become their ids."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def chat_prompt(tokenizer, messages: str | Iterable[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation, up to where the assistant begins to answer.

    messages: one user turn as text, or dictionaries with `role` and `content`. Without a chat template the
    contents are joined by newlines.
    """
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n".join(turn["content"] for turn in turns))["input_ids"])
    return encode(tokenizer, tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))


def bare_user_prefix(tokenizer) -> list[int]:
    """Token ids of a chat up to where the user begins to write; from here a target invents user turns."""
    marker = "\x00user turn\x00"
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the tokenizer has no chat template, so the target cannot invent user turns: pass prompts"
        )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], add_generation_prompt=True, tokenize=False
    )
    return encode(tokenizer, text[: text.index(marker)])


def stop_token_ids(tokenizer, config: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer: those of the checkpoint's configuration and the tokenizer's own, sorted."""
    stops = set(config.get("eos_token_id") or [])
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    return sorted(stops)


def _converted_folder(path: Path) -> Path:
    """Where the tokenizer of a GGUF file is kept once it is converted, which takes seconds. The name changes
    with the file, with what converts it, and with this module."""
    import transformers

    state = path.stat()
    key = (str(path.resolve()), state.st_size, state.st_mtime_ns, transformers.__version__)
    digest = hashlib.sha256(repr(key).encode() + Path(__file__).read_bytes()).hexdigest()[:16]
    return cache_folder() / "tokenizers" / f"{path.stem}-{digest}"


def _keep(tokenizer, folder: Path) -> None:
    """Saves the tokenizer as `folder`, whole or not at all; a cache that cannot be written is no error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
            tokenizer.save_pretrained(Path(partial) / "tokenizer")
            os.replace(Path(partial) / "tokenizer", folder)
    except OSError:
        pass


def _gguf_pre_tokenizer(path: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(path).fields.get("tokenizer.ggml.pre")
    return field.contents() if field else None


def _split_digits(tokenizer) -> None:
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
