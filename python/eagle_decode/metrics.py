"""What decoding did and what it cost: counts and seconds, per request and for an engine as a whole."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PHASES = ("prefill", "draft", "target", "sample", "verify", "compact", "commit")
_COUNTS = (
    "requests", "prompt_tokens", "tokens", "first_tokens", "cycles", "plain_cycles", "draft_tokens",
    "cut_tokens",
)  # fmt: skip


@dataclass
class Metrics:
    """Counts of one request, or sums over requests.

    A *cycle* is one pass of the target after the prompt. It emits the accepted draft tokens and one token of
    the target's own; a request's first token comes from the prompt's pass and belongs to no cycle. Always:
        sum(accepted_lengths) == cycles
        tokens == (1 if the prompt's pass emitted one) + accepted_tokens + cycles - cut_tokens
    `seconds` are wall time. A request is charged the whole time of the cycles that it took part in, which it
    shared with its neighbours; an engine's metrics count each cycle's time once.
    """

    speculative: bool = False
    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0  # emitted, a final stop token included
    first_tokens: int = 0  # of these, from the prompt's pass
    cycles: int = 0
    plain_cycles: int = 0  # cycles of a speculative run without draft tokens: the budget left no use for them
    draft_tokens: int = 0  # proposed tree nodes, roots not counted
    cut_tokens: int = 0  # emitted by a cycle, then dropped: a stop string or an error ended before
    accepted_lengths: list[int] = field(default_factory=list)  # [i]: cycles that accepted i draft tokens
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def count_cycle(self, num_accepted: int, num_nodes: int) -> None:
        """Counts one cycle that accepted `num_accepted` tokens of a tree of `num_nodes` nodes, root
        included."""
        self.accepted_lengths.extend([0] * (num_accepted + 1 - len(self.accepted_lengths)))
        self.accepted_lengths[num_accepted] += 1
        self.cycles += 1
        self.draft_tokens += num_nodes - 1
        self.plain_cycles += self.speculative and num_nodes == 1

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that the target confirmed."""
        return sum(i * count for i, count in enumerate(self.accepted_lengths))

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens that a pass of the target yielded on average, 1 in plain decoding; 0 without any cycle."""
        return (self.accepted_tokens + self.cycles) / self.cycles if self.cycles else 0.0

    @property
    def acceptance_per_depth(self) -> list[float]:
        """[d - 1]: of the cycles that accepted d - 1 tokens or more, the share that accepted d or more."""
        at_least = [sum(self.accepted_lengths[d:]) for d in range(len(self.accepted_lengths))]
        return [after / before for before, after in pairwise(at_least)]

    @property
    def decode_seconds(self) -> float:
        """Wall time of the cycles, the prompt's pass not included."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != "prefill")

    def add(self, other: Metrics, *, seconds: bool = True) -> None:
        """Adds the counts (and the seconds) of `other`."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.speculative |= other.speculative
        self.accepted_lengths.extend([0] * (len(other.accepted_lengths) - len(self.accepted_lengths)))
        for i, count in enumerate(other.accepted_lengths):
            self.accepted_lengths[i] += count
        if seconds:
            self.add_seconds(other.seconds)

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Adds wall time per phase."""
        for phase, value in seconds.items():
            self.seconds[phase] += value

    def to_dict(self) -> dict[str, Any]:
        """Every count and derived figure, as plain values."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "accepted_lengths": list(self.accepted_lengths),
            "seconds": dict(self.seconds),
            "accepted_tokens": self.accepted_tokens,
            "tokens_per_cycle": self.tokens_per_cycle,
            "acceptance_per_depth": self.acceptance_per_depth,
            "decode_seconds": self.decode_seconds,
        }

    def to_json(self, **options: Any) -> str:
        """`to_dict` as JSON; options go to json.dumps."""
        return json.dumps(self.to_dict(), **options)


class Clock:
    """Wall time per phase, between laps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        assert phase in PHASES
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
