"""The training recipe: the unrolled pass is what drafting computes, text and features are the target's own,
exports read back, interrupted runs continue exactly, and training learns."""

from __future__ import annotations

import json
import random
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from eagle_decode.train import data, recipe
from eagle_decode.train.evaluate import Drafter, TreeShape, acceptance, write_references
from eagle_decode.train.export import export_head, head_tensors, import_head
from eagle_decode.train.features import FeatureStore, extract_features, feature_rms
from eagle_decode.train.head import EagleHead, HeadConfig, change_vocabulary, rescale_features, warm_start
from eagle_decode.train.loss import collate, make_batches, unrolled_loss
from eagle_decode.train.target import TorchTarget, product_dtype
from eagle_decode.train.trainer import Settings, Trainer
from train_rig import STOP, VOCAB, random_head, tiny_checkpoint


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(tiny_checkpoint(), dtype=torch.float32)


@pytest.fixture(scope="module")
def dialogues(target) -> list[data.Dialogue]:
    """Text that the target wrote, with prompts of 3 to 7 tokens."""
    chooser, generator = random.Random(0), torch.Generator().manual_seed(0)
    prompts = [[chooser.randrange(3, VOCAB) for _ in range(chooser.randint(3, 7))] for _ in range(40)]
    answers = data.sample_batch(target, prompts, [0.7] * 40, 20, [STOP], generator)
    return [data.Dialogue(tuple(p), tuple(a)) for p, a in zip(prompts, answers, strict=True) if len(a) >= 8]


# ---- the target


