"""Draft-head checkpoints: every supported layout, every fault named, every decision reported."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from eagle_decode.heads import head_from_tensors, inspect_head, load_head
from random_heads import decision, random_head, random_target

TARGET = dict(zip(("target_config", "target_tensors"), random_target(), strict=True))


def write(folder, config, tensors, form="safetensors"):
    """Stores a head in one of the forms that checkpoints are found in."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if form == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        suffix, single = (
            ("safetensors", "model.safetensors") if form == "sharded" else ("bin", "pytorch_model.bin")
        )
        names = sorted(tensors)
        shards = {f"part-1.{suffix}": names[::2], f"part-2.{suffix}": names[1::2]}
        for shard, members in shards.items():
            part = {name: tensors[name] for name in members}
            save_file(part, folder / shard) if suffix == "safetensors" else torch.save(part, folder / shard)
        index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
        (folder / f"{single}.index.json").write_text(json.dumps(index))
    return folder


def same(a, b):
    assert (a is None) == (b is None)
    assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def same_head(a, b):
    for name in ("embedding", "fc", "fc_bias", "fc_norm", "norm", "lm_head", "draft_to_target"):
        same(getattr(a, name), getattr(b, name))
    for x, y in zip(a.layers, b.layers, strict=True):
        for name in x.__dataclass_fields__:
            same(getattr(x, name), getattr(y, name))
    plain = {
        "report",
        "layers",
        "embedding",
        "fc",
        "fc_bias",
        "fc_norm",
        "norm",
        "lm_head",
        "draft_to_target",
    }
    for name in set(a.__dataclass_fields__) - plain:
        assert getattr(a, name) == getattr(b, name), name


# ---- layouts and files


@pytest.mark.parametrize("form", ["safetensors", "bin", "sharded", "sharded-bin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_every_form_of_file_gives_the_same_head(tmp_path, kind, dtype, form):
    config, tensors = random_head(
        kind, draft_vocab=None if kind == "eagle1" else 40, fc_bias=True, dtype=dtype
    )
    head = load_head(write(tmp_path / "head", config, tensors, form), **TARGET)
    same_head(head, head_from_tensors(config, tensors, **TARGET))
    assert head.kind == kind
    assert head.dtype == dtype
    assert torch.equal(head.fc, tensors["fc.weight"])
    assert torch.equal(head.fc_bias, tensors["fc.bias"])
    assert decision(head, "kind").decision == ("EAGLE-1/2" if kind == "eagle1" else "EAGLE-3")


def test_official_eagle1():
    config, tensors = random_head("eagle1")
    head = head_from_tensors(config, tensors, **TARGET)
    assert decision(head, "format").decision.startswith("A")
    assert (head.feature_size, head.feature_layers, head.norm, head.num_aux) == (32, (), None, 1)
    assert head.layers[0].input_norm is None
    assert head.layers[0].hidden_norm is None
    assert torch.equal(head.lm_head, TARGET["target_tensors"]["lm_head.weight"])
    assert "not stored" in decision(head, "fc bias").why


def test_official_eagle3():
    config, tensors = random_head("eagle3", draft_vocab=40)
    head = head_from_tensors(config, tensors, **TARGET)
    assert decision(head, "format").decision.startswith("B")
    assert (head.feature_size, head.num_aux, head.draft_vocab_size, head.vocab_size) == (96, 3, 40, 96)
    assert head.draft_to_target.tolist() == (tensors["d2t"] + torch.arange(40)).tolist()
    assert head.draft_to_target.dtype == torch.int32
    assert torch.equal(head.embedding, tensors["embed_tokens.weight"])
    assert head.feature_layers == (2, 6, 9)
    assert "default" in decision(head, "feature layers").why


def test_spec_forge_eagle3():
    config, tensors = random_head("eagle3", draft_vocab=40, fc_norm=True, target_hidden=24)
    del tensors["embed_tokens.weight"]
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "norm_output": True}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 4, 8], "use_aux_hidden_state": True}
    narrow = dict(zip(("target_config", "target_tensors"), random_target(hidden=24), strict=True))
    with pytest.raises(ValueError, match=r"embed_tokens.weight.*32 wide.*24"):
        head_from_tensors(config, tensors, **narrow)
    tensors["embed_tokens.weight"] = torch.randn(96, 32)
    head = head_from_tensors(config, tensors, **narrow)
    assert decision(head, "format").decision.startswith("C")
    assert head.fc_norm.shape == (3, 24)
    assert torch.equal(head.fc_norm[2], tensors["fc_norm.2.weight"])
    assert head.feature_layers == (2, 5, 9)
    assert "outputs of layers [1, 4, 8]" in decision(head, "feature layers").why
    assert head.feedback_post_norm


