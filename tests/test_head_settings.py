"""Draft-head checkpoints: what the tensors do not show (vocabulary map, feature layers, RoPE, feedback)."""

from __future__ import annotations

import warnings

import pytest
import torch

from eagle_decode.heads import head_from_tensors
from random_heads import decision, random_head, random_target

TARGET = dict(zip(("target_config", "target_tensors"), random_target(), strict=True))


# ---- the draft vocabulary


def test_absolute_ids_are_told_from_offsets():
    config, tensors = random_head("eagle3", draft_vocab=40)
    offsets = head_from_tensors(config, tensors, **TARGET)
    absolute = head_from_tensors(config, tensors | {"d2t": tensors["d2t"] + torch.arange(40)}, **TARGET)
    assert torch.equal(offsets.draft_to_target, absolute.draft_to_target)
    assert "offsets" in decision(offsets, "draft vocabulary").decision
    assert "absolute ids" in decision(absolute, "draft vocabulary").decision
    narrow = head_from_tensors(config, tensors | {"d2t": tensors["d2t"].to(torch.int32)}, **TARGET)
    assert torch.equal(narrow.draft_to_target, offsets.draft_to_target)


def changed(d2t, index, value):
    d2t = d2t.clone()
    d2t[index] = value
    return d2t


def test_faulty_maps_are_refused():
    config, tensors = random_head("eagle3", draft_vocab=40)
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    without = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    faults = [
        ({"d2t": changed(d2t, 39, 96 - 39)}, "target id 96, outside"),
        ({"d2t": changed(d2t, 0, -1)}, "target id -1, outside"),
        ({"d2t": changed(d2t, 5, d2t[4] - 1)}, "increase strictly"),
        ({"d2t": d2t[:39]}, "d2t: expected int64 .40."),
        ({"d2t": d2t.to(torch.float32)}, "d2t: expected int64"),
        ({"t2d": changed(t2d, t2d.nonzero()[0], False)}, "t2d flags 39"),
        ({"t2d": t2d[:90]}, "t2d: expected bool .96."),
        ({"t2d": t2d.flip(0)}, "but t2d flags"),
        ({"d2t": torch.zeros_like(d2t)}, "but t2d flags"),
    ]
    for change, message in faults:
        with pytest.raises(ValueError, match=message):
            head_from_tensors(config, tensors | change, **TARGET)
    with pytest.warns(UserWarning, match="all zero"):
        head = head_from_tensors(config, without | {"d2t": torch.zeros_like(d2t)}, **TARGET)
    assert head.draft_to_target.tolist() == list(range(40))
    # With equal vocabularies, an all-zero map is the identity; a zero t2d beside it was never filled in.
    config, tensors = random_head("eagle3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zeros = {"d2t": torch.zeros(96, dtype=torch.int64), "t2d": torch.zeros(96, dtype=torch.bool)}
        assert head_from_tensors(config, tensors | zeros, **TARGET).draft_to_target is None


# ---- settings


def test_feature_layers_and_where_their_ids_come_from():
    config, tensors = random_head("eagle3")
    key = "eagle_aux_hidden_state_layer_ids"

    def at(extra, **options):
        return head_from_tensors(config | extra, tensors, **TARGET, **options).feature_layers

    assert at({key: [1, 5, 9]}) == (1, 5, 9)
    assert at({"eagle_config": {key: [1, 5, 9]}}) == (2, 6, 10)
    assert at({key: [2, 6, 10], "eagle_config": {key: [1, 5, 9]}}) == (2, 6, 10)
    assert at({key: [1, 5, 9]}, feature_layers=[3, 4, 5]) == (3, 4, 5)
    assert at({key: [1, 5, 12]}) == (1, 5, 12)  # the input of layer L is the output of the last one
    for ids in [1, 5, 13], [5, 1, 9], [1, 1, 9], [-1, 5, 9], [1, 5]:
        with pytest.raises(ValueError, match="feature layers"):
            at({key: ids})
    with pytest.raises(ValueError, match="disagree"):
        at({key: [1, 5, 9], "eagle_config": {key: [1, 5, 9]}})
    assert head_from_tensors(config, tensors).feature_layers is None
    short = random_target(layers=4)[0]
    with pytest.raises(ValueError, match=r"\[2, 2, 1\]"):
        head_from_tensors(config, tensors, target_config=short)


def test_other_numbers_of_feature_layers():
    config, tensors = random_head("eagle3", num_aux=2)  # fc is [H, 2H], as EAGLE-1's
    with pytest.raises(ValueError, match="2 feature layers"):
        head_from_tensors(config, tensors, **TARGET)
    head = head_from_tensors(config, tensors, **TARGET, feature_layers=[4, 9])
    assert head.kind == "eagle3"
    assert head.num_aux == 2


def test_feedback_has_an_override_and_is_reported():
    config, tensors = random_head("eagle3")
    at = lambda extra, **options: head_from_tensors(config | extra, tensors, **TARGET, **options)  # noqa: E731
    assert not at({}).feedback_post_norm
    assert not at({"norm_output": False}).feedback_post_norm
    assert at({"norm_output": True}).feedback_post_norm
    assert at({}, feedback="post").feedback_post_norm
    assert not at({"norm_output": True}, feedback="pre").feedback_post_norm
    assert decision(at({"norm_output": True}), "feedback").decision == "post-norm"
    with pytest.raises(ValueError, match="feedback"):
        at({}, feedback="both")


def test_rope_settings():
    config, tensors = random_head("eagle3")
    at = lambda extra, **options: head_from_tensors(config | extra, tensors, **TARGET, **options)  # noqa: E731
    assert at({}).rope_theta == 1000.0
    assert at({}).rope_scaling is None
    assert at({}).max_positions == 512
    assert at({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}).rope_theta == 7.0
    assert "top level says 1000" in decision(at({"rope_parameters": {"rope_theta": 7.0}}), "rope theta").why
    assert at({}, rope_theta=3.0).rope_theta == 3.0
    without = {key: value for key, value in config.items() if key != "rope_theta"}
    head = head_from_tensors(without, tensors, **TARGET)
    assert head.rope_theta == 10000.0
    assert "target's 5000" in decision(head, "rope theta").why
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert at({"rope_scaling": llama3}).rope_scaling == llama3
    assert at({"rope_scaling": {"type": "linear", "factor": 2.0}}).rope_scaling == {
        "rope_type": "linear",
        "factor": 2.0,
    }
    assert at({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}).rope_scaling is None
    with pytest.raises(ValueError, match=r"rope_scaling: .*longrope"):
        at({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}})


def test_stop_tokens_outside_the_draft_vocabulary_are_reported():
    config, tensors = random_head("eagle3", draft_vocab=40)
    inside = int(tensors["t2d"].nonzero()[7])
    outside = int((~tensors["t2d"]).nonzero()[3])
    for eos, told in (
        ([inside, outside], True),
        (outside, True),
        (inside, False),
        ([], False),
        (None, False),
    ):
        target = {"target_config": TARGET["target_config"] | {"eos_token_id": eos}}
        report = head_from_tensors(config, tensors, **target).report
        found = [d.decision for d in report if d.what == "stop tokens"]
        assert found == ([f"[{outside}] never proposed"] if told else [])
