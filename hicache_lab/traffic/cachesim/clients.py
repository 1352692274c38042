"""A closed loop of clients: who sends the trace's next request, and when."""

from __future__ import annotations

from collections import deque


class Clients:
    """Clients that wait for an answer before they send the trace's next request.

    Time is counted in the scheduler's steps. An answer leaves at the end of a step and the scheduler looks for new
    requests before each step, so whatever a client needs to read an answer and send again costs it at least the step
    that starts meanwhile.

    Args:
        requests: how many there are, sent in the order 0, 1, 2, …
        clients: how many of them are under way at most.
        turnaround_steps: steps that begin between an answer and its client's next request; 0: none.
    """

    def __init__(self, requests: int, clients: int, turnaround_steps: int) -> None:
        self.turnaround_steps = turnaround_steps
        self._requests = requests
        self._next = 0
        # when each idle client sends again; answers come in order of time, so these are sorted
        self._sending: deque[int] = deque([0] * min(clients, requests))

    @property
    def unsent(self) -> int:
        """Requests that no client has sent yet."""
        return self._requests - self._next

    @property
    def next_sending(self) -> int | None:
        """The step before which the next request arrives; None while no client is idle, and after the last request."""
        return self._sending[0] if self._sending and self.unsent else None

    def sent(self, now: int, *, idle: bool) -> range:
        """The requests that have arrived before step ``now``, each given once.

        Args:
            now: the step that is about to start.
            idle: the scheduler has nothing to do. It then starts with the first request that arrives: those that are
                sent at the same time are parsed one after the other and find it busy.
        """
        first = self._next
        while self._next < self._requests and self._sending and self._sending[0] <= now:
            self._sending.popleft()
            self._next += 1
            if idle:
                break
        return range(first, self._next)

    def answered(self, now: int) -> None:
        """A request's answer left before step ``now``."""
        self._sending.append(now + self.turnaround_steps)
