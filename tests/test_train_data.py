"""What the recipe trains on: how text is sampled and read, the draft vocabulary, the order of shards."""

from __future__ import annotations

import json

import pytest
import torch

from eagle_decode.train import data
from eagle_decode.train.trainer import shard_schedule


def test_sampled_text_follows_the_whole_distribution():
    """A heat of T draws by softmax(logits / T) over all tokens, not the likeliest alone; 0 takes the best."""
    logits, generator = torch.linspace(0, 4, 200)[None].expand(60_000, -1), torch.Generator().manual_seed(0)
    for heat in (1.0, 0.5):
        drawn = data._draw(logits, torch.full((len(logits),), heat), None, generator)
        expected = (logits[0] / heat).softmax(-1) * len(logits)
        pooled = [
            torch.bincount(drawn, minlength=200).double().view(-1, 20).sum(-1),
            expected.double().view(-1, 20).sum(-1),
        ]
        chi_square = ((pooled[0] - pooled[1]).square() / pooled[1]).sum()
        assert chi_square < 27.9  # 9 degrees of freedom: one run in a thousand
    assert (data._draw(logits, torch.zeros(len(logits)), None, generator) == 199).all()
    assert data._draw(logits, torch.ones(len(logits)), 3, generator).unique().tolist() == [197, 198, 199]


def test_draft_vocabulary_prefers_stops_then_frequent_tokens():
    texts = [
        data.Dialogue((1,), (40, 40, 40, 41)),
        data.Dialogue((1,), (41, 42)),
        data.Dialogue((1,), (42, 41)),
    ]
    chosen = data.choose_draft_vocabulary(texts, 3, 48, always=[2])
    assert chosen.tolist() == [2, 41, 42]  # 40 is written more often, but in one answer only


def test_schedule_spreads_new_shards_and_then_covers_all():
    schedule = shard_schedule(4, replays=2, seed=0)
    visits = [next(schedule) for _ in range(4 + 5 + 8)]
    first_seen = [visits.index(shard) for shard in range(4)]
    assert first_seen == [0, 1, 3, 6]  # 0 | 1 0 | 2 x x | 3 x x
    assert sorted(visits[9:13]) == sorted(visits[13:17]) == [0, 1, 2, 3]


def test_reading_dialogues_and_prompts(tmp_path):
    path = tmp_path / "dialogues.jsonl"
    lines = [
        {"p": [1, 2], "r": [3, 4, 5, 6, 7]},
        {"p": [1, 2], "r": [3]},
        {"p": [1] * 5, "r": list(range(9))},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"p": [1, 2')
    assert data.read_dialogues(path, max_tokens=9) == [
        data.Dialogue((1, 2), (3, 4, 5, 6, 7)),
        data.Dialogue((1,) * 5, (0, 1, 2, 3)),
    ]
    for line, message in (
        ('{"messages": []}', r"line 2: p: expected a list of token ids, got None"),
        ('{"p": "text", "r": [1, 2, 3, 4]}', "line 2: p: expected a list of token ids, got 'text'"),
        ('{"p": [], "r": [1, 2, 3, 4]}', "line 2: p: expected at least one token, got none"),
        ('{"p": [1], "r": [1, 2, 3, 48]}', "line 2: r: expected token ids from 0 to 47, got 48"),
        ('{"p": [-1], "r": [1, 2, 3, 4]}', "line 2: p: expected token ids from 0 to 47, got -1"),
        ("[1, 2]", "line 2: expected an object, got list"),
    ):
        path.write_text(json.dumps(lines[0]) + "\n" + line + "\n")
        with pytest.raises(ValueError, match=message):
            data.read_dialogues(path, vocab_size=48)
    path.write_text('{"turns": ["first", "second"]}\n\nplain text\n{"prompt": "third"}\n')
    assert data.read_prompts(path) == ["first", "plain text", "third"]