@pytest.mark.parametrize(
    "prefix", ["model.", "draft_model.", "eagle.", "drafter.", "module.", "draft_model.model."]
)
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_names_of_every_tool_give_the_same_head(prefix, layer):
    config, tensors = random_head("eagle3", draft_vocab=40)
    renamed = {prefix + name.replace("midlayer.", layer): tensor for name, tensor in tensors.items()}
    same_head(head_from_tensors(config, renamed, **TARGET), head_from_tensors(config, tensors, **TARGET))


def test_one_tensor_under_two_names_is_refused():
    config, tensors = random_head("eagle3")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        head_from_tensors(config, tensors | {"model.norm.weight": tensors["norm.weight"]}, **TARGET)


def test_safetensors_are_preferred_and_reported(tmp_path):
    config, tensors = random_head("eagle3")
    folder = write(tmp_path, config, tensors)
    write(folder, config, {"other": torch.ones(1)}, "bin")
    assert decision(load_head(folder, **TARGET), "files").decision == "model.safetensors"


# ---- tensors: missing, unexpected, misshapen


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_each_missing_tensor_is_named(kind):
    config, tensors = random_head(
        kind, draft_vocab=None if kind == "eagle1" else 40, qk_norm=True, qkv_bias=True
    )
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        if name == "t2d":  # only a cross-check
            head_from_tensors(config, rest, **TARGET)
        elif name == "embed_tokens.weight":
            head = head_from_tensors(config, rest, **TARGET)
            assert torch.equal(head.embedding, TARGET["target_tensors"]["model.embed_tokens.weight"])
            assert "target" in decision(head, "embedding").decision
            with pytest.raises(ValueError, match=r"embed_tokens.weight .* target_tensors"):
                head_from_tensors(config, rest)
        elif name == "lm_head.weight":
            head = head_from_tensors(config, rest, **TARGET)
            rows = TARGET["target_tensors"]["lm_head.weight"][head.draft_to_target.long()]
            assert torch.equal(head.lm_head, rows)
            assert "target" in decision(head, "LM head").decision
        elif name == "fc.weight" and kind == "eagle1":
            with pytest.raises(ValueError, match=r"unknown layout.*first tensors: embed_tokens.weight"):
                head_from_tensors(config, rest, **TARGET)
        else:
            stored = "d2t" if name == "d2t" or name == "t2d" else name.replace("midlayer.", "layers.0.")
            with pytest.raises(ValueError, match="d2t" if name == "d2t" else f"missing tensors: {stored}"):
                head_from_tensors(config, rest, **TARGET)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_each_misshapen_tensor_is_named(kind):
    config, tensors = random_head(
        kind, draft_vocab=None if kind == "eagle1" else 40, fc_norm=True, fc_bias=True, layers=2
    )
    for name, tensor in tensors.items():
        if name == "t2d":  # may cover the padding rows of the embedding
            continue
        grown = (
            torch.cat([tensor, tensor[:1]]) if tensor.dim() == 1 else torch.cat([tensor, tensor[:, :1]], 1)
        )
        with pytest.raises(
            ValueError, match=r"head: .*" + name.replace("midlayer.", "").split(".")[-2 if "." in name else 0]
        ):
            head_from_tensors(config, tensors | {name: grown}, **TARGET)
        if tensor.is_floating_point():
            with pytest.raises(ValueError, match="int8"):
                head_from_tensors(config, tensors | {name: tensor.to(torch.int8)}, **TARGET)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize(
    "extra", ["layers.0.self_attn.o_proj.bias", "embed_layernorm.weight", "input_norm.weight", "junk"]
)
def test_unexpected_tensors_are_named(kind, extra):
    config, tensors = random_head(kind)
    with pytest.raises(ValueError, match=f"unexpected tensors: {extra}"):
        head_from_tensors(config, tensors | {extra: torch.ones(32)}, **TARGET)
    head_from_tensors(config, tensors | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}, **TARGET)


def test_all_faults_are_named_at_once():
    config, tensors = random_head("eagle3")
    del tensors["norm.weight"], tensors["midlayer.mlp.up_proj.weight"]
    tensors |= {"junk": torch.ones(1), "midlayer.mlp.down_proj.weight": torch.ones(2, 2)}
    with pytest.raises(
        ValueError, match=r"missing.*norm.weight.*misshapen.*down_proj.*unexpected.*junk"
    ) as caught:
        head_from_tensors(config, tensors, **TARGET)
    assert "layers.0.mlp.up_proj.weight" in str(caught.value)


