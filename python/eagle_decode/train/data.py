"""Dialogues that the target itself wrote: read from a file, or generated.

A head must predict what its target says, so the target writes the training text. Without any prompts it
invents the user turns too: from the bare chat prefix it continues with what a user would write (the idea of
Magpie, Xu et al., arXiv 2406.08464), and then answers at temperatures 0, 0.7 and 1.

File format, one JSON object a line: `p` prompt token ids (chat template applied), `r` response token ids,
optionally `k` (where the prompt came from) and `T` (temperature).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_cuda.sampling import gumbel_noise
from eagle_decode.models.tokenizer import bare_user_prefix, chat_prompt
from eagle_decode.train.target import TorchTarget

ANSWER_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # half of the answers greedy: that is how heads are mostly used
_INVENTING_TOP_K = 50  # of a turn's tokens: users stray less than a small target at temperature 1 does


@dataclass(frozen=True)
class Dialogue:
    """One prompt (chat template applied) and the target's answer, as token ids."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def read_dialogues(path: str | Path, max_tokens: int = 1024, vocab_size: int | None = None) -> list[Dialogue]:
    """Reads a dialogue file; answers are cut so that a dialogue holds at most `max_tokens`.

    Dialogues with an answer shorter than 4 tokens teach nothing and are left out, as are half-written last
    lines. Raises ValueError, with the line, where `p` or `r` are no token ids (below `vocab_size`).
    """
    dialogues = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            prompt, response = _ids_of(entry, vocab_size, f"{path}, line {number}")
            response = response[: max(0, max_tokens - len(prompt))]
            if len(response) >= 4:
                dialogues.append(Dialogue(tuple(prompt), tuple(response)))
    return dialogues


def _ids_of(entry: Any, vocab_size: int | None, where: str) -> tuple[list[int], list[int]]:
    """`p` and `r` of a line, checked."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected an object, got {type(entry).__name__}")
    for name in ("p", "r"):
        ids = entry.get(name)
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError(f"{where}: {name}: expected a list of token ids, got {ids!r:.60}")
        bad = [token for token in ids if token < 0 or (vocab_size is not None and token >= vocab_size)]
        if bad:
            most = "" if vocab_size is None else f" to {vocab_size - 1}"
            raise ValueError(f"{where}: {name}: expected token ids from 0{most}, got {bad[0]}")
    if not entry["p"]:
        raise ValueError(f"{where}: p: expected at least one token, got none")
    return entry["p"], entry["r"]


def read_prompts(path: str | Path) -> list[str]:
    """User turns from a file: JSON lines with `turns` (the first is taken) or `prompt`, or plain text, one a
    line.
    """
    prompts = []
    with open(path, encoding="utf-8") as lines:
        for line in filter(str.strip, lines):
            if line.lstrip().startswith("{"):
                entry = json.loads(line)
                prompts.append(entry["turns"][0] if "turns" in entry else entry["prompt"])
            else:
                prompts.append(line.strip())
    return prompts


@torch.inference_mode()
def sample_batch(
    target: TorchTarget,
    prompts: list[list[int]],
    temperatures: list[float],
    max_new_tokens: int,
    stops: list[int],
    chance: torch.Generator | list[int],
    top_k: int | None = None,
) -> list[list[int]]:
    """Continues every prompt at its own temperature (0 greedy), up to and including the first stop token.

    Draws from the whole distribution unless `top_k` says otherwise: at temperature 1 a tenth of the tokens
    may come from behind the 64 likeliest, and a head that never read what follows them cannot draft there.
    chance: where the draws come from; seeds, one a prompt, make them those of the engine (its noise, on
    logits of this target).

    Prompts are padded on the left; requests that have ended leave the batch once they are a sixth of it.
    """
    device, longest = target.device, max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    seen = torch.zeros(len(prompts), longest + max_new_tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        seen[row, longest - len(prompt) :] = True
    ids, seen = ids.to(device), seen.to(device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    heat = torch.tensor(temperatures, device=device)
    positions = (torch.arange(longest, device=device)[None] - (longest - lengths)[:, None]).clamp(min=0)
    cache = target.new_cache(len(prompts), longest + max_new_tokens)
    causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    itself = torch.eye(longest, dtype=torch.bool, device=device)
    last = []
    for at in range(
        0, len(prompts), 16
    ):  # prefill in slices: the attention scores of a whole batch are large
        rows = slice(at, at + 16)
        mask = (causal & seen[rows, None, None, :longest]) | itself
        hidden, _ = target.forward(ids[rows], positions[rows], cache=cache[:, :, rows], mask=mask)
        last.append(hidden[:, -1])
    logits = target.logits(torch.cat(last))
    answers: list[list[int]] = [[] for _ in prompts]
    request = list(range(len(prompts)))
    stop_ids = torch.tensor(stops, device=device)
    for step in range(max_new_tokens):
        drawn = chance
        if isinstance(chance, list):
            seeds, at = torch.tensor([chance[i] for i in request]), (lengths + step).int().cpu()
            drawn = gumbel_noise(seeds, at, logits.shape[-1]).to(device)
        chosen = _draw(logits.float(), heat, top_k, drawn)
        for index, token in zip(request, chosen.tolist(), strict=True):
            answers[index].append(token)
        going = ~torch.isin(chosen, stop_ids)
        if not going.any() or step == max_new_tokens - 1:
            break
        if going.sum() < 0.85 * len(request):
            keep = going.nonzero()[:, 0]
            request = [request[i] for i in keep.tolist()]
            chosen, heat, lengths, seen, cache = (
                chosen[keep],
                heat[keep],
                lengths[keep],
                seen[keep],
                cache[:, :, keep],
            )
        end = longest + step + 1
        seen[:, end - 1] = True
        mask = seen[:, None, None, :end]
        hidden, _ = target.forward(
            chosen[:, None], (lengths + step)[:, None], cache=cache, start=end - 1, mask=mask
        )
        logits = target.logits(hidden[:, 0])
    return [_until_stop(answer, stops) for answer in answers]


def _draw(logits: Tensor, heat: Tensor, top_k: int | None, chance: torch.Generator | Tensor) -> Tensor:
    """Logits [N, V], temperatures [N] (0 greedy), a generator or Gumbel noise [N, V] -> tokens [N]."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    weights = (logits / heat.clamp(min=1e-3)[:, None]).softmax(-1)
    if isinstance(chance, Tensor):
        drawn = (logits + heat[:, None] * chance).argmax(-1)
    else:
        drawn = torch.multinomial(weights, 1, generator=chance)[:, 0]
    return torch.where(heat > 0, drawn, logits.argmax(-1))


