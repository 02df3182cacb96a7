"""The loop: propose, one pass of the target, sample, verify, compact. Plain decoding is the same loop with
one-node trees."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_cuda.kv_cache import compact_kv
from eagle_cuda.sampling import Sampled, sample_tokens
from eagle_cuda.tree import DraftTree, TreeShape
from eagle_cuda.verify import Accepted, verify
from eagle_decode import faults
from eagle_decode.checks import (
    check_coupling,
    check_draft,
    check_head,
    check_roots,
    check_target,
    check_tau,
    tree_size,
)
from eagle_decode.drafting import Drafter, HeadDrafter, RootDrafter, move_rows, rows_of
from eagle_decode.generation_config import default_sampling
from eagle_decode.heads.loaded import LoadedHead
from eagle_decode.metrics import Clock, Metrics
from eagle_decode.models.base import KVCache, Target
from eagle_decode.prompts import Prompt, make_requests
from eagle_decode.sampling import SamplingParams, integer, token_ids
from eagle_decode.sequence import Batch, Chunk, Request, Result
from eagle_decode.stream import Queue, Stream


class Engine:
    """Generates with a target model, and with a draft head where there is one. Tokens are the same either
    way.

    target: see `models.base.Target`. head: a LoadedHead, or a checkpoint's folder; head_format: quantises its
        weights, see `LoadedHead.with_weights`. tokenizer: transformers';
        needed for prompts and stop strings given as text. Text is continued as it stands, without a chat
        template (`models.tokenizer.chat_prompt` applies one).
    levels, draft_top_k, max_nodes: the draft tree's depth, the children tried per node, and the nodes that
        are verified, root included (at most 256; 1: plain decoding). Default: 4, 4, 8. draft_top_k is at
        most 32 and the draft vocabulary, levels at most 31 where it is above 1, K + (levels - 1) K^2 at most
        8192.
    tree_shape: a static tree instead of these three, which every cycle verifies whole, as far as the budget
        can use it.
    max_batch: requests that run at a time; more wait for a free row. max_length: tokens of the longest
        request, prompt included (default: what the target was made for, at most 4096).
    coupling, tau: see HeadDrafter. draft: any Drafter instead of a head, with a tree of its own.
    observer: called after each cycle, and after each prompt, with (batch, rows, tree, logits) while they are
        unchanged; for tests and tools.

    `metrics` sums over everything generated so far. `default_sampling` is what the checkpoint's
    generation_config.json asks for; `dataclasses.replace(engine.default_sampling, seed=1)` changes a field.
    One thread, and one `generate` or `stream` at a time.
    """

    def __init__(
        self,
        target: Target,
        head: LoadedHead | str | Path | None = None,
        tokenizer: Any = None,
        *,
        head_format: str | None = None,
        levels: int | None = None,
        draft_top_k: int | None = None,
        max_nodes: int | None = None,
        tree_shape: TreeShape | None = None,
        max_batch: int = 4,
        max_length: int | None = None,
        coupling: float | None = None,
        tau: float = 1.0,
        draft: Drafter | None = None,
        observer: Callable[[Batch, slice, DraftTree, Tensor], None] | None = None,
    ):
        check_target(target)
        check_tau(tau)
        check_coupling(coupling)
        check_draft(
            draft, head=head, levels=levels, draft_top_k=draft_top_k, max_nodes=max_nodes,
            tree_shape=tree_shape, coupling=coupling, tau=None if tau == 1 else tau,
        )  # fmt: skip
        if head is None and head_format is not None:
            raise ValueError(f"head_format: expected None without a head, got {head_format!r}")
        levels, draft_top_k, max_nodes = tree_size(tree_shape, levels, draft_top_k, max_nodes)
        max_batch = integer("max_batch", max_batch)
        if max_batch < 1:
            raise ValueError(f"max_batch: expected at least 1, got {max_batch}")
        if max_length is None:
            max_length = min(target.max_positions, 4096)
        max_length = integer("max_length", max_length)
        if not 1 <= max_length <= target.max_positions:
            raise ValueError(
                f"max_length: expected 1 to the target's {target.max_positions} positions, got {max_length}"
            )
        self.target, self.tokenizer, self.observer = target, tokenizer, observer
        self.max_batch, self.max_length = max_batch, max_length
        self.metrics = Metrics()
        self._plain = RootDrafter(max_batch, target.device)
        if head is not None:
            head = self._load(head).with_weights(head_format)
            check_head(head, target)
            draft = HeadDrafter(
                head, dtype=target.dtype, device=target.device, capacity=max_batch,
                max_length=max_length, levels=levels, top_k=draft_top_k, max_nodes=max_nodes,
                tree_shape=tree_shape, coupling=coupling, tau=tau,
            )  # fmt: skip
        self.drafter, self._foreign = draft, head is None and draft is not None
        self._levels = getattr(draft, "levels", levels)
        self._max_nodes = getattr(draft, "max_nodes", max_nodes)
        # Behind the last committed token stand the nodes of a tree, however near the end of the context.
        self._cache = target.new_cache(max_batch, max_length + self._max_nodes)
        self._caches: dict[int, list[KVCache]] = {}
        self.default_sampling = default_sampling(target.config.get("generation_config") or {})
        self._end_ids = token_ids("eos_token_id", target.config.get("eos_token_id"))
        self._busy = self._warned = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
    ) -> list[Result]:
        """Continues every prompt, text or token ids. Results come in the order of prompts and, for n > 1, of
        samples.

        sampling: for all prompts, or one per prompt; default: `default_sampling`.
        speculate: False decodes plainly through the same kernels, with the same tokens. Without a drafter
            decoding is plain; the metrics say so.
        Raises ValueError for empty prompts, ids outside the vocabulary, prompts longer than the context, and
        text without a tokenizer, before anything runs. What goes wrong in a running request ends that one,
        see `Result.error`.
        """
        stream = self.stream(prompts, sampling, speculate=speculate)
        for _ in stream:
            pass
        return stream.results

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
    ) -> Stream:
        """As `generate`, yielding what each cycle adds to each request, while others may join and some may be
        cancelled: see Stream. Arguments are checked at once."""
        queue, make = Queue(), partial(self._requests, speculate=speculate)
        queue.add(make(prompts, sampling))
        return Stream(queue, self._run(queue, speculate), make)

    # ---- the loop

    def _run(self, queue: Queue, speculate: bool) -> Iterator[Chunk]:
        if self._busy:
            queue.closed = True
            raise RuntimeError("the engine is already generating; finish or close the other stream first")
        drafter = self.drafter if speculate and self.drafter is not None else self._plain
        batch, waiting = self._new_batch(drafter), deque[Request]()
        self._busy = True
        try:
            while queue or waiting or batch.requests:
                joining, cancelled = queue.take()
                if joining:
                    waiting.extend(joining)
                    batch.make_room(waiting)
                for request in cancelled:
                    if request.finish_reason is None:
                        yield self._end(request, "cancelled")
                yield from self._fill(batch, waiting, drafter)
                if batch.requests and not queue:
                    yield from self._step(batch, drafter)
            self._warn_if_useless()
        finally:
            for request in batch.requests:
                if request.finish_reason is None:
                    self.metrics.add(request.metrics, seconds=False)
            queue.closed, self._busy = True, False

    def _step(self, batch: Batch, drafter: Drafter) -> list[Chunk]:
        """One cycle over the whole batch. Rows of the batch and chunks correspond."""
        clock = Clock()
        tree = drafter.propose(batch)
        clock.lap("draft")
        if self._foreign:
            check_roots(tree, batch)
        batch.begin_cycle(tree.tokens.shape[1])
        logits = self._forward(tree, batch, drafter)
        clock.lap("target")
        chosen = self._sample(logits, batch, tree)
        clock.lap("sample")
        accepted = self._verify(tree, chosen, batch)
        clock.lap("verify")
        self._compact(batch, accepted)
        clock.lap("compact")
        rows = slice(0, len(batch.requests))
        if self.observer:
            self.observer(batch, rows, tree, logits)
        chunks = self._commit(batch, rows, tree)
        clock.lap("commit")
        self.metrics.add_seconds(clock.seconds)
        for request in batch.requests:
            request.metrics.add_seconds(clock.seconds)
        return chunks

    def _forward(self, tree: DraftTree, batch: Batch, drafter: Drafter) -> Tensor:
        output = self.target.forward(
            tree.tokens, seq_lens=batch.seq_lens, depths=tree.depths, mask=tree.mask,
            num_nodes=tree.num_nodes, cache=self._cache_of(len(batch.requests)),
            feature_layers=getattr(drafter, "feature_layers", None),
        )  # fmt: skip
        if batch.features is not None:  # the target's own buffer is gone by the time of the next proposal
            batch.features.copy_(output.features)
        return output.logits

    def _sample(self, logits: Tensor, batch: Batch, tree: DraftTree) -> Sampled:
        positions = tree.depths + (batch.seq_lens + 1)[:, None]
        for rows, arguments, logprobs in batch.groups():
            sample_tokens(
                logits[rows], positions=positions[rows], num_nodes=tree.num_nodes[rows], **arguments,
                **batch.constrained(rows, tree, rows), out=batch.outputs(rows, logprobs),
            )  # fmt: skip
        return batch.sampled

    def _verify(self, tree: DraftTree, chosen: Sampled, batch: Batch) -> Accepted:
        return verify(
            tree,
            chosen.tokens,
            batch.seq_lens,
            stop_tokens=batch.stop_tokens,
            budget=batch.budget,
            out=batch.accepted,
        )

    def _compact(self, batch: Batch, accepted: Accepted) -> None:
        caches = self._cache_of(len(batch.requests))
        compact_kv(caches, accepted.path, accepted.num_accepted, batch.seq_lens, max_nodes=batch.width)

    def _commit(self, batch: Batch, rows: slice, tree: DraftTree) -> list[Chunk]:
        """Reads back what the rows emitted and hands it to the requests."""
        batch.num_nodes[rows].copy_(tree.num_nodes)
        batch.budget[rows].sub_(batch.num_accepted[rows] + 1)
        batch.count(rows)
        chunks = []
        for row, emitted in zip(range(rows.start, rows.stop), batch.read(rows), strict=True):
            request, error = batch.requests[row], None
            metrics, is_cycle = request.metrics, bool(request.tokens)
            if emitted.speechless:
                error = faults.speechless(request, len(emitted.tokens), emitted.raised)
            chunk = request.commit(*emitted[:4], emitted.top, error)
            if is_cycle:
                metrics.count_cycle(emitted.num_accepted, emitted.num_nodes)
                metrics.cut_tokens += emitted.num_accepted + 1 - len(chunk.tokens)
            else:
                metrics.first_tokens += len(chunk.tokens)
            if chunk.finish_reason:
                self.metrics.add(request.metrics, seconds=False)
            chunks.append(chunk)
        return chunks

    # ---- joining and leaving

    def _fill(self, batch: Batch, waiting: deque[Request], drafter: Drafter) -> Iterator[Chunk]:
        """Gives the rows of requests that have ended, and the free ones, to waiting requests."""
        for row in reversed(range(len(batch.requests))):
            if batch.requests[row].finish_reason is not None:
                yield from self._admit_next(batch, row, waiting, drafter)
        while waiting and len(batch.requests) < self.max_batch:
            yield from self._admit_next(batch, len(batch.requests), waiting, drafter)

    def _admit_next(
        self, batch: Batch, row: int, waiting: deque[Request], drafter: Drafter
    ) -> Iterator[Chunk]:
        """Gives `row`, an ended one's or the next, to the first waiting request that does not end at once;
        without any, an ended one's row is dropped."""
        while waiting:
            request = waiting.popleft()
            if request.cancelled:  # its notice may be on the way from another thread
                if request.finish_reason is None:
                    yield self._end(request, "cancelled")
                continue
            if request.budget == 0:
                yield self._end(request, "length")
                continue
            chunk = self._admit(batch, row, request, drafter)
            yield chunk
            if chunk.finish_reason is None:
                return
        if row < len(batch.requests):
            source = batch.remove(row)
            if source is not None:
                length = len(batch.requests[row].prompt) + len(batch.requests[row].tokens) - 1
                move_rows(self._cache, source, row, length)
                if hasattr(drafter, "move"):
                    drafter.move(source, row, length)

    def _end(self, request: Request, reason: str) -> Chunk:
        """The last chunk of a request that gets no more tokens."""
        chunk = request.end(reason)
        self.metrics.add(request.metrics, seconds=False)
        return chunk

    def _admit(self, batch: Batch, row: int, request: Request, drafter: Drafter) -> Chunk:
        """Runs the prompt. Its last token then stands for a verified tree of one node: the row of its logits
        gives the first new token, and that of its features the first proposal."""
        clock = Clock()
        batch.put(row, request)
        rows = slice(row, row + 1)
        prompt = torch.tensor(request.prompt, dtype=torch.int32, device=self.target.device)
        layers = getattr(drafter, "feature_layers", None)
        output = self.target.prefill(prompt, cache=self._cache, request=row, feature_layers=layers)
        if batch.features is not None:
            batch.features[row, 0] = output.features[0, -1]
            if hasattr(drafter, "admit"):
                drafter.admit(row, prompt[1:], output.features[0, :-1])
        batch.seq_lens[row] = len(request.prompt) - 1
        tree = self._plain.tree(1)
        first = sample_tokens(
            output.logits, positions=(batch.seq_lens[rows] + 1)[:, None],
            **{name: getattr(batch, name)[rows] for name in batch.SAMPLING},
            **batch.constrained(rows, tree, slice(0, 1)),
            top_k_top_p=request.params.top_k_top_p, num_top=batch.num_top,
        )  # fmt: skip
        for tensor, value in zip(batch.sampled, first, strict=True):
            if tensor is not None:
                tensor[row, 0] = value[0, 0]
        verify(
            tree, first.tokens, batch.seq_lens[rows], stop_tokens=batch.stop_tokens[rows],
            budget=batch.budget[rows], out=Accepted(*(t[rows] for t in batch.accepted)),
        )  # fmt: skip
        if self.observer:
            self.observer(batch, rows, tree, output.logits)
        chunk = self._commit(batch, rows, tree)[0]
        clock.lap("prefill")
        self.metrics.add_seconds(clock.seconds)
        request.metrics.add_seconds(clock.seconds)
        return chunk

    def _warn_if_useless(self) -> None:
        """Says once if a drafter was never right: most often it was made for another target."""
        metrics = self.metrics
        if self._warned or metrics.accepted_tokens or metrics.cycles - metrics.plain_cycles < 50:
            return
        if metrics.speculative:
            self._warned = True
            message = (
                f"none of {metrics.draft_tokens} draft tokens was accepted: is the head made for this target?"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def _new_batch(self, drafter: Drafter) -> Batch:
        return Batch(
            self.max_batch,
            max_nodes=getattr(drafter, "max_nodes", self._max_nodes),
            max_path=getattr(drafter, "levels", self._levels) + 1,
            vocab_size=self.target.vocab_size,
            feature_size=self.target.feature_size(getattr(drafter, "feature_layers", None)),
            dtype=self.target.dtype,
            device=self.target.device,
        )

    def _cache_of(self, size: int) -> list[KVCache]:
        """The caches of the first `size` rows of the batch."""
        if size not in self._caches:
            self._caches[size] = rows_of(self._cache, slice(0, size))
        return self._caches[size]

    # ---- arguments

    def _requests(
        self, prompts: Any, sampling: SamplingParams | Sequence[SamplingParams] | None, *, speculate: bool
    ) -> list[Request]:
        return make_requests(
            prompts,
            self.default_sampling if sampling is None else sampling,
            tokenizer=self.tokenizer,
            vocab_size=self.target.vocab_size,
            max_length=self.max_length,
            end_ids=self._end_ids,
            speculative=speculate and self.drafter is not None,
        )

    def _load(self, head: LoadedHead | str | Path) -> LoadedHead:
        if isinstance(head, LoadedHead):
            return head
        from eagle_decode.heads.load import load_head

        checkpoint = getattr(self.target, "checkpoint", None)
        tensors = None if checkpoint is None else checkpoint.tensors
        return load_head(head, target_config=self.target.config, target_tensors=tensors)