def test_stored_biases_and_norms_are_applied_and_promised_ones_must_be_stored():
    config, tensors = random_head("eagle3", qkv_bias=True, qk_norm=True, fc_bias=True, fc_norm=True)
    head = head_from_tensors(config, tensors, **TARGET)  # no flag says so
    layer = head.layers[0]
    assert torch.equal(layer.k_bias, tensors["midlayer.self_attn.k_proj.bias"])
    assert torch.equal(layer.q_norm, tensors["midlayer.self_attn.q_norm.weight"])
    assert head.fc_bias is not None
    assert head.fc_norm is not None
    config, tensors = random_head("eagle1")
    for flag, name in (
        ({"qkv_bias": True}, "q_proj.bias"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"bias": True}, "fc.bias"),
    ):
        with pytest.raises(ValueError, match=f"missing.*{name}"):
            head_from_tensors(config | flag, tensors, **TARGET)
    config, tensors = random_head("eagle3")
    with pytest.raises(ValueError, match=r"missing.*fc_norm.0.weight"):
        head_from_tensors(config | {"fc_norm": True}, tensors, **TARGET)


def test_several_layers():
    config, tensors = random_head("eagle3", layers=3)
    head = head_from_tensors(config, tensors, **TARGET)
    assert [layer.q_proj.shape[1] for layer in head.layers] == [64, 32, 32]
    assert [layer.hidden_norm is None for layer in head.layers] == [False, True, True]


# ---- sizes


def test_head_dim_is_not_hidden_over_heads():
    config, tensors = random_head("eagle3", hidden=40, heads=4, head_dim=16)
    head = head_from_tensors(config, tensors)
    assert (head.head_dim, head.num_heads, head.layers[0].o_proj.shape) == (16, 4, (40, 64))
    del config["head_dim"]  # then from q_proj's rows and the number of heads
    assert head_from_tensors(config, tensors).head_dim == 16
    with pytest.raises(ValueError, match="head_dim 24"):
        head_from_tensors(config | {"head_dim": 24}, tensors)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": 48},
        {"intermediate_size": 50},
        {"num_attention_heads": 5},
        {"num_key_value_heads": 4},
        {"head_dim": 32},
        {"vocab_size": 97},
        {"target_hidden_size": 48},
        {"draft_vocab_size": 41},
        {"hidden_act": "gelu"},
    ],
    ids=str,
)
def test_a_config_that_contradicts_the_tensors_is_refused(wrong):
    config, tensors = random_head("eagle3", draft_vocab=40)
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("draft_vocab_size", "draft vocabulary")):
        head_from_tensors(config | wrong, tensors, **TARGET)


def test_vocabularies_of_head_and_target():
    config, tensors = random_head("eagle3", vocab=70, draft_vocab=None)
    larger = {
        "target_config": TARGET["target_config"] | {"vocab_size": 72},
        "target_tensors": TARGET["target_tensors"],
    }
    with pytest.raises(ValueError, match=r"70 rows.*target.*72"):
        head_from_tensors(config, tensors, **larger)
    # Padding rows in the embedding and in the LM head are left out.
    smaller = {
        "target_config": TARGET["target_config"] | {"vocab_size": 64},
        "target_tensors": TARGET["target_tensors"],
    }
    head = head_from_tensors(config, tensors, **smaller)
    assert head.lm_head.shape[0] == 64
    assert "padding" in decision(head, "LM head").why
    assert head.embedding.shape[0] == 70
    assert head.draft_to_target is None


def test_reduced_head_without_draft_vocab_size():
    config, tensors = random_head("eagle3", draft_vocab=16)
    del config["draft_vocab_size"]
    head = head_from_tensors(config, tensors, **TARGET)
    assert head.draft_vocab_size == 16
    assert "no draft_vocab_size" in decision(head, "draft vocabulary").why


# ---- other formats and damaged files


