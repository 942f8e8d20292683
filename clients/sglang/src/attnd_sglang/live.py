"""The requests that run: what they still have to tell attnd, and rows that must not fail.

Knows nothing of SGLang. Nothing is sent before the next step needs it, so that ends, token ids and
truncations of a step travel in one message; only the last request that ends is told at once, as no
step may follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnd.serving.requests import Opened, Requests, Row, Step, Told


class LostError(RuntimeError):
    """attnd has lost what a row reads."""


class SureRow(Row):
    """SGLang can't be told to compute a row again: it is computed, or the step raises."""

    __slots__ = ()

    @property
    def may_fail(self) -> bool:
        return False


class Live:
    """The sequences of an engine's requests, from admission to release."""

    def __init__(self, requests: Requests):
        self.requests = requests
        self._adapters: dict[str, int | None] = {}  # None: the request does not share
        self._told: list[Told] = []
        self._ended: set[str] = set()

    @property
    def block_tokens(self) -> int:
        return self.requests.pool.spec.block_tokens

    def matched(self, name: str, adapter: int | None) -> None:
        """The request may be admitted next. adapter: what its K and V depend on; None: not shared."""
        self._adapters[name] = adapter

    def n_cached(self, tokens: Sequence[int], adapter: int) -> int:
        """How many of the tokens attnd has now; one is always left to be computed."""
        return self.requests.pool.probe(tokens, adapter=adapter).cached_tokens

    def open_with(self, name: str, tokens: Sequence[int], n: int) -> bool:
        """Opens the request's sequence with the first n tokens. False: they are gone meanwhile."""
        self.flush()
        self.requests.begin((), [Opened(name, tokens[: n + 1], n, self._adapters[name] or 0)], ())
        held = self.requests.held.get(name)  # None: attnd began anew
        if held is not None and held.n_tokens == n:
            return True
        self.requests.begin([name], (), ())
        return False

    def is_shared(self, name: str) -> bool:
        return self._adapters.get(name) is not None

    def tell(self, name: str, tokens: Sequence[int]) -> None:
        """All ids so far of a running request."""
        held = self.requests.held.get(name)
        if held is not None and self.is_shared(name) and self._may_tell(held.n_told, len(tokens)):
            self._told.append(Told(name, tokens))

    def wants_tokens(self, name: str, n: int) -> bool:
        """Whether a block of the request's has become full since ids were told last."""
        held = self.requests.held.get(name)
        return held is not None and self.is_shared(name) and self._may_tell(held.n_told, n)

    def _may_tell(self, n_told: int, n: int) -> bool:
        return n // self.block_tokens > n_told // self.block_tokens

    def end(self, name: str) -> None:
        self._adapters.pop(name, None)
        self._ended.add(name)
        if self._ended >= self.requests.held.keys():
            self.flush()

    def forget(self, name: str) -> None:
        """A request that was matched, and never admitted."""
        if name not in self.requests.held:
            self._adapters.pop(name, None)

    def flush(self) -> None:
        self._begin([])

    def _begin(self, opened: list[Opened]) -> None:
        ended, told = self._ended, self._told
        self._ended, self._told = set(), []
        if ended or told or opened:
            self.requests.begin(ended, opened, told)

    def step(self, rows: Sequence[tuple[str, int, int]]) -> Step:
        """A step of rows (request, position, number of tokens), one behind the other.

        Raises LostError where attnd has lost what a row reads, RuntimeError where its position leaves
        a gap.
        """
        all_rows, opened, start = [], [], 0
        for name, pos, n in rows:
            all_rows.append(SureRow(name, pos, n, start, True))
            start += n
            if pos == 0 and (name not in self.requests.held or name in self._ended):
                opened.append(Opened(name, (), 0, self._adapters.get(name) or 0))
        self._begin(opened)
        step = self.requests.step(list(all_rows))
        self.check(step, rows)
        return step

    def check(self, step: Step, rows: Sequence[tuple[str, int, int]]) -> None:
        """Raises LostError unless all of a step's rows are still computed."""
        if len(step.rows) != len(rows):
            lost = {name for name, _, _ in rows} - {r.request for r in step.rows}
            raise LostError(f"attnd has lost {len(lost)} running requests ({min(lost)}, ...)")

    def lost(self, rows: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        """Those of a pass's rows of which attnd has nothing any more, to be computed again.

        Raises RuntimeError for one whose K and V depend on more than its token ids.
        """
        lost = [r for r in rows if r[0] not in self.requests.held]
        for name, _, _ in lost:
            if not self.is_shared(name):
                raise RuntimeError(
                    f"attnd has lost request {name}, which has more than token ids (images,"
                    " embeddings): SGLang can't be told to compute it again"
                )
        return lost

    def close(self) -> None:
        self.requests.close()


class Shared:
    """What the attention backend and the prefix cache, which are of one process, share."""

    def __init__(self) -> None:
        self.live: Live | None = None  # None: this engine does not use attnd
        self.reqs: dict[str, Any] = {}  # that run: SGLang's, by their ids


shared = Shared()
