"""SamplingState and the tree of sample_tokens: the arguments. What they do: test_sampling_processors.py."""

from __future__ import annotations

import pytest
import torch

import eagle_cuda
from eagle_cuda.sampling import SamplingState, sample_tokens
from eagle_cuda.tree import tree_from_parents

B, N, V = 2, 3, 70
TREE = tree_from_parents([[5, 6, 7], [8, 9, 3]], [[-1, 0, 1], [-1, 0, 0]])

# A right value of every field; what means something only together stands together.
GROUPS = [
    {"prompt_counts": torch.zeros(B, V, dtype=torch.int32)},
    {"output_counts": torch.zeros(B, V, dtype=torch.int32)},
    {"repetition_penalty": torch.full((B,), 1.1)},
    {"presence_penalty": torch.full((B,), 0.5)},
    {"frequency_penalty": torch.full((B,), 0.5)},
    {"bias_tokens": torch.tensor([[3, -1], [4, 5]]).int(), "bias_values": torch.tensor([[9.0, 0], [1, 2]])},
    {
        "min_new_tokens": torch.tensor([4, 0]).int(),
        "prompt_lens": torch.tensor([1, 2]).int(),
        "stop_tokens": torch.tensor([[2, -1], [2, 3]]).int(),
    },
    {"token_mask": torch.full((B, N, 3), -1, dtype=torch.int32)},
]
FIELDS = {name: (group, value) for group in GROUPS for name, value in group.items()}


def call(logits=None, **options):
    return sample_tokens(
        torch.zeros(B, N, V) if logits is None else logits,
        temperature=torch.ones(B),
        seeds=torch.tensor([1, 2]),
        positions=torch.zeros(B, N, dtype=torch.int32),
        **options,
    )


def test_the_cases_name_every_field():
    assert set(FIELDS) == set(SamplingState._fields)
    assert eagle_cuda.SamplingState is SamplingState


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: next(iter(group)))
def test_a_group_is_taken_alone(group):
    for framework in (torch.Tensor.contiguous, torch.Tensor.numpy):
        values = {name: framework(value) for name, value in group.items()}
        assert call(state=SamplingState(**values), tree=TREE).tokens.shape == (B, N)


@pytest.mark.parametrize("name", FIELDS)
def test_shape_dtype_layout_and_type_are_checked(name):
    group, right = FIELDS[name]
    strided = torch.zeros([*right.shape[:-1], 2 * right.shape[-1]], dtype=right.dtype)[..., ::2]
    layout = "the last dimension to be contiguous" if name == "token_mask" else "a contiguous tensor"
    wrong = {
        r"expected shape \[": right[:1],
        "expected shape": right[None],
        "expected dtype (int32|float32), got float16": right.half(),
        f"expected {layout}": strided,
    }
    if right.ndim > 1:
        wrong["expected shape .*, got"] = right[0]
    if name not in ("bias_tokens", "stop_tokens") and right.ndim > 1:  # the width of those is their own
        wrong[r"expected shape \[.*\], got \["] = right[..., :1]
    for message, value in wrong.items():
        with pytest.raises(ValueError, match=f"^state.{name}: {message}"):
            call(state=SamplingState(**{**group, name: value}), tree=TREE)
    for value in ("x", 1.0, [1, 2]):
        with pytest.raises(TypeError, match=f"^state.{name}: expected a tensor, got"):
            call(state=SamplingState(**{**group, name: value}), tree=TREE)


def test_widths_follow_the_vocabulary_and_the_list():
    for vocab, words in ((64, 2), (65, 3)):
        for given in (words - 1, words + 1):
            mask = torch.zeros(B, N, given, dtype=torch.int32)
            with pytest.raises(
                ValueError, match=rf"token_mask: expected shape \[2, 3, {words}\], got \[2, 3, {given}\]"
            ):
                call(torch.zeros(B, N, vocab), state=SamplingState(token_mask=mask))
    tokens, values = torch.zeros(B, 4, dtype=torch.int32), torch.zeros(B, 3)
    with pytest.raises(ValueError, match=r"state.bias_values: expected shape \[2, 4\], got \[2, 3\]"):
        call(state=SamplingState(bias_tokens=tokens, bias_values=values))


