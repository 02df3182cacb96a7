"""generation_config.json: an explicit argument, else what the file sets, else SamplingParams' own default."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from eagle_decode import Engine, SamplingParams, cli
from eagle_decode.generation_config import default_sampling, set_fields
from eagle_decode.models.llama import load_target
from tiny_folders import write_folders

pytestmark = pytest.mark.filterwarnings("ignore:none of .* draft tokens was accepted")  # the head is random
QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ({}, {}),
        ({"eos_token_id": [2, 7], "max_length": 4096, "pad_token_id": 0, "_from_model_config": True}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_k": 0}, {"temperature": 1.0}),
        (QWEN, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}),
        (QWEN | {"do_sample": False}, {"repetition_penalty": 1.05}),  # greedy: transformers' rule
        ({"temperature": 0.6, "min_p": 0.1}, {}),
        (
            {"max_new_tokens": 300, "min_new_tokens": 200, "suppress_tokens": [3, 4], "stop_strings": "x"},
            {"max_new_tokens": 300, "min_new_tokens": 200, "banned_tokens": (3, 4), "stop": ("x",)},
        ),
        ({"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "sequence_bias": None}, {}),
    ],
)
def test_what_a_file_sets(file, fields):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert default_sampling(file) == SamplingParams(**fields)


@pytest.mark.parametrize(
    ("name", "value"), [("no_repeat_ngram_size", 3), ("num_beams", 4), ("bad_words_ids", [[1, 2]])]
)
def test_what_is_not_implemented_is_said(name, value):
    """C2: nothing that changes tokens is ignored in silence."""
    with pytest.warns(RuntimeWarning, match=f"^generation_config.json: {name} = .*: not implemented"):
        assert default_sampling({name: value, "top_p": 0.5}) == SamplingParams()


def test_our_own_limit_gives_way_to_the_files_least():
    assert default_sampling({"min_new_tokens": 200}).max_new_tokens == 200
    assert default_sampling({"min_new_tokens": 20}).max_new_tokens == SamplingParams().max_new_tokens
    with pytest.raises(ValueError, match="min_new_tokens"):
        default_sampling({"min_new_tokens": 200, "max_new_tokens": 100})


def test_values_out_of_range_name_the_file():
    with pytest.raises(ValueError, match="^generation_config.json: temperature: expected .* got -1"):
        default_sampling({"do_sample": True, "temperature": -1})


def test_set_fields():
    assert set_fields(SamplingParams()) == ""
    shown = set_fields(default_sampling(QWEN), {"top_p"})
    assert shown == "temperature 0.7, top_k 20, repetition_penalty 1.05"


# ---- a folder


@pytest.fixture
def folders(tmp_path):
    """The tiny model, and a function that puts settings into its file."""
    target, head = write_folders(tmp_path)
    path = Path(target) / "generation_config.json"

    def put(**settings) -> tuple[str, str]:
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return target, head

    return put


def transformers_tokens(target: str, prompts: list[list[int]], **options) -> list[list[int]]:
    """What transformers' own loop writes, with the file's settings, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    written = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
        written.append(whole[len(prompt) :].tolist())
    return written


GREEDY = [
    {},
    {"repetition_penalty": 1.05, "suppress_tokens": list(range(0, 256, 2)), "temperature": 0.5},
    {"eos_token_id": [256, *range(1, 256, 5)], "min_new_tokens": 20, "repetition_penalty": 1.2},
    {"eos_token_id": [256, *range(0, 256, 9)]},
]


@pytest.mark.parametrize("settings", GREEDY, ids=lambda settings: " ".join(settings) or "nothing")
def test_both_loops_write_what_transformers_writes(settings, folders):
    """C2, C15: penalties and every end id of the file, plainly and speculatively."""
    target, head = folders(**settings)
    prompts = [list(b"Hello"), list(b"a b c a b c"), [7]]
    engine = Engine(load_target(target, torch.float32), head, levels=3, draft_top_k=4, max_nodes=16)
    params = replace(engine.default_sampling, max_new_tokens=40)
    expected = transformers_tokens(target, prompts, max_new_tokens=40)
    for speculate in (False, True):
        results = engine.generate(prompts, params, speculate=speculate)
        assert [result.tokens for result in results] == expected
        for result in results:
            assert result.finish_reason == ("length" if len(result.tokens) == 40 else "stop")
    if "eos_token_id" in settings:
        assert all(result.finish_reason == "stop" for result in results)
    if "min_new_tokens" in settings:
        assert all(len(result.tokens) > 20 for result in results)
    assert engine.generate([7])[0].tokens[:40] == expected[2]  # without parameters: the file's


def test_the_command_line_takes_the_file_unless_told_otherwise(folders):
    target, head = folders(**QWEN, max_new_tokens=9)

    def run(**fields) -> tuple[list[int], str]:
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
        shared = ["generate", "--target", target, "--head", head, "--prompt", "Hello", "--json"]
        result = CliRunner().invoke(cli.app, [*shared, *arguments], catch_exceptions=False)
        assert result.exit_code == 0
        return json.loads(result.stdout)[0]["tokens"], " ".join(result.stderr.split())

    by_file, said = run(seed=4)
    assert len(by_file) == 9
    told = "temperature 0.7, top_k 20, top_p 0.8, max_new_tokens 9, repetition_penalty 1.05"
    assert f"note: generation_config.json sets {told}" in said
    by_hand = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    assert run(**by_hand, seed=4, max_new_tokens=9) == (by_file, "")
    greedy, said = run(temperature=0, max_new_tokens=30)
    assert len(greedy) == 30
    assert by_file != greedy[:9]
    assert "sets top_k 20, top_p 0.8, repetition_penalty 1.05" in said
    neutral = {"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1, "max_new_tokens": 128}
    bare, _ = run(**neutral)
    folders(**dict.fromkeys(by_hand), max_new_tokens=None, do_sample=None)
    assert run() == (bare, "")
    assert 100 < len(run(min_new_tokens=100)[0]) <= 128 > len(bare)
