"""Metrics for Prometheus: counts of the service as it has them, and histograms of times."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from jaxlm.inference.service import EngineService, ServiceObserver

_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_NEXT_TOKEN_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_REQUEST_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class ServerMetrics(ServiceObserver):
    """The metrics of one server, in a registry of its own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self):
        self._registry = CollectorRegistry()
        self._first_token = self._histogram("time_to_first_token_seconds", "from the queue on", _FIRST_TOKEN_S)
        self._next_token = self._histogram("inter_token_latency_seconds", "between two tokens of a text", _NEXT_TOKEN_S)
        self._duration = self._histogram("request_duration_seconds", "of answers", _REQUEST_S, ["route"])
        self._answers = Counter(
            "jaxlm_http_requests", "Answers by HTTP status; 499 left before theirs.", ["route", "status"],
            registry=self._registry,
        )  # fmt: skip

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...], labels: tuple | list = ()) -> Histogram:
        return Histogram(f"jaxlm_{name}", f"Seconds {what}.", labels, buckets=buckets, registry=self._registry)

    def watch(self, service: EngineService) -> None:
        """Show the counts of a service."""
        self._registry.register(_ServiceCollector(service))

    def first_token(self, seconds: float) -> None:
        """Take a time to a first token."""
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Take a time between two tokens."""
        self._next_token.observe(seconds)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Take the end of an answer."""
        self._answers.labels(route, str(status)).inc()
        self._duration.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _ServiceCollector(Collector):
    """The counts of a service, read when they are asked for."""

    def __init__(self, service: EngineService):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        now = self._service.statistics()
        gauges = {
            "requests_waiting": (now.waiting, "Requests in the queue."),
            "requests_running": (now.running, "Requests under way."),
            "slots": (self._service.engine.settings.slots, "The most requests under way."),
            "pages": (now.pages, "Pages of keys and values."),
            "pages_held": (now.pages_held, "Pages of requests under way."),
            "pages_cached": (now.pages_cached, "Pages of prefixes that may be found again, held by no request."),
            "step_seconds": (now.step_seconds, "Seconds of the last step."),
        }
        counters = {
            "preemptions": (now.preemptions, "Times that a request lost its pages to others."),
            "draft_tokens": (now.drafted, "Drafts of next tokens that steps have read."),
            "accepted_draft_tokens": (now.accepted, "Drafts that were drawn in their places."),
            "steps": (now.steps, "Steps of the engine."),
        }
        for name, (value, meaning) in gauges.items():
            yield GaugeMetricFamily(f"jaxlm_{name}", meaning, value)
        for name, (value, meaning) in counters.items():
            yield CounterMetricFamily(f"jaxlm_{name}", meaning, value)
        # The label of the model itself is empty, which is the same to Prometheus as none.
        by_adapter = {
            "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
            "cached_prompt_tokens": ("cached_tokens", "Tokens of prompts that were found in the cache."),
            "generated_tokens": ("tokens", "Tokens drawn."),
        }
        labels = ["adapter"] * (len(now.texts) > 1)
        for name, (count, meaning) in by_adapter.items():
            family = CounterMetricFamily(f"jaxlm_{name}", meaning, labels=labels)
            for adapter, counts in now.texts.items():
                family.add_metric([adapter or ""] * len(labels), getattr(counts, count))
            yield family
        by_group = {
            "group_found_prompt_tokens": ("found", "Tokens of prompts that the cache of a group of layers had."),
            "group_lacked_prompt_tokens": (
                "lacked",
                "Tokens of prompts that were read again because this group alone lacked them.",
            ),
        }
        for name, (count, meaning) in by_group.items():
            family = CounterMetricFamily(f"jaxlm_{name}", meaning, labels=["group"])
            for group, hit in now.group_hits.items():
                family.add_metric([group], getattr(hit, count))
            yield family
        meaning = "Texts that have ended, by the reason."
        ends = CounterMetricFamily("jaxlm_texts", meaning, labels=[*labels, "finish_reason"])
        for adapter, counts in now.texts.items():
            for reason, count in counts.ended.items():
                ends.add_metric([*[adapter or ""] * len(labels), reason], count)
        yield ends
