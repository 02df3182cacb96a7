"""The native decoder against transformers' own implementation, on tiny random models of each family."""

from __future__ import annotations

import pytest
import torch
import transformers

from eagle_decode.models.llama import load_target
from tiny_models import tiny_target

SIZES = {
    "vocab_size": 211,
    "hidden_size": 192,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}

FAMILIES = {
    "llama-tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-llama3-bias": transformers.LlamaConfig(
        **SIZES, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True
    ),
    "llama-yarn": transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama-linear": transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen2-window": transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=2
    ),
    "qwen3": transformers.Qwen3Config(**{**SIZES, "num_attention_heads": 2, "hidden_size": 96}, head_dim=128),
    "mistral-window": transformers.MistralConfig(**SIZES, sliding_window=21),
    "mistral-full": transformers.MistralConfig(
        **{**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 96},
        head_dim=64,
        sliding_window=None,
    ),
}
LAST = SIZES["num_hidden_layers"]


def tokens_of(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES["vocab_size"], (n,), generator=generator, dtype=torch.int32)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> (transformers model in fp32, folder it was saved to); made when first asked for."""
    made = {}

    def make(name: str):
        if name not in made:
            torch.manual_seed(sorted(FAMILIES).index(name))
            config = FAMILIES[name]
            config._attn_implementation = "eager"
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            with (
                torch.no_grad()
            ):  # norms start as ones and biases as zeros: a loader that dropped them would pass
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.3)
            folder = tmp_path_factory.mktemp(name)
            sharded = name in ("llama-tied", "qwen3")
            model.save_pretrained(folder, max_shard_size="300KB" if sharded else "1GB")
            assert (folder / "model.safetensors.index.json").is_file() == sharded
            made[name] = model, folder
        return made[name]

    return make


def new_cache(target, batch_size: int, capacity: int):
    """A cache whose unwritten rows are NaN: reading one shows in every later number."""
    cache = target.new_cache(batch_size, capacity)
    for k, v, *_ in cache:
        k.fill_(float("nan"))
        v.fill_(float("nan"))
    return cache


def int32(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def mask_of(parents: list[int], width: int) -> torch.Tensor:
    """[width, ceil(width/32)] ancestor-or-self bits of a tree padded to `width` nodes."""
    words = torch.zeros(width, (width + 31) // 32, dtype=torch.int64)
    for node in range(len(parents)):
        ancestor = node
        while ancestor >= 0:
            words[node, ancestor // 32] |= 1 << (ancestor % 32)
            ancestor = parents[ancestor]
    return ((words + 2**31) % 2**32 - 2**31).to(torch.int32)


def depth_of(parents: list[int], node: int) -> int:
    return 0 if node == 0 else 1 + depth_of(parents, parents[node])


def path_to(parents: list[int], node: int) -> list[int]:
    return [0] if node == 0 else [*path_to(parents, parents[node]), node]


def decode_one(target, token: int, position: int, cache, **options):
    return target.forward(
        int32([[token]]),
        seq_lens=int32([position]),
        depths=int32([[0]]),
        mask=int32([[[1]]]),
        num_nodes=int32([1]),
        cache=cache,
        **options,
    )


@torch.no_grad()
def reference(model, tokens: torch.Tensor):
    """Logits [T, V], the inputs of all layers and the last layer's output [L + 1, T, H], the final norm's
    output [T, H]."""
    seen = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    out = model(tokens.long()[None], output_hidden_states=True)
    hook.remove()
    return (
        out.logits[0],
        torch.stack([*(h[0] for h in out.hidden_states[:-1]), seen[0]]),
        out.hidden_states[-1][0],
    )


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4):
    error = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= tolerance, f"relative error {error:.2e} exceeds {tolerance:.0e}"


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_decoding_and_features_equal_transformers(name, models):
    model, folder = models(name)
    target = load_target(folder, torch.float32)
    tokens = tokens_of(300)  # 256 + 40 in the prompt: over a chunk border
    logits, layer_inputs, normed = reference(model, tokens)
    cache = new_cache(target, 1, 300)
    layers = (0, 2, LAST)
    prompt = target.prefill(tokens[:296], cache=cache, feature_layers=layers)
    assert_near(prompt.logits[0, 0], logits[295])
    assert_near(prompt.features[0], torch.cat([layer_inputs[i, :296] for i in layers], dim=-1))
    for position in range(296, 300):
        step = decode_one(target, int(tokens[position]), position, cache, feature_layers=())
        assert step.logits.dtype == torch.float32
        assert step.logits.shape == (1, 1, SIZES["vocab_size"])
        assert_near(step.logits[0, 0], logits[position])
        assert_near(step.features[0, 0], normed[position])


@pytest.mark.parametrize("name", FAMILIES)
def test_tree_equals_transformers_along_every_path(name, models):
    model, folder = models(name)
    target = load_target(folder, torch.float32)
    parents = [-1, 0, 1, 2, 0, 1, 4, 3, 4, 2, 0, 6]
    nodes, width = len(parents), 13
    prompt, drafted = tokens_of(30), tokens_of(width, seed=1)
    cache = new_cache(target, 1, 30 + width)
    target.prefill(prompt, cache=cache)
    out = target.forward(
        drafted[None],
        seq_lens=int32([30]),
        depths=int32([[depth_of(parents, i) for i in range(nodes)] + [0]]),
        mask=mask_of(parents, width)[None],
        num_nodes=int32([nodes]),
        cache=cache,
        feature_layers=(1, 3),
    )
    for node in range(nodes):
        path = path_to(parents, node)
        logits, layer_inputs, _ = reference(model, torch.cat([prompt, drafted[path]]))
        assert_near(out.logits[0, node], logits[-1])
        assert_near(out.features[0, node], torch.cat([layer_inputs[1, -1], layer_inputs[3, -1]]))
    for k, v, *_ in cache:
        assert k[0, 30 + nodes :].isnan().all(), "a dead slot wrote to the cache"
        assert v[0, 30 + nodes :].isnan().all(), "a dead slot wrote to the cache"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_pass_gives_a_row_the_same_bits(dtype, models):
    """Prompt in one go, in pieces, token by token, in a batch with others, as a branch of a tree: one set
    of bits."""
    _, folder = models("qwen3")
    target = load_target(folder, dtype)
    tokens, layers = tokens_of(270, seed=2), (1, 2, 3)
    prefix = 260
    caches = [new_cache(target, 1, 280) for _ in range(2)]
    whole = target.prefill(tokens[:prefix], cache=caches[0], feature_layers=layers).features
    first = target.prefill(tokens[:100], cache=caches[1], feature_layers=layers).features
    rest = target.prefill(tokens[100:prefix], cache=caches[1], start=100, feature_layers=layers).features
    assert torch.equal(whole, torch.cat([first, rest], dim=1))

    steps = []
    for position in range(prefix, 270):
        step = decode_one(target, int(tokens[position]), position, caches[0], feature_layers=layers)
        steps.append((step.logits[0, 0].clone(), step.features[0, 0].clone()))
    assert torch.isfinite(torch.stack([logits for logits, _ in steps])).all()
    for (k, v, *_), (other_k, other_v, *_) in zip(*caches, strict=True):
        assert torch.equal(k[:, :prefix], other_k[:, :prefix])
        assert torch.equal(v[:, :prefix], other_v[:, :prefix])

    # A batch of two: request 0 a short stranger, request 1 the same text as a tree: node 2i+1 the right
    # next token, node 2i+2 a wrong one.
    cache = new_cache(target, 2, 300)
    target.prefill(tokens_of(5, seed=3), cache=cache, request=0)
    target.prefill(tokens[:prefix], cache=cache, request=1)
    parents = [-1]
    for i in range(1, 10):
        parents += [max(0, 2 * i - 3)] * 2
    chain = [0, *range(1, len(parents), 2)]
    width = len(parents)
    drafted = tokens_of(width, seed=4).repeat(2, 1)
    drafted[1, chain] = tokens[prefix:]
    depths = int32([[depth_of(parents, i) for i in range(width)]]).repeat(2, 1)
    out = target.forward(
        drafted,
        seq_lens=int32([5, prefix]),
        depths=depths,
        mask=mask_of(parents, width).repeat(2, 1, 1),
        num_nodes=int32([7, width]),
        cache=cache,
        feature_layers=layers,
    )
    for node, (logits, features) in zip(chain, steps, strict=True):
        assert torch.equal(out.logits[1, node], logits)
        assert torch.equal(out.features[1, node], features)


@pytest.mark.op("append_kv", "tree_attention")
@pytest.mark.unchecked  # test_lossless.py decodes in checked builds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_errs_no_more_than_transformers(dtype, models):
    model, folder = models("llama-tied")
    target = load_target(folder, dtype)
    tokens = tokens_of(80)
    exact = reference(model, tokens)[0][-1]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    allowed = (reference(theirs, tokens)[0][-1].float() - exact).abs().max()
    logits = target.prefill(tokens, cache=new_cache(target, 1, 80)).logits[0, 0]
    assert (logits - exact).abs().max() <= 2 * allowed


def test_logits_of_all_last_and_none(models):
    target = load_target(models("mistral-full")[1], torch.float32)
    cache = new_cache(target, 2, 20)
    tree = {
        "seq_lens": int32([0, 0]),
        "depths": int32([[0, 1, 2]] * 2),
        "mask": int32([[[1], [3], [7]]] * 2),
        "num_nodes": int32([3, 3]),
        "cache": cache,
    }
    tokens = tokens_of(6).view(2, 3)
    every = target.forward(tokens, **tree).logits.clone()
    assert every.shape == (2, 3, SIZES["vocab_size"])
    for features in (None, (), (1,)):
        last = target.forward(tokens, **tree, feature_layers=features, logits="last").logits
        assert torch.equal(last, every[:, -1:])
    none = target.forward(tokens, **tree, feature_layers=(2,), logits="none")
    assert none.logits is None
    assert none.features.shape == (2, 3, target.hidden_size)


def test_buffers_outlive_the_passes_that_grow_them(models):
    target = load_target(models("mistral-full")[1], torch.float32)
    cache = new_cache(target, 1, 120)
    small = decode_one(target, 3, 0, cache, feature_layers=(1,))
    logits, features = small.logits.clone(), small.features.clone()
    target.prefill(tokens_of(100), cache=cache, feature_layers=(1, 2))
    again = decode_one(target, 3, 0, cache, feature_layers=(1,))
    assert torch.equal(again.logits, logits)
    assert torch.equal(again.features, features)
    for n in range(1, 90):  # more shapes than are kept
        target.prefill(tokens_of(n), cache=cache, feature_layers=(1,))
    assert torch.equal(decode_one(target, 3, 0, cache, feature_layers=(1,)).logits, logits)


def test_empty_batch_and_empty_prompt(models):
    target = load_target(models("qwen2")[1], torch.float32)
    cache = target.new_cache(0, 8)
    out = target.forward(
        torch.empty(0, 4, dtype=torch.int32),
        seq_lens=int32([]),
        depths=torch.empty(0, 4, dtype=torch.int32),
        mask=torch.empty(0, 4, 1, dtype=torch.int32),
        num_nodes=int32([]),
        cache=cache,
        feature_layers=(1,),
    )
    assert out.logits.shape == (0, 4, SIZES["vocab_size"])
    assert out.features.shape == (0, 4, target.hidden_size)
    empty = target.prefill([], cache=target.new_cache(1, 8), feature_layers=(1,))
    assert empty.logits is None
    assert empty.features.shape == (1, 0, target.hidden_size)


def test_errors_name_the_argument(models):
    target = load_target(models("qwen2")[1], torch.float32)
    cache = target.new_cache(1, 8)
    for layers in ((2, 1), (1, 1), (0, LAST + 1), (-1,)):
        with pytest.raises(ValueError, match="feature_layers"):
            target.prefill([1, 2], cache=cache, feature_layers=layers)
    with pytest.raises(ValueError, match="logits"):
        decode_one(target, 1, 0, cache, logits="some")
    with pytest.raises(IndexError):
        decode_one(target, SIZES["vocab_size"], 0, cache)
    with pytest.raises(ValueError, match="seq_lens"):
        target.forward(
            int32([[1]]),
            seq_lens=int32([0, 0]),
            depths=int32([[0]]),
            mask=int32([[[1]]]),
            num_nodes=int32([1]),
            cache=cache,
        )


def test_what_is_not_supported_is_refused(models, tmp_path):
    import json
    import shutil

    folder = models("llama-yarn")[1]
    for key, value in (("hidden_act", "gelu"), ("partial_rotary_factor", 0.5), ("model_type", "gemma")):
        other = shutil.copytree(folder, tmp_path / key)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ValueError, match=key):
            load_target(other)


def test_positions_beyond_the_first_rope_table(models):
    """The table grows with the cache, and the rows it had keep their bits."""
    model, folder = models("llama-tied")
    target = load_target(folder, torch.float32)
    target._rope = target._rope_table(16)
    few = decode_one(target, 5, 0, new_cache(target, 1, 16)).logits.clone()
    cache = new_cache(target, 1, 64)
    assert target._rope[0].shape[0] >= 64
    assert torch.equal(decode_one(target, 5, 0, cache).logits, few)
    tokens = tokens_of(64)
    assert_near(target.prefill(tokens, cache=cache).logits[0, 0], reference(model, tokens)[0][-1])


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([1] * 9, {}, "start, tokens: expected rows within the cache's 8, got 9 tokens from 0"),
        ([1], {"start": 8}, "start, tokens: .* got 1 tokens from 8"),
        ([1], {"start": -1}, "start, tokens: .* got 1 tokens from -1"),
        ([1], {"request": 1}, "request: expected 0 to 0, a row of the cache, got 1"),
        ([1, 97], {}, "tokens: expected ids of 0 to 96, got 97"),
        ([-1, 5], {}, "tokens: expected ids of 0 to 96, got -1"),
    ],
)
def test_prefill_refuses_what_the_cache_cannot_hold(tokens, options, message):
    target = tiny_target()
    with pytest.raises(ValueError, match=message):
        target.prefill(tokens, cache=target.new_cache(1, 8), **options)


def test_caches_of_no_size_are_refused():
    with pytest.raises(ValueError, match="capacity: expected at least 0 and 1, got -1 and 4"):
        tiny_target().new_cache(-1, 4)