@pytest.mark.parametrize(
    ("extra_config", "extra_tensor", "message"),
    [
        ({"speculators_model_type": "eagle3"}, None, "speculators"),
        ({}, "midlayer.self_attn.kv_a_proj_with_mqa.weight", "latent attention"),
        ({"quantization_config": {"bits": 4}}, None, "quantised"),
        ({}, "midlayer.mlp.experts.0.gate_proj.weight", "experts"),
        ({}, "medusa_head.0.weight", "Medusa"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, None, "final hidden state"),
        ({"eagle_config": {"parallel_draft_step": 4}}, None, "parallel"),
    ],
)
def test_other_formats_are_refused_by_name(extra_config, extra_tensor, message):
    config, tensors = random_head("eagle3")
    extra = {extra_tensor: torch.ones(1)} if extra_tensor else {}
    with pytest.raises(ValueError, match=message):
        head_from_tensors(config | extra_config, tensors | extra, **TARGET)


def test_an_unknown_layout_prints_its_first_names():
    with pytest.raises(ValueError, match=r"unknown layout.*h\.0\.attn\.weight"):
        head_from_tensors({"hidden_size": 4}, {"h.0.attn.weight": torch.ones(4, 4)}, **TARGET)
    config, tensors = random_head("eagle1")
    with pytest.raises(ValueError, match="unknown layout"):  # an input norm: not EAGLE-1's layer
        head_from_tensors(config, tensors | {"layers.0.input_layernorm.weight": torch.ones(32)}, **TARGET)


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_damaged_and_dangerous_files(tmp_path, capsys):
    config, tensors = random_head("eagle3")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_head(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_head(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileNotFoundError, match="neither"):
        load_head(tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError, match="safetensors"):
        load_head(tmp_path / "empty")
    folder = write(tmp_path / "evil", config, {}, "bin")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Evil()}, protocol=2))
    with pytest.raises(ValueError, match="plain tensors"):
        load_head(folder)
    assert "executed" not in capsys.readouterr().out
    torch.save({"epoch": 3, "fc.weight": tensors["fc.weight"]}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="dictionary of tensors"):
        load_head(folder)
    sharded = write(tmp_path / "sharded", config, tensors, "sharded")
    (sharded / "part-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="part-2"):
        load_head(sharded)
    (tmp_path / "head.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="GGUF"):
        load_head(tmp_path / "head.gguf")


def test_the_target_must_supply_what_is_missing():
    config, tensors = random_head("eagle1")
    with pytest.raises(ValueError, match=r"lm_head.weight .*target_tensors"):
        head_from_tensors(config, tensors)
    target_config, target_tensors = random_target()
    embedding = target_tensors["model.embed_tokens.weight"]
    tied = {
        "target_config": target_config | {"tie_word_embeddings": True},
        "target_tensors": {"a.embed_tokens.weight": embedding},
    }
    assert torch.equal(head_from_tensors(config, tensors, **tied).lm_head, embedding)
    with pytest.raises(ValueError, match="LM head"):
        head_from_tensors(
            config, tensors, target_config=target_config, target_tensors={"a.embed_tokens.weight": embedding}
        )
    packed = {"lm_head.weight": torch.zeros(96, 16, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="unquantised"):
        head_from_tensors(config, tensors, target_config=target_config, target_tensors=packed)
    with pytest.raises(ValueError, match="width 32 for a target of width 48"):
        head_from_tensors(
            config,
            tensors,
            target_config=random_target(hidden=48)[0],
            target_tensors=random_target(hidden=48)[1],
        )


def test_a_head_is_inspected_without_its_target(tmp_path):
    config, tensors = random_head("eagle1", hidden=32, vocab=96)
    del tensors["embed_tokens.weight"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    head = inspect_head(tmp_path)
    assert (head.vocab_size, head.draft_vocab_size, head.hidden_size) == (96, 96, 32)
    assert decision(head, "LM head").decision == "the target's lm_head.weight"
    with pytest.raises(ValueError, match="embed_tokens.weight is not in the checkpoint"):
        load_head(tmp_path)


def test_weights_may_be_quantised():
    """The matrices that are multiplied, from what is stored; nothing else."""
    config, tensors = random_head("eagle3", draft_vocab=40, dtype=torch.bfloat16)
    target = {"num_hidden_layers": 12, "vocab_size": 96, "hidden_size": 32}
    plain = head_from_tensors(config, tensors, target_config=target)
    head = head_from_tensors(config, tensors, target_config=target, weight_format="int8")
    assert (plain.weight_format, head.weight_format) == (None, "int8")
    assert decision(head, "weights").decision == "int8"
    assert head.with_weights(None) is head
    made = head.to_draft_head(torch.float16)
    assert made.dtype == "float16"
    with pytest.raises(ValueError, match="^weight_format: expected one of fp8, int8, .*, got 'int9'"):
        head.with_weights("int9")
