"""Counters, gauges and histograms in Prometheus' text format. Small on purpose: one thread, no dependency.

`ServerMetrics` is the list of what this server reports; what the engine counts itself comes from its last snapshot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from headwater.serve.messages import Stats
from headwater.stores.stats import TierStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


Sample = tuple[tuple[tuple[str, str], ...], float]
"""Labels, as (name, value), and a number."""


class Metric:
    """A named family of samples. `lines` is its part of the page."""

    kind = "untyped"

    def __init__(self, name: str, help_text: str) -> None:
        self.name = name
        self.help_text = help_text

    def lines(self) -> Iterator[str]:
        """The family as Prometheus reads it."""
        yield f"# HELP {self.name} {_escaped(self.help_text)}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self._samples()

    def _samples(self) -> Iterator[str]:
        raise NotImplementedError


class Counter(Metric):
    """A number that only grows, one for each combination of label values."""

    kind = "counter"

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> None:
        super().__init__(name, help_text)
        self._labels = labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, amount: float = 1, *values: str) -> None:
        """Count `amount` for these label values. They must come from a small set: each makes a series."""
        assert len(values) == len(self._labels), f"{self.name} has labels {self._labels}"
        self._values[values] = self._values.get(values, 0) + amount

    def _samples(self) -> Iterator[str]:
        for values, number in self._values.items():
            yield f"{self.name}{_labels(zip(self._labels, values, strict=True))} {_number(number)}"


class Reading(Metric):
    """Numbers that someone else keeps, each with its labels: read when the page is made."""

    def __init__(self, name: str, help_text: str, kind: str, read: Callable[[], Iterable[Sample]]) -> None:
        super().__init__(name, help_text)
        self.kind = kind
        self._read = read

    def _samples(self) -> Iterator[str]:
        for labels, number in self._read():
            yield f"{self.name}{_labels(labels)} {_number(number)}"


class Info(Metric):
    """Facts as labels of a constant 1."""

    kind = "gauge"

    def __init__(self, name: str, help_text: str, facts: dict[str, str]) -> None:
        super().__init__(name, help_text)
        self._facts = facts

    def _samples(self) -> Iterator[str]:
        yield f"{self.name}{_labels(self._facts.items())} 1"


class Histogram(Metric):
    """How observations are spread over fixed buckets."""

    kind = "histogram"

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...]) -> None:
        super().__init__(name, help_text)
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one observation (or several equal ones). A bucket includes its upper bound."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def _samples(self) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{_number(bound)}"}} {total}'
        yield f"{self.name}_sum {_number(self._sum)}"
        yield f"{self.name}_count {total}"


_M = TypeVar("_M", bound=Metric)


class ServerMetrics:
    """Everything on the /metrics page."""

    def __init__(self, stats: Callable[[], Stats], facts: dict[str, str]) -> None:
        self._families: list[Metric] = []
        self._engine(stats)
        self._add(Info("headwater_server_info", "What is running.", facts))
        self.http_requests = self._add(
            Counter("headwater_http_requests_total", "HTTP requests, by path and status.", ("path", "status"))
        )
        self.sequences = self._add(
            Counter(
                "headwater_sequences_total",
                "Generated sequences, by how they ended: stop, length, abort (client gone) or error.",
                ("outcome",),
            )
        )
        self.prompt_tokens = self._add(Counter("headwater_prompt_tokens_total", "Tokens of prompts that were begun."))
        self.cached_tokens = self._add(
            Counter("headwater_cached_prompt_tokens_total", "Of those, tokens whose KV was already there.")
        )
        self.generated_tokens = self._add(Counter("headwater_generated_tokens_total", "Tokens generated."))
        self.first_token_s = self._add(
            Histogram(
                "headwater_time_to_first_token_seconds",
                "From the request's arrival to its first token.",
                FIRST_TOKEN_BUCKETS_S,
            )
        )
        self.inter_token_s = self._add(
            Histogram(
                "headwater_inter_token_seconds", "Between one token of a sequence and the next.", INTER_TOKEN_BUCKETS_S
            )
        )
        self.sequence_s = self._add(
            Histogram("headwater_sequence_seconds", "From the request's arrival to the end.", REQUEST_BUCKETS_S)
        )

    def render(self) -> bytes:
        """The page."""
        return "".join(f"{line}\n" for family in self._families for line in family.lines()).encode()

    def _add(self, metric: _M) -> _M:
        self._families.append(metric)
        return metric

    def _engine(self, stats: Callable[[], Stats]) -> None:
        gauges: list[tuple[str, str, Callable[[Stats], float]]] = [
            ("requests_running", "Sequences that the engine works on.", lambda s: s.num_running),
            ("requests_waiting", "Sequences that wait for room.", lambda s: s.num_waiting),
            ("kv_pages", "Pages of the KV cache.", lambda s: s.num_pages),
            ("kv_pages_used", "Pages that running sequences need.", lambda s: s.num_used_pages),
            ("kv_pages_cached", "Pages that only the prefix cache keeps.", lambda s: s.num_cached_pages),
        ]
        counters: list[tuple[str, str, Callable[[Stats], float]]] = [
            ("preemptions_total", "Sequences put back to make room.", lambda s: s.num_preemptions),
            ("prefix_cache_queried_tokens_total", "Prompt tokens looked up.", lambda s: s.num_prompt_tokens),
            ("prefix_cache_hit_tokens_total", "Prompt tokens found.", lambda s: s.num_cached_tokens),
            ("engine_steps_total", "Steps of the engine.", lambda s: s.num_steps),
            ("pool_asked_tokens_total", "Tokens looked up in the pool.", lambda s: s.pool_asked_tokens),
            ("pool_matched_tokens_total", "Of those, tokens that the pool had.", lambda s: s.pool_matched_tokens),
            ("pool_loaded_tokens_total", "Of those, tokens that came from there.", lambda s: s.pool_loaded_tokens),
            ("pool_wait_seconds_total", "Time that requests waited for loads.", lambda s: s.pool_wait_seconds),
            ("pool_loaded_bytes_total", "KV brought from the pool, by rank 0.", lambda s: s.pool_loaded_bytes),
            ("pool_saved_bytes_total", "KV stored in the pool, by rank 0.", lambda s: s.pool_saved_bytes),
            ("pool_load_seconds_total", "Time that moving them took.", lambda s: s.pool_load_seconds),
            ("pool_dropped_chunks_total", "Chunks not saved: too slow, or failed.", lambda s: s.pool_dropped_chunks),
            ("pool_damaged_chunks_total", "Chunks that did not verify.", lambda s: s.pool_damaged_chunks),
        ]
        for kind, rows in (("gauge", gauges), ("counter", counters)):
            for name, help_text, read in rows:
                self._add(Reading(f"headwater_{name}", help_text, kind, _reader(stats, read)))
        tier_gauges: list[tuple[str, str, Callable[[TierStats], float]]] = [
            ("usable", "1; 0 while its circuit breaker is open.", lambda t: t.breaker == "closed"),
            ("waiting_chunks", "Chunks that this server is to copy there.", lambda t: t.waiting),
        ]
        tier_counters: list[tuple[str, str, Callable[[TierStats], float]]] = [
            ("breaker_trips_total", "How often the breaker opened.", lambda t: t.breaker_trips),
            ("hits_total", "Pieces of chunks that rank 0 read there.", lambda t: t.hits),
            ("hit_bytes_total", "Their bytes.", lambda t: t.hit_bytes),
            ("stored_bytes_total", "Bytes stored there; in the first tier by all servers.", lambda t: t.stored_bytes),
            ("failed_total", "Operations that failed.", lambda t: t.failed),
            ("damaged_total", "Chunks that did not verify there.", lambda t: t.damaged),
        ]
        for kind, of_tiers in (("gauge", tier_gauges), ("counter", tier_counters)):
            for name, help_text, of_tier in of_tiers:
                self._add(Reading(f"headwater_tier_{name}", help_text, kind, _tier_reader(stats, of_tier)))


def _reader(stats: Callable[[], Stats], read: Callable[[Stats], float]) -> Callable[[], list[Sample]]:
    return lambda: [((), read(stats()))]


def _tier_reader(stats: Callable[[], Stats], read: Callable[[TierStats], float]) -> Callable[[], list[Sample]]:
    return lambda: [((("tier", tier.url),), read(tier)) for tier in stats().tiers]


def _labels(pairs: Iterable[tuple[str, str]]) -> str:
    text = ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in pairs)
    return f"{{{text}}}" if text else ""


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
