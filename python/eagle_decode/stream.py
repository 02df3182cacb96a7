"""Requests while they run: what they have said so far, others that join them, some that are called off."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eagle_decode.prompts import Prompt
from eagle_decode.sampling import SamplingParams
from eagle_decode.sequence import Chunk, Request, Result


class Queue:
    """Where a stream leaves requests to come, and calls for an end, until the loop's next cycle."""

    def __init__(self) -> None:
        self.requests: list[Request] = []  # all that ever came; a request's index is its place
        self.closed = False
        self._joining: list[Request] = []
        self._cancelled: deque[Request] = deque()

    def add(self, requests: Sequence[Request]) -> list[int]:
        """Numbers the requests after those before them."""
        prompts = self.requests[-1].prompt_index + 1 if self.requests else 0
        first = len(self.requests)
        for request in requests:
            request.index += first
            request.prompt_index += prompts
        self.requests += requests
        self._joining += requests
        return [request.index for request in requests]

    def cancel(self, request: Request) -> None:
        """Its prompt, if that waits, will not run; the rest is the loop's."""
        request.cancelled = True
        self._cancelled.append(request)

    def __bool__(self) -> bool:
        """Whether there is news."""
        return bool(self._joining or self._cancelled)

    def take(self) -> tuple[list[Request], list[Request]]:
        """What came since the last call: requests to join, and requests to end."""
        joining, self._joining = self._joining, []
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        return joining, cancelled


class Stream(Iterator[Chunk]):
    """What `Engine.stream` returns: chunks, as cycles make them, until every request has ended.

        with engine.stream(prompts) as stream:
            for chunk in stream:
                print(chunk.request, chunk.text)
                if nobody_reads(chunk.request):
                    stream.cancel(chunk.request)

    Every request has exactly one chunk with a finish reason, its last. From the first chunk to the end the
    engine does nothing else. `close`, or the end of a `with` block, ends all requests at once and yields no
    more. One thread, but for `cancel`.
    """

    def __init__(self, queue: Queue, chunks: Iterator[Chunk], make: Callable[..., list[Request]]):
        # The queue does not know the stream: one that nobody holds is gone at once, and the engine free.
        self._queue, self._chunks, self._make = queue, chunks, make

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[int]:
        """More requests, which join the running ones as soon as there is a free row; returns their indices.

        Arguments and ValueErrors as of `Engine.stream`. RuntimeError once the stream has ended.
        """
        if self._queue.closed:
            raise RuntimeError("the stream has ended; open another one")
        return self._queue.add(self._make(prompts, sampling))

    def cancel(self, request: int) -> bool:
        """Ends a request, running or waiting, before its next cycle: its last chunk adds no token and has the
        finish reason "cancelled". Its row is free for the next request.

        Returns False where the request has ended already. Called from another thread, the running cycle may
        still add tokens, or end the request in its own way. Raises ValueError for an index of no request.
        """
        requests = self._queue.requests
        if not 0 <= request < len(requests):
            raise ValueError(f"request: expected an index below {len(requests)}, got {request}")
        if self._queue.closed or requests[request].finish_reason is not None:
            return False
        self._queue.cancel(requests[request])
        return True

    @property
    def results(self) -> list[Result]:
        """Of every request what it has produced so far; the finish reason is None while it has not ended."""
        return [request.result() for request in self._queue.requests]

    def close(self) -> None:
        """Ends all requests; `results` keeps what they produced."""
        self._chunks.close()  # raises, and nothing ends, where a request's own function calls it
        self._queue.closed = True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