def _until_stop(answer: list[int], stops: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(answer) if token in stops]
    return answer[: ends[0] + 1] if ends else answer


def invent_user_turns(
    target: TorchTarget, tokenizer, count: int, stops: list[int], generator: torch.Generator
):
    """Yields up to `count` user turns that the target writes from the bare chat prefix (temperature 1)."""
    prefix = bare_user_prefix(tokenizer)
    seen: set[str] = set()
    for _ in range(max(4, 4 * count // 128)):
        batch = sample_batch(
            target, [prefix] * 128, [1.0] * 128, 80, stops, generator, top_k=_INVENTING_TOP_K
        )
        for answer in batch:
            text = tokenizer.decode(answer[:-1]).strip()
            if answer[-1] in stops and len(answer) > 5 and text and text not in seen:
                seen.add(text)
                yield text
                if len(seen) == count:
                    return


def generate_dialogues(
    target: TorchTarget,
    tokenizer,
    out: str | Path,
    *,
    stops: list[int],
    seconds: float,
    prompts: list[str] | None = None,
    max_new_tokens: int = 224,
    batch_size: int = 128,
    seed: int = 0,
    temperatures: tuple[float, ...] = ANSWER_TEMPERATURES,
) -> Iterator[int]:
    """Appends dialogues to the file `out` until `seconds` have passed (one batch at least); yields the
    response tokens of each batch.

    Given prompts are answered once each, at one of the temperatures each, before the target invents user
    turns by itself. What `out` holds already is not written again: its prompts are passed over, and the rest
    is drawn by other random numbers.
    """
    started, (there, answered) = time.monotonic(), _written_so_far(Path(out))
    random_seed = seed + 1_000_003 * there
    generator = torch.Generator(target.device).manual_seed(random_seed)
    chooser, waiting = random.Random(random_seed), list(prompts or [])
    if answered:
        waiting = [turn for turn in waiting if tuple(chat_prompt(tokenizer, turn)) not in answered]
    chooser.shuffle(waiting)
    written = False
    while not written or time.monotonic() - started < seconds:
        source = "file" if waiting else "invented"
        if waiting:
            turns, waiting = waiting[:batch_size], waiting[batch_size:]
        else:
            turns = list(invent_user_turns(target, tokenizer, batch_size, stops, generator))
        # Long prompts would pad the whole batch: they are left out.
        encoded = [ids for ids in (chat_prompt(tokenizer, turn) for turn in turns) if len(ids) <= 640]
        if not encoded:
            if source == "invented":
                raise ValueError("the target invents no usable user turns from its chat prefix: pass prompts")
            continue
        encoded.sort(key=len)
        heats = [chooser.choice(temperatures) for _ in encoded]
        answers = sample_batch(target, encoded, heats, max_new_tokens, stops, generator)
        with open(out, "a", encoding="utf-8") as file:
            for prompt, answer, heat in zip(encoded, answers, heats, strict=True):
                file.write(json.dumps({"p": prompt, "r": answer, "k": source, "T": heat}) + "\n")
        written = True
        yield sum(map(len, answers))


def _written_so_far(path: Path) -> tuple[int, set[tuple[int, ...]]]:
    """Dialogues that the file holds and their prompts; a half-written last line is cut off."""
    if not path.is_file():
        return 0, set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    prompts = [tuple(json.loads(line)["p"]) for line in whole.splitlines()]
    return len(prompts), set(prompts)


def choose_draft_vocabulary(
    dialogues: list[Dialogue], size: int, vocab_size: int, always: list[int]
) -> Tensor:
    """The `size` target ids that a head may draft: ascending int64.

    `always` (stop tokens) come first, then the ids that occur in the most answers. Counting answers instead
    of occurrences keeps one looping text from filling the vocabulary, and covers held-out dialogues slightly
    better (96.1 against 96.0 % at 8192). A small bonus for low ids, which a byte-pair vocabulary merged first
    and so are common in general, orders the rare ones.
    """
    ids = torch.arange(vocab_size, dtype=torch.float64)
    counts = 2000.0 / (ids + 1000.0)
    for dialogue in dialogues:
        counts[torch.tensor(sorted(set(dialogue.response)))] += 1
    counts[torch.tensor(always, dtype=torch.int64)] = float("inf")
    return counts.topk(size).indices.sort().values