@pytest.mark.parametrize(
    ("family", "mlp_bias"),
    [("llama", False), ("llama", True), ("mistral", False), ("qwen2", False), ("qwen3", False)],
)
def test_target_equals_transformers(family, mlp_bias):
    transformers = pytest.importorskip("transformers")
    checkpoint = tiny_checkpoint(family)
    if mlp_bias:
        biases = {
            name.replace("weight", "bias"): torch.linspace(-1, 1, len(tensor))
            for name, tensor in checkpoint.tensors.items()
            if ".mlp." in name
        }
        config = {**checkpoint.config, "mlp_bias": True}
        checkpoint = replace(checkpoint, tensors={**checkpoint.tensors, **biases}, config=config)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(dict(checkpoint.tensors), strict=False)
    model.tie_weights()
    ids = torch.randint(0, VOCAB, (2, 13), generator=torch.Generator().manual_seed(3))
    ours = TorchTarget(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(ids, output_hidden_states=True)
        hidden, captured = ours.forward(ids, torch.arange(13)[None], capture=(2, 3, 4))
        assert torch.allclose(ours.logits(hidden), expected.logits, rtol=1e-4, atol=1e-4)
    for layer, features in zip((2, 3, 4), captured, strict=True):
        assert torch.allclose(features, expected.hidden_states[layer], rtol=1e-4, atol=1e-4), layer


def test_products_are_in_float32_where_bfloat16_is_emulated(monkeypatch):
    for capability, dtype in (("AVX2", torch.float32), ("AVX512", torch.bfloat16)):
        monkeypatch.setattr(
            torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability
        )
        assert product_dtype("cpu") == dtype
        assert TorchTarget(tiny_checkpoint()).lm_head.dtype == dtype
        assert product_dtype("cuda") == torch.bfloat16


def test_batched_sampling_at_temperature_zero_is_greedy_decoding(target):
    """Left padding, the cache and the removal of finished requests change nothing."""
    chooser = random.Random(5)
    prompts = [[chooser.randrange(3, VOCAB) for _ in range(length)] for length in (2, 9, 5, 7, 3, 4, 6, 8)]
    stops = list(range(0, VOCAB, 4))  # many, so that some requests end early
    answers = data.sample_batch(target, prompts, [0.0] * 8, 12, stops, torch.Generator().manual_seed(0))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 12 and (len(tokens) == len(prompt) or tokens[-1] not in stops):
            hidden, _ = target.forward(torch.tensor([tokens]), torch.arange(len(tokens))[None])
            tokens.append(int(target.logits(hidden[0, -1]).argmax()))
        assert answer == tokens[len(prompt) :]
    assert len({len(answer) for answer in answers}) > 1


# ---- features


def test_features_are_the_targets_own(target, dialogues):
    draft_ids = torch.arange(0, VOCAB, 2)
    for example in extract_features(target, dialogues, (2, 3, 4), draft_ids, batch_tokens=100):
        tokens, first = example.tokens.long(), example.prompt_length
        hidden, captured = target.forward(tokens[None], torch.arange(len(tokens))[None], capture=(2, 3, 4))
        assert torch.allclose(example.features.float(), torch.cat(captured, -1)[0], rtol=1e-2, atol=2e-2)
        logits = target.logits(hidden[0, first - 1 : -1])[:, draft_ids]
        values, ids = logits.sort(-1, descending=True)
        assert torch.equal(example.teacher_ids.long(), ids)
        assert torch.allclose(example.teacher_probs.float(), values.softmax(-1), atol=2e-3)
        can_be_drafted = tokens[first:] % 2 == 0
        assert torch.equal(example.target_best.long(), torch.where(can_be_drafted, ids[:, 0], -1))


def test_shards_read_back_and_are_extracted_once(target, dialogues, tmp_path):
    store = FeatureStore(tmp_path, target, dialogues, (2, 3, 4), torch.arange(VOCAB), shard_tokens=150)
    assert len(store) > 2
    assert sum(store.tokens_in(i) for i in range(len(store))) == sum(map(len, dialogues))
    fresh = store.load(1)
    store.target = None  # a second reading must not need the target
    for a, b in zip(fresh, store.load(1), strict=True):
        assert a.prompt_length == b.prompt_length
        for name in ("tokens", "features", "teacher_ids", "teacher_probs", "target_best"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_shards_of_other_text_targets_or_layers_are_made_anew(target, dialogues, tmp_path):
    ids = torch.arange(VOCAB)

    def same_file(other_target, other_dialogues, layers) -> bool:
        FeatureStore(tmp_path, target, dialogues, (2, 3, 4), ids, shard_tokens=150).load(0)
        path = tmp_path / "shard-00000.safetensors"
        before = path.read_bytes()
        FeatureStore(tmp_path, other_target, other_dialogues, layers, ids, shard_tokens=150).load(0)
        return path.read_bytes() == before

    assert same_file(target, dialogues, (2, 3, 4))
    assert not same_file(target, dialogues, (1, 3, 4))
    assert not same_file(target, dialogues[1:], (2, 3, 4))
    assert not same_file(TorchTarget(tiny_checkpoint(seed=1), dtype=torch.float32), dialogues, (2, 3, 4))
    assert TorchTarget(tiny_checkpoint(), dtype=torch.bfloat16).fingerprint() == target.fingerprint()


def test_shards_of_another_draft_vocabulary_get_new_teachers_from_their_features(target, dialogues, tmp_path):
    """The features are bf16, so the new teachers are those of a fresh extraction up to their rounding."""
    layers, other = (1, 2, 3), torch.arange(1, VOCAB, 2)
    FeatureStore(tmp_path, target, dialogues, layers, torch.arange(VOCAB), shard_tokens=150).load(1)
    store = FeatureStore(tmp_path, target, dialogues, layers, other, shard_tokens=150)
    renewed = store.load(1)
    fresh = FeatureStore(tmp_path / "fresh", target, dialogues, layers, other, shard_tokens=150).load(1)
    assert len(renewed) == len(fresh)
    moved = False
    for a, b in zip(renewed, fresh, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.features, b.features)
        assert torch.equal(a.target_best == -1, b.target_best == -1)
        spread = torch.zeros(2, len(a.teacher_ids), len(other))
        for i, example in enumerate((a, b)):
            spread[i].scatter_(1, example.teacher_ids.long(), example.teacher_probs.float())
        assert torch.allclose(spread[0], spread[1], atol=0.02)
        moved |= not torch.allclose(spread[0], spread[1].roll(1, 0), atol=0.02)
    assert moved  # rows differ, so that the comparison means something
    store.target = None  # written back: a second reading must not need the target
    assert torch.equal(store.load(1)[0].teacher_ids, renewed[0].teacher_ids)


# ---- the head


def test_unrolled_pass_equals_drafting(target, dialogues):
    """Level i from start t gives the logits that step-by-step drafting gives after committing the prefix up
    to t + 1.
    """
    head, levels = random_head(), 4
    example = extract_features(target, dialogues[:1], (2, 3, 4), head.draft_ids)[0]
    tokens, length = example.tokens.long(), len(example)
    embedding = target.embedding
    starts = torch.randperm(length - levels - 1, generator=torch.Generator().manual_seed(0))[:6]
    kept = [6, 5, 3, 2]
    features = example.features[: length - 1].float()
    padded = F.pad(tokens, (0, levels))
    with torch.no_grad():
        unrolled = head.unroll(F.embedding(padded[1:], embedding)[None], features[None], starts[None], kept)
        assert [output.shape[1] for output in unrolled] == kept
        for column, start in enumerate(starts.tolist()):
            drafter = Drafter(head, embedding)
            drafter.extend(tokens[1 : start + 2], features[: start + 1])
            hidden, cache = drafter.hidden, drafter.cache
            for level in range(levels):
                if level:
                    embedded = embedding[tokens[start + 1 + level]][None, None]
                    hidden, cache = head.step(embedded, hidden, torch.tensor([[start + level]]), cache, None)
                if column < kept[level]:
                    got, expected = head.logits(unrolled[level][0, column]), head.logits(hidden[0, 0])
                    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4), (start, level)


def test_padding_does_not_change_the_loss(target, dialogues):
    """Each dialogue contributes the same alone and beside longer ones."""
    head = random_head()
    examples = extract_features(target, dialogues[:3], (2, 3, 4), head.draft_ids)
    generator, device = torch.Generator().manual_seed(0), torch.device("cpu")

    def losses(group):
        batch = collate(group, 1, generator, device, 32, 32)
        rows = ((batch.target_rows < batch.target_ends[:, None]) & (batch.target_rows >= 0)).nonzero()
        learnt = sum(batch.target_best[batch.target_rows[b, r]] >= 0 for b, r in rows.tolist())
        with torch.no_grad():
            return unrolled_loss(head, target.embedding, batch, (1.0,))[0].item(), int(learnt)

    together, count = losses(examples)
    alone = [losses([example]) for example in examples]
    assert count == sum(n for _, n in alone)
    assert together == pytest.approx(sum(loss * n for loss, n in alone) / count, rel=2e-2)  # bf16 autocast


def test_teachers_keep_the_whole_distribution():
    """The best tokens with their own probabilities; what is drawn from the others stands for all of them."""
    wide = TorchTarget(tiny_checkpoint(vocab_size=300), dtype=torch.float32)
    wide.lm_head = wide.lm_head * 0.1  # so flat that the best 64 leave much
    draft_ids = torch.arange(0, 300, 2)
    prompt, answer = (5, 9, 17), tuple(range(20, 32))
    copies = extract_features(wide, [data.Dialogue(prompt, answer)] * 200, (2, 3, 4), draft_ids)
    hidden, _ = wide.forward(torch.tensor([prompt + answer]), torch.arange(15)[None])
    expected = (hidden[0, 2:14] @ wide.lm_head[draft_ids].T).softmax(-1)
    best = expected.topk(64, -1)
    rest = 1 - best.values.sum(-1)
    assert rest.min() > 0.2
    for example in copies[:3]:
        assert torch.equal(example.teacher_ids[:, :64].long(), best.indices)
        assert torch.allclose(example.teacher_probs[:, :64].float(), best.values, rtol=1e-3)
        assert torch.allclose(example.teacher_probs[:, 64:].float().sum(-1), rest, rtol=1e-3)
    mean = torch.zeros(12, 150)
    for example in copies:
        mean.scatter_add_(1, example.teacher_ids.long(), example.teacher_probs.float() / len(copies))
    error = (mean - expected) / (expected * rest[:, None] / (16 * len(copies))).sqrt()  # about normal
    assert error.abs().max() < 5
    few = extract_features(wide, [data.Dialogue(prompt, answer)], (2, 3, 4), torch.arange(40))[0]
    assert few.teacher_ids.shape == (12, 40)  # nothing is left to draw from
    assert torch.allclose(few.teacher_probs.float().sum(-1), torch.ones(12), atol=2e-3)


def test_warm_start_and_rescaling_keep_what_they_promise(target):
    head = random_head()
    features = torch.randn(5, 96) * 10
    before = head.fuse(features)
    rescale_features(head, torch.rand(96) + 0.1)
    assert torch.allclose(head.fuse(features), before, rtol=1e-4, atol=1e-3)
    draft_ids = torch.arange(1, 33)
    warm_start(head, target.lm_head, target.final_norm, draft_ids, torch.full((96,), 4.0))
    assert torch.equal(head.lm_head.weight, target.lm_head[1:33])
    assert torch.equal(head.feature_scale, torch.full((96,), 0.25))


def test_changed_vocabulary_keeps_known_rows_and_guesses_others():
    """Where the head's rows are a linear image of the target's, the guess is that image."""
    torch.manual_seed(4)
    head = EagleHead(HeadConfig.for_target(tiny_checkpoint().config | {"vocab_size": 400}, 160))
    lm_head, image = torch.randn(400, 32), torch.randn(32, 32) / 32**0.5
    with torch.no_grad():
        head.draft_ids.copy_(torch.arange(160) * 2)
        head.lm_head.weight.copy_(lm_head[head.draft_ids] @ image)
    wanted = torch.arange(1, 201)  # drops some, keeps some, adds some
    changed = change_vocabulary(head, lm_head, wanted)
    assert changed.config.draft_vocab_size == 200
    assert torch.equal(changed.draft_ids, wanted)
    known = torch.isin(wanted, head.draft_ids)
    assert torch.equal(changed.lm_head.weight[known], head.lm_head.weight[wanted[known] // 2])
    guess, right = changed.lm_head.weight[~known], lm_head[wanted[~known]] @ image
    assert torch.cosine_similarity(guess, right).min() > 0.99
    assert torch.equal(changed.fc.weight, head.fc.weight)


def test_feature_layers_must_be_distinct_and_exist():
    config = tiny_checkpoint().config
    with pytest.raises(ValueError, match="feature_layers"):
        HeadConfig.for_target(config | {"num_hidden_layers": 5}, 8)
    with pytest.raises(ValueError, match="draft_vocab_size"):
        HeadConfig.for_target(config, VOCAB + 1)


# ---- the draft vocabulary and exported heads


def test_exported_head_reads_back_and_computes_the_same(tmp_path):
    head = random_head()
    folder = export_head(head, tmp_path / "head", notes="made by a test\n")
    again = import_head(folder)
    assert again.config == head.config
    assert torch.equal(again.draft_ids, head.draft_ids)
    assert torch.equal(again.feature_scale, torch.ones(96))
    features = torch.randn(4, 96)
    folded = {
        name: tensor.float() for name, tensor in head_tensors(head).items() if name not in ("d2t", "t2d")
    }
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, folded[name]), name
    assert torch.allclose(again.fuse(features), head.fuse(features), rtol=3e-2, atol=3e-2)
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [
        1,
        2,
        3,
    ]  # outputs of the layer before
    assert (folder / "README.md").read_text() == "made by a test\n"


def test_vocabulary_maps_agree():
    tensors, head = head_tensors(random_head()), random_head()
    ids = torch.arange(32) + tensors["d2t"]
    assert torch.equal(ids, head.draft_ids)
    assert (ids[1:] > ids[:-1]).all()
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["lm_head.weight"].dtype == torch.bfloat16


def test_damaged_heads_are_refused_by_name(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = export_head(random_head(), tmp_path / "head")
    good = load_file(folder / "model.safetensors")

    def refuses(tensors: dict, message: str) -> None:
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            import_head(folder)

    refuses(
        {name: tensor for name, tensor in good.items() if name != "norm.weight"}, r"norm\.weight \(expected"
    )
    refuses(good | {"surplus": torch.zeros(1)}, r"surplus \(expected None")
    refuses(good | {"fc.weight": torch.zeros(32, 95)}, r"fc\.weight \(expected \(32, 96\), got \(32, 95\)")
    refuses(good | {"t2d": good["t2d"].roll(1)}, "d2t and t2d")


# ---- the loop


def small_trainer(target, dialogues, folder: Path, settings: Settings) -> Trainer:
    torch.manual_seed(0)
    draft_ids = torch.arange(VOCAB)
    store = FeatureStore(folder, target, dialogues, (2, 3, 4), draft_ids, shard_tokens=250)
    head = EagleHead(HeadConfig.for_target(target.config, VOCAB))
    warm_start(head, target.lm_head, target.final_norm, draft_ids, feature_rms(store.load(0)))
    return Trainer(head, target.embedding, store.load, len(store), settings, torch.device("cpu"))


@pytest.mark.parametrize("muon", [False, True])
def test_a_resumed_run_ends_in_the_same_state(target, dialogues, tmp_path, muon):
    settings = Settings(batch_tokens=120, muon=muon, replays=1)
    whole = small_trainer(target, dialogues, tmp_path / "features", settings)
    for step in range(12):
        whole.advance(step / 12)
    part = small_trainer(target, dialogues, tmp_path / "features", settings)
    for step in range(7):
        part.advance(step / 12)
    part.save(tmp_path / "checkpoint.pt")
    resumed = small_trainer(target, dialogues, tmp_path / "features", settings)
    resumed.restore(tmp_path / "checkpoint.pt")
    for step in range(7, 12):
        resumed.advance(step / 12)
    assert (resumed.step_count, resumed.tokens_seen, resumed.visit) == (12, whole.tokens_seen, whole.visit)
    for a, b in zip(resumed.head.parameters(), whole.head.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(resumed.averaged_head().parameters(), whole.averaged_head().parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_other_settings_is_refused(target, dialogues, tmp_path):
    trainer = small_trainer(target, dialogues, tmp_path / "features", Settings(batch_tokens=120))
    trainer.save(tmp_path / "checkpoint.pt")
    other = small_trainer(target, dialogues, tmp_path / "features", Settings(batch_tokens=130))
    with pytest.raises(ValueError, match="another work_dir"):
        other.restore(tmp_path / "checkpoint.pt")


def test_a_checkpoint_of_another_draft_vocabulary_is_refused(target, dialogues, tmp_path):
    """Rows would be taught other tokens than those that they stand for."""
    trainer = small_trainer(target, dialogues, tmp_path / "features", Settings(batch_tokens=120))
    ids = trainer.head.draft_ids.clone()
    trainer.save(tmp_path / "checkpoint.pt")
    trainer.head.draft_ids.copy_((ids + 1) % VOCAB)
    with pytest.raises(ValueError, match="a head of another draft vocabulary, .* another work_dir"):
        trainer.restore(tmp_path / "checkpoint.pt")
    trainer.head.draft_ids.copy_(ids)
    trainer.restore(tmp_path / "checkpoint.pt")
    trainer.head.lm_head.weight = torch.nn.Parameter(trainer.head.lm_head.weight[1:].detach().clone())
    with pytest.raises(ValueError, match="a head of another size"):
        trainer.restore(tmp_path / "checkpoint.pt")


def test_a_batch_without_anything_to_learn_changes_nothing(target, dialogues, tmp_path):
    trainer = small_trainer(target, dialogues, tmp_path / "features", Settings(batch_tokens=120))
    load = trainer.load_shard

    def hopeless(shard):
        return [replace(e, target_best=torch.full_like(e.target_best, -1)) for e in load(shard)]

    trainer.load_shard = hopeless
    before = [parameter.clone() for parameter in trainer.head.parameters()]
    trainer.advance(0.5)
    assert (trainer.step_count, trainer.loss) == (1, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.head.parameters(), strict=True))


def test_training_raises_the_acceptance(target, dialogues, tmp_path):
    trainer = small_trainer(target, dialogues, tmp_path, Settings(batch_tokens=250, learning_rate=1e-2))
    references = write_references(target, [list(d.prompt) for d in dialogues[:4]], 24, [STOP], (2, 3, 4))
    shape, losses = TreeShape(levels=3, top_k=2, num_nodes=6), []
    before = acceptance(trainer.averaged_head(), target.embedding, references, shape)
    for step in range(60):
        trainer.advance(
            step / 60 * 0.7
        )  # below the point where a deeper pass begins, which would change the loss
        losses.append(trainer.loss)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert acceptance(trainer.averaged_head(), target.embedding, references, shape) > before + 0.1


def test_batches_hold_every_example_once(target, dialogues):
    examples = extract_features(target, dialogues, (2, 3, 4), torch.arange(VOCAB))
    groups = list(make_batches(examples, 150, random.Random(0)))
    assert sorted(id(example) for group in groups for example in group) == sorted(map(id, examples))
    assert all(len(group) * max(map(len, group)) <= 150 for group in groups)


class ToyTokenizer:
    """Letters as ids 3 and up; enough of a tokenizer for the recipe."""

    chat_template, eos_token_id, all_special_tokens = "toy", STOP, ()

    def apply_chat_template(self, turns, add_generation_prompt, tokenize):
        return f"<{turns[-1]['content']}>"

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [3 + ord(letter) % (VOCAB - 3) for letter in text]}

    def decode(self, ids):
        return "".join(chr(97 + i % 26) for i in ids)


def test_text_goes_on_where_it_was_stopped(target, tmp_path):
    """Prompts answered once are not answered again, half a line is dropped, what follows is new."""
    prompts = ["".join(chr(65 + i) for _ in range(6)) for i in range(12)]
    options = {"stops": [STOP], "seconds": 0, "prompts": prompts, "max_new_tokens": 9}
    path = tmp_path / "dialogues.jsonl"

    def write(batch_size: int) -> list[dict]:
        list(data.generate_dialogues(target, ToyTokenizer(), path, batch_size=batch_size, **options))
        return [json.loads(line) for line in path.read_text().splitlines()]

    first = write(5)
    with open(path, "a") as file:
        file.write('{"p": [1, 2], "r": [3')
    both = write(12)
    assert both[:5] == first
    assert len({tuple(entry["p"]) for entry in both}) == len(both) == 12
    assert [entry["k"] for entry in both] == ["file"] * 12
    more = write(8)[12:]  # all prompts are answered: it invents some, by other random numbers each time
    assert {entry["k"] for entry in more} == {"invented"}
    once_more = write(8)[12 + len(more) :]
    assert [entry["r"] for entry in more] != [entry["r"] for entry in once_more]


@pytest.mark.parametrize(
    ("name", "value"), [("minutes", 0.0), ("minutes", -5.0), ("minutes", float("inf")), ("max_steps", 0)]
)
def test_runs_without_an_end_are_refused(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"^{name}: expected "):
        recipe.train("tiny", tmp_path / "head", **{name: value})


def test_train_writes_text_trains_resumes_and_exports(tmp_path, monkeypatch):
    """The whole recipe without any data set, stopped once on its way, then continued from its own head."""
    monkeypatch.setattr(recipe, "load_checkpoint", lambda _: tiny_checkpoint())
    monkeypatch.setattr(recipe, "load_tokenizer", lambda _: ToyTokenizer())
    settings = Settings(batch_tokens=400, shard_tokens=2000)
    lines: list[str] = []
    (tmp_path / "prompts.txt").write_text("\n".join(f"question {i}" for i in range(12)))
    common = {
        "settings": settings,
        "prompts": tmp_path / "prompts.txt",
        "draft_vocab_size": 32,
        "num_eval_prompts": 2,
        "report": lines.append,
    }
    stop_at = {"step": 6}
    advance = Trainer.advance

    def interrupted(trainer, progress):
        advance(trainer, progress)
        if trainer.step_count == stop_at["step"]:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recipe.train("tiny", tmp_path / "head", minutes=0.001, max_steps=12, **common)
    assert not (tmp_path / "head").exists()
    stop_at["step"] = None
    folder = recipe.train("tiny", tmp_path / "head", minutes=0.001, max_steps=12, **common)
    assert any(line.startswith("resumed at step 6") for line in lines)
    assert re.search(r"% +0\.\d min left", "\n".join(lines)), lines  # by steps too
    head = import_head(folder)
    assert head.config.draft_vocab_size == 32
    assert "12 steps" in (folder / "README.md").read_text()
    again = recipe.train("tiny", tmp_path / "again", minutes=0.001, max_steps=2, init=folder, **common)
    assert torch.equal(import_head(again).draft_ids, head.draft_ids)
