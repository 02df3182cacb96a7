"""State of a decoding run: what the host knows of each request, and the tensors of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_cuda.sampling import Sampled
from eagle_cuda.tree import DraftTree
from eagle_cuda.verify import Accepted
from eagle_decode import faults
from eagle_decode.constraints import Constraints
from eagle_decode.metrics import Metrics
from eagle_decode.sampling import SamplingParams
from eagle_decode.text import TextStream, UnreadableToken

# The most likely tokens at one place, and their log-probabilities.
TopLogprobs = list[tuple[int, float]]


@dataclass
class Result:
    """What one request produced.

    tokens: the generated ids; a stop token is the last of them, a stop string ends within the last of them.
    text: decoding of the tokens without special and stop tokens, cut before a stop string; None without a
        tokenizer.
    logprobs: one per token, or None if not asked for. top_logprobs: of each token the n best at its place, or
        None.
    finish_reason: "stop" (stop_reason: the token id or the string), "length" (the budget or the context
        ended), "cancelled" (Stream.cancel), "error", or None: not ended.
    error: with the finish reason "error": why this request, and no other, could not go on, and where.
    """

    prompt: int  # index among the prompts
    sample: int  # index among the prompt's samples
    tokens: list[int]
    text: str | None
    logprobs: list[float] | None
    finish_reason: str | None
    stop_reason: int | str | None
    metrics: Metrics
    top_logprobs: list[TopLogprobs] | None = None
    error: str | None = None


class Chunk(NamedTuple):
    """What one cycle added to one request. Joined chunks of a request are its Result."""

    request: int  # index of the Result
    tokens: list[int]
    text: str | None  # complete characters only, and nothing that may turn out to belong to a stop string
    accepted: list[bool]  # per token: drafted, then confirmed by the target
    logprobs: list[float] | None
    finish_reason: str | None  # with the last chunk
    top_logprobs: list[TopLogprobs] | None = None
    error: str | None = None  # with the finish reason "error"


@dataclass
class Request:
    """Host side of one sample of one prompt."""

    index: int
    prompt_index: int
    sample: int
    prompt: list[int]
    params: SamplingParams
    budget: int  # tokens that may be emitted: max_new_tokens, or what the context holds
    stop_tokens: frozenset[int]
    stream: TextStream | None
    metrics: Metrics
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cancelled: bool = False  # ends with the next cycle

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.budget - len(self.tokens)

    def commit(
        self, tokens: list[int], logprobs: list[float], num_accepted: int, finished: int,
        top: Sequence[TopLogprobs] = (), error: str | None = None,
    ) -> Chunk:  # fmt: skip
        """Takes in the tokens of one cycle, the first `num_accepted` of them drafted. error: why no more."""
        text = None
        if self.stream is not None:
            visible = tokens[:-1] if finished == 1 else tokens
            try:
                kept = self.stream.push(visible)
            except UnreadableToken as fault:
                kept, tokens, finished = None, tokens[: fault.count], 0
                error = faults.unreadable(self, fault)
            if kept is not None:
                tokens, finished = tokens[:kept], 0
                self.finish_reason, self.stop_reason = "stop", self.stream.stopped_by
        if error is not None:
            self.finish_reason = "error"
        elif finished == 1:
            self.finish_reason, self.stop_reason = "stop", tokens[-1]
        elif self.finish_reason is None and (finished == 2 or self.remaining <= len(tokens)):
            self.finish_reason = "length"
        if self.stream is not None:
            text = self.stream.take(final=self.finish_reason is not None)
            if self.stream.stopped_by is not None and self.finish_reason != "stop":
                # The last bytes, which never made a character, completed a stop string before them.
                self.finish_reason, self.stop_reason = "stop", self.stream.stopped_by
            self.text += text
        if self.finish_reason == "error":
            self.error = error
        self.tokens += tokens
        kept_logprobs = logprobs[: len(tokens)] if self.params.logprobs else None
        self.logprobs += kept_logprobs or []
        self.metrics.tokens += len(tokens)
        accepted = [i < num_accepted for i in range(len(tokens))]
        kept_top = None
        if self.params.top_logprobs:
            kept_top = [best[: self.params.top_logprobs] for best in top[: len(tokens)]]
            self.top_logprobs += kept_top
        reason = self.finish_reason
        return Chunk(self.index, tokens, text, accepted, kept_logprobs, reason, kept_top, self.error)

    def end(self, reason: str) -> Chunk:
        """Ends the request without another token; text that was held back comes out."""
        self.finish_reason = reason
        return self.commit([], [], 0, 0)

    def result(self) -> Result:
        """What the request has produced so far; it does not grow with the request."""
        metrics = Metrics()
        metrics.add(self.metrics)
        return Result(
            prompt=self.prompt_index,
            sample=self.sample,
            tokens=[*self.tokens],
            text=None if self.stream is None else self.text,
            logprobs=[*self.logprobs] if self.params.logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            metrics=metrics,
            top_logprobs=[*self.top_logprobs] if self.params.top_logprobs else None,
            error=self.error,
        )


class Emitted(NamedTuple):
    """What one row emitted in a cycle, on the host, before the first node that left no token to choose."""

    tokens: list[int]
    log_probs: list[float]
    num_accepted: int  # of the tokens, those that were drafted
    finished: int  # 0 no, 1 stop token, 2 length
    num_nodes: int
    top: list[TopLogprobs]  # per token; empty if no request of the run asked for it
    speechless: bool  # there is such a node
    raised: Exception | None  # by logits_mask, there


class SamplingGroup(NamedTuple):
    """Consecutive rows that one call of sample_tokens can serve, and its arguments for them."""

    rows: slice
    arguments: dict[str, Any]
    logprobs: bool


class Batch:
    """Tensors of the running requests, one row each; row b of the caches belongs to row b of every tensor
    here.

    Between two cycles a row stands for a verified tree: `sampled` and `features` at the nodes of
    `accepted.path`, under a root at position `seq_lens`. The root of the next tree, `accepted.next_tokens`,
    has no cache row yet; it will be written at `accepted.new_seq_lens`. Only rows [0, len(requests)) are in
    use, and all of them are.
    """

    # Tensors that hold one row per request, beside `sampled` and `features`; `remove` moves them all.
    SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seeds")
    ROWS = (
        "seq_lens", "path", "num_accepted", "next_tokens", "finished", "new_seq_lens", "num_nodes", "budget",
        "stop_tokens", *SAMPLING,
    )  # fmt: skip

    def __init__(
        self, capacity: int, *, max_nodes: int, max_path: int, vocab_size: int, feature_size: int,
        dtype: torch.dtype, device: torch.device,
    ):  # fmt: skip
        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.requests: list[Request] = []
        self.device, self._max_nodes, self._vocab_size = device, max_nodes, vocab_size
        self._whole = {
            "seq_lens": new(capacity),
            "next_tokens": new(capacity),
            "new_seq_lens": new(capacity),
            "budget": new(capacity),
            "stop_tokens": new(capacity, 1),
            "temperature": new(capacity, dtype=torch.float32),
            "top_k": new(capacity),
            "top_p": new(capacity, dtype=torch.float32),
            "min_p": new(capacity, dtype=torch.float32),
            "seeds": new(capacity, dtype=torch.int64),
        }
        # What the host reads after each cycle lies in one piece: the target's choice at every node (token,
        # bits of the log-probability, flag), the paths, and the counts. Arrays with a node axis are views of
        # the width of the last tree, so that they stay contiguous.
        self._capacity, self._plane = capacity, capacity * max_nodes
        sizes = [3 * self._plane, capacity * max_path, capacity, capacity, capacity]
        self._block = new(sum(sizes))
        choices, path, num_accepted, finished, num_nodes = self._block.split(sizes)
        self._choices = choices.view(3, self._plane)
        self._whole |= {
            "path": path.view(capacity, max_path),
            "num_accepted": num_accepted,
            "finished": finished,
            "num_nodes": num_nodes,
        }
        self.num_top, self._top = 0, None
        self.constraints: Constraints | None = None
        self._features = new(capacity * max_nodes, feature_size, dtype=dtype) if feature_size else None
        self.width = 1
        self._views: dict[tuple[int, int], tuple[Sampled, Tensor | None]] = {}
        self._groups: list[SamplingGroup] | None = None
        self._resize(0)

    def _resize(self, size: int) -> None:
        for name, tensor in self._whole.items():
            setattr(self, name, tensor[:size])
        self._groups = None
        self.accepted = Accepted(
            self.path, self.num_accepted, self.next_tokens, self.finished, self.new_seq_lens
        )
        self.sampled, self.features = self._of_width(size, self.width)

    def _of_width(self, size: int, width: int) -> tuple[Sampled, Tensor | None]:
        key = (size, width)
        if key not in self._views:
            tokens, log_probs, flags = self._choices[:, : size * width].unflatten(1, (size, width))
            features = None
            if self._features is not None:
                features = self._features[: size * width].unflatten(0, (size, width))
            top: list[Tensor | None] = [None, None]
            if self._top is not None:
                top_tokens, bits = self._top[:, : size * width].unflatten(1, (size, width))
                top = [top_tokens, bits.view(torch.float32)]
            self._views[key] = (Sampled(tokens, log_probs.view(torch.float32), flags, *top), features)
        return self._views[key]

    def begin_cycle(self, width: int) -> None:
        """Puts the roots in their place, and makes room for choices at `width` nodes per request. The
        verified tree that the rows stood for is lost."""
        self.seq_lens.copy_(self.new_seq_lens)
        if width != self.width:
            if width * self._capacity > self._plane:
                widest = self._plane // self._capacity
                raise ValueError(f"draft: expected trees of at most max_nodes = {widest} nodes, got {width}")
            self.width = width
            self.sampled, self.features = self._of_width(len(self.requests), width)

    def put(self, row: int, request: Request) -> None:
        """Makes `row`, an old one or the next, the row of `request`. Its verified tree is written by the
        engine."""
        if row == len(self.requests):
            self.requests.append(request)
            self._resize(len(self.requests))
        else:
            self.requests[row] = request
        self._groups = None
        params = request.params
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seeds[row] = params.seed_bits
        self.budget[row] = request.remaining
        self.stop_tokens[row] = -1
        for i, token in enumerate(sorted(request.stop_tokens)):
            self.stop_tokens[row, i] = token
        if self.constraints is not None:
            self.constraints.put(row, request.prompt, request.tokens, params)

    def remove(self, row: int) -> int | None:
        """Drops `row`. The last row takes its place; returns the row that it came from, None if nothing
        moved."""
        last = len(self.requests) - 1
        if row < last:
            for name in self.ROWS:
                tensor = getattr(self, name)
                tensor[row] = tensor[last]
            for tensor in self.sampled:
                if tensor is not None:
                    tensor[row] = tensor[last]
            if self.constraints is not None:
                self.constraints.move(last, row)
            if self.features is not None:
                self.features[row] = self.features[last]
            self.requests[row] = self.requests[last]
        self.requests.pop()
        self._resize(last)
        return last if row < last else None

    def groups(self) -> list[SamplingGroup]:
        """The batch as runs of rows with the same top_k_top_p, which is an argument of a whole call."""
        if self._groups is None:
            self._groups, start = [], 0
            for mode, members in groupby(self.requests, key=lambda request: request.params.top_k_top_p):
                members = list(members)
                rows = slice(start, start + len(members))
                arguments = {name: getattr(self, name)[rows] for name in self.SAMPLING}
                logprobs = any(request.params.logprobs for request in members)
                self._groups.append(SamplingGroup(rows, {**arguments, "top_k_top_p": mode}, logprobs))
                start = rows.stop
        return self._groups

    def make_room(self, coming: Iterable[Request]) -> None:
        """Makes room for all that requests to come ask for beyond temperature and its limits, if anything.
        Rows keep what they hold."""
        requests = [*self.requests, *coming]
        params = [request.params for request in requests]
        stop_tokens = self._whole["stop_tokens"]
        more = max(len(request.stop_tokens) for request in requests) - stop_tokens.shape[1]
        if more > 0:
            self._whole["stop_tokens"] = torch.nn.functional.pad(stop_tokens, (0, more), value=-1)
        num_top = max(one.top_logprobs for one in params)
        if num_top > self.num_top:  # the n best at every node: tokens, and bits of the log-probabilities
            shape = (2, self._plane, num_top)
            self.num_top, self._top = num_top, torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._views.clear()
        self.constraints = None
        if Constraints.needed(params):
            self.constraints = Constraints(
                self._capacity, params, vocab_size=self._vocab_size, max_nodes=self._max_nodes,
                stop_tokens=self._whole["stop_tokens"],
            )  # fmt: skip
            for row, request in enumerate(self.requests):
                self.constraints.put(row, request.prompt, request.tokens, request.params)
        self._resize(len(self.requests))

    def outputs(self, rows: slice, logprobs: bool) -> Sampled:
        """Where sample_tokens writes the choices of these rows."""
        tokens, log_probs, flags, *top = self.sampled
        if self._top is None:
            return Sampled(tokens[rows], log_probs[rows] if logprobs else None, flags[rows])
        return Sampled(tokens[rows], log_probs[rows], flags[rows], *(tensor[rows] for tensor in top))

    def constrained(self, rows: slice, tree: DraftTree, tree_rows: slice) -> dict[str, Any]:
        """Arguments of sample_tokens for what these rows ask for; their trees are `tree_rows` of `tree`."""
        if self.constraints is None:
            return {}
        tree = DraftTree(*(tensor[tree_rows] for tensor in tree))
        asked = [(request.tokens, request.stop_tokens, request.params) for request in self.requests[rows]]
        return {"tree": tree, "state": self.constraints.state(rows, tree, asked)}

    def count(self, rows: slice) -> None:
        """Takes what the rows emitted into account, for what comes after it."""
        if self.constraints is not None:
            self.constraints.count(rows, self.sampled.tokens[rows], self.path[rows])

    def read(self, rows: slice) -> list[Emitted]:
        """What the rows emitted; the cycle's only transfer to the host, but for the n best."""
        top = None if self._top is None else self._top.cpu().numpy()
        host = self._block.cpu().numpy()
        counts_at = len(host) - 3 * self._capacity
        choices = host[: 3 * self._plane].reshape(3, -1)
        paths = host[3 * self._plane : counts_at].reshape(self._capacity, -1)
        counts = host[counts_at:].reshape(3, -1)
        emitted = []
        for row in range(rows.start, rows.stop):
            num_accepted, finished, num_nodes = counts[:, row].tolist()
            path, raised = paths[row, : num_accepted + 1], None
            flags = choices[2, row * self.width + path]
            if speechless := bool(flags.any()):
                num_accepted, finished = int(flags.argmax()), 0
                if self.constraints is not None:
                    raised = self.constraints.faults.get(row, {}).get(int(path[num_accepted]))
                path = path[:num_accepted]
            at = row * self.width + path
            tokens, bits = choices[:2, at]
            log_probs = bits.view(np.float32).tolist()
            best: list[TopLogprobs] = []
            if top is not None:
                ids, values = top[0, at].tolist(), top[1, at].view(np.float32).tolist()
                best = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
            chosen = (tokens.tolist(), log_probs, num_accepted, finished, num_nodes, best)
            emitted.append(Emitted(*chosen, speechless, raised))
        return emitted
