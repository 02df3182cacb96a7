"""What Engine and SamplingParams refuse at once, before a token is made: by name, with what was given."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from eagle_cuda.tree import MC_SIM_7B_63, TreeShape
from eagle_decode import Engine, SamplingParams
from eagle_decode.drafting import HeadDrafter
from tiny_models import tiny_head, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def head(target):
    return tiny_head("eagle3", target)


@pytest.mark.parametrize("name", ["levels", "draft_top_k", "max_nodes", "max_batch", "max_length"])
@pytest.mark.parametrize("value", [2.0, "2", True])
def test_sizes_are_integers(target, head, name, value):
    with pytest.raises(ValueError, match=f"{name}: expected an integer, got {value!r}"):
        Engine(target, head, **{name: value})


def test_a_tree_shape_stands_alone(target, head):
    for name in ("levels", "draft_top_k", "max_nodes"):
        with pytest.raises(ValueError, match=f"^{name}: expected None beside a tree_shape, got 3"):
            Engine(target, head, tree_shape=MC_SIM_7B_63, **{name: 3})
    with pytest.raises(ValueError, match="^tree_shape: expected an eagle_cuda.TreeShape, got list"):
        Engine(target, head, tree_shape=[[0]])
    with pytest.raises(ValueError, match="^tree_shape: expected an eagle_cuda.TreeShape, got TreeShape"):
        Engine(target, head, tree_shape=TreeShape.__new__(TreeShape))  # never made
    common = {"dtype": target.dtype, "device": target.device, "capacity": 1, "max_length": 20}
    for levels, top_k in ((5, 5), (6, 4)):
        with pytest.raises(ValueError, match=r"^levels, top_k: expected the tree_shape's \(5, 4\), got \("):
            HeadDrafter(head, levels=levels, top_k=top_k, max_nodes=26, tree_shape=MC_SIM_7B_63, **common)
    narrow = tiny_head("eagle3", target, draft_vocab=3)
    with pytest.raises(
        ValueError, match="^tree_shape.top_k: expected at most the draft vocabulary's 3, got 4"
    ):
        Engine(target, narrow, tree_shape=MC_SIM_7B_63)


@pytest.mark.parametrize("value", [math.inf, math.nan, 0, "1", None])
def test_tau_is_a_finite_number(target, head, value):
    with pytest.raises(ValueError, match=f"tau: expected a finite number > 0, got {value!r}"):
        Engine(target, head, tau=value)


def test_a_drafter_proposes(target):
    with pytest.raises(ValueError, match="draft: expected a Drafter, got int without propose"):
        Engine(target, draft=3)


OF_A_HEAD = {
    "levels": 3, "draft_top_k": 3, "max_nodes": 3, "tree_shape": MC_SIM_7B_63, "coupling": 0.0, "tau": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("name", ["head", *OF_A_HEAD])
def test_a_drafter_has_a_tree_of_its_own(target, head, name):
    drafter = Engine(target, head).drafter
    value = {**OF_A_HEAD, "head": head}[name]
    with pytest.raises(ValueError, match=f"^{name}: expected None beside a draft, got both"):
        Engine(target, draft=drafter, **{name: value})


def test_a_format_without_a_head_is_refused(target, head):
    for drafter in (None, Engine(target, head).drafter):
        with pytest.raises(ValueError, match="^head_format: expected None without a head, got 'int8'"):
            Engine(target, draft=drafter, head_format="int8")


def test_a_head_of_another_target_is_refused(head):
    with pytest.raises(
        ValueError, match=r"head: expected one for the target's features \[384\], got \[192\]"
    ):
        Engine(tiny_target(hidden_size=128), head)
    with pytest.raises(ValueError, match="head: expected token ids below the target's 50, got 96"):
        Engine(tiny_target(vocab_size=50), head)


@pytest.mark.parametrize("prompts", [None, 3, 3.5, {1, 2}, {"a": 1}, iter([1, 2])])
def test_prompts_are_a_sequence(target, prompts):
    with pytest.raises(ValueError, match="prompts: expected text or token ids, or a list of them, got"):
        Engine(target).generate(prompts)


@pytest.mark.parametrize("sampling", [3, "x", [None], [3], {"temperature": 1}])
def test_sampling_is_sampling_params(target, sampling):
    with pytest.raises(ValueError, match="sampling: expected SamplingParams or a list of them, got"):
        Engine(target).generate([[1, 2]], sampling)


@pytest.mark.parametrize("stop", [3, [3], "", [""]])
def test_stop_strings_are_text(stop):
    with pytest.raises(ValueError, match="stop: expected non-empty strings, got"):
        SamplingParams(stop=stop)


def test_the_documentation_names_every_field():
    text = (Path(__file__).resolve().parent.parent / "docs" / "sampling.md").read_text()
    for field in dataclasses.fields(SamplingParams):
        assert f"`{field.name}`" in text or f"`{field.name}=" in text, field.name