@pytest.mark.parametrize(
    "left_out", ["bias_tokens", "bias_values", "min_new_tokens", "prompt_lens", "stop_tokens"]
)
def test_what_means_something_only_together_is_asked_for_together(left_out):
    group = {name: value for name, value in FIELDS[left_out][0].items() if name != left_out}
    with pytest.raises(
        ValueError, match=r"^state\.\w+: expected a tensor with state\.\w+, got None$"
    ) as caught:
        call(state=SamplingState(**group))
    assert f"state.{left_out}: " in str(caught.value) or left_out != "min_new_tokens"


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_over_several_nodes_need_a_tree(name):
    state = SamplingState(**FIELDS[name][0])
    with pytest.raises(ValueError, match=f"^tree: expected one with state.{name} over 3 nodes per request"):
        call(state=state)
    call(state=state, tree=TREE)
    sample_tokens(
        torch.zeros(B, 1, V),
        temperature=torch.ones(B),
        seeds=torch.tensor([1, 2]),
        positions=torch.zeros(B, 1, dtype=torch.int32),
        state=state,
    )
    with pytest.raises(ValueError, match=f"^state.{name}: expected at most 256 nodes per request, got 300$"):
        sample_tokens(
            torch.zeros(B, 300, 4),
            temperature=torch.ones(B),
            seeds=torch.tensor([1, 2]),
            positions=torch.zeros(B, 300, dtype=torch.int32),
            state=state,
        )


def test_the_n_best_are_at_most_32_and_the_vocabulary():
    assert call(num_top=32).top_tokens.shape == (B, N, 32)
    assert call().top_tokens is None
    assert call(num_top=0).top_log_probs is None
    for wrong in (33, -1, 1.5, "3"):
        with pytest.raises(ValueError, match="^num_top: expected 0 to 32, got"):
            call(num_top=wrong)
    with pytest.raises(ValueError, match="^num_top: expected 0 to 5, got 6$"):
        call(torch.zeros(B, N, 5), num_top=6)
    room = call(num_top=3)
    assert call(out=room) is room
    with pytest.raises(ValueError, match=r"^num_top: expected 3, what out.top_tokens has room for, got 4$"):
        call(out=room, num_top=4)
    for name, message in {
        "top_tokens": "top_tokens: expected a tensor with top_log_probs, got None",
        "top_log_probs": "top_log_probs: expected a tensor with top_tokens, got None",
    }.items():
        with pytest.raises(ValueError, match=f"^{message}$"):
            call(out=room._replace(**{name: None}))
    with pytest.raises(ValueError, match=r"^top_log_probs: expected shape \[2, 3, 3\], got \[2, 3, 2\]$"):
        call(out=room._replace(top_log_probs=torch.zeros(B, N, 2)))
    with pytest.raises(ValueError, match="^top_tokens: expected a last dimension of at most 32, got 33$"):
        call(out=room._replace(top_tokens=torch.zeros(B, N, 33).int()))


def test_a_tree_is_a_draft_tree():
    with pytest.raises(TypeError, match="^tree: expected a DraftTree, got tuple$"):
        call(tree=(1, 2))


def test_a_tree_is_checked_and_changes_nothing_without_penalties():
    logits = torch.randn(B, N, V, generator=torch.Generator().manual_seed(0))
    plain = call(logits)
    for options in ({"tree": TREE}, {"state": SamplingState()}, {"tree": TREE, "state": SamplingState()}):
        for a, b in zip(plain[:3], call(logits, **options), strict=False):
            assert torch.equal(a, b)
    for field in ("tokens", "parents"):
        right = getattr(TREE, field)
        for message, wrong in {
            r"expected shape \[2, 3\], got \[2, 2\]": right[:, :2].contiguous(),
            "expected dtype int32, got int64": right.long(),
            r"expected a tensor with tree\.\w+, got None": None,
        }.items():
            with pytest.raises(ValueError, match=f"^tree.{field}: {message}$"):
                call(tree=TREE._replace(**{field: wrong}))


@pytest.mark.parametrize(
    "wrong", [{"token_mask": None}, (None,) * len(SamplingState._fields), torch.zeros(3)]
)
def test_a_state_of_another_type_is_refused(wrong):
    with pytest.raises(TypeError, match=f"^state: expected a SamplingState, got {type(wrong).__name__}$"):
        call(state=wrong)


@pytest.mark.parametrize("framework", [torch.Tensor.contiguous, torch.Tensor.numpy], ids=["torch", "numpy"])
def test_a_state_without_elements_asks_for_nothing(framework):
    empty = {name: framework(value[:0]) for name, (_, value) in FIELDS.items()}
    out = sample_tokens(
        torch.zeros(0, N, V),
        temperature=torch.ones(0),
        seeds=torch.zeros(0, dtype=torch.int64),
        positions=torch.zeros(0, N, dtype=torch.int32),
        tree=TREE._replace(tokens=TREE.tokens[:0], parents=TREE.parents[:0]),
        state=SamplingState(**empty),
    )
    assert out.tokens.shape == (0, N)
    lists = {"bias_tokens": torch.zeros(B, 0, dtype=torch.int32), "bias_values": torch.zeros(B, 0)}
    call(state=SamplingState(**{name: framework(value) for name, value in lists.items()}))
