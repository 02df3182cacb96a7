"""A stand-in for the device that the benchmarks' GPU parts time on."""

from __future__ import annotations

from types import SimpleNamespace


class StandIn:
    """A device whose time goes on by a millisecond with every call that a graph makes."""

    l2_bytes = 1000

    def __init__(self, works=True):
        self.now, self.log, self.works = 0.0, [], works

    def backlog(self):
        self.log.append("backlog")

    def flush(self):
        self.log.append("flush")

    def synchronize(self):
        self.log.append("synchronize")

    def event(self):
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def capture(self, calls):
        def replay():
            self.log.append("replay")
            self.now += len(calls)
            if self.works:
                calls[-1]()

        for call in calls:
            call()
        return replay
