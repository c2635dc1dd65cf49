"""The router's `/metrics`: how requests are shared, and, if it is asked to, what its replicas publish. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rorqual.server.http_client import HttpError
from rorqual.server.router.policy import REASONS, Balancer, Replica
from rorqual.server.router.proxy import Proxy

LABEL = "replica"
_SECONDS_TO_SAY = 2.0
"""What a replica gets to publish."""


class RouterMetrics:
    """Everything that one router publishes.

    Args:
        balancer: whose choices and replicas are counted.
        proxy: that serves them.
        with_replicas: also publish what the replicas do, each under its name.
    """

    def __init__(self, balancer: Balancer, proxy: Proxy, *, with_replicas: bool) -> None:
        self._balancer, self._proxy, self._with_replicas = balancer, proxy, with_replicas

    async def text(self) -> bytes:
        """As Prometheus reads it."""
        registry = CollectorRegistry()
        registry.register(_Given(self._own()))
        if self._with_replicas:
            there = [replica for replica in self._balancer.replicas if replica.is_healthy]
            texts = await asyncio.gather(*(_published(replica) for replica in there))
            registry.register(_Given(_merged(dict(zip((r.url for r in there), texts, strict=True)))))
        return generate_latest(registry)

    def _own(self) -> Iterator[Metric]:
        replicas = self._balancer.replicas
        for name, documentation, values in (
            ("num_requests_running", "Requests sent to a replica.", [r.num_running for r in replicas]),
            ("replica_healthy", "Whether a replica takes requests.", [int(r.is_healthy) for r in replicas]),
            ("prefix_index_blocks", "Blocks of prompts remembered.", [len(r.prefixes) for r in replicas]),
        ):
            gauge = GaugeMetricFamily(f"rorqual:router_{name}", documentation, labels=[LABEL])
            for replica, value in zip(replicas, values, strict=True):
                gauge.add_metric([replica.url], value)
            yield gauge
        for name, documentation, values in (
            (
                "errors",
                "Requests that a replica was lost for, or answered 500 or above.",
                [r.num_errors for r in replicas],
            ),
            ("retries", "Those that another replica got then.", [r.num_retries for r in replicas]),
        ):
            counter = CounterMetricFamily(f"rorqual:router_{name}", documentation, labels=[LABEL])
            for replica, value in zip(replicas, values, strict=True):
                counter.add_metric([replica.url], value)
            yield counter
        requests = CounterMetricFamily(
            "rorqual:router_requests",
            "Requests sent to a replica, by what chose it: the response or session they belong to, a prefix, its load.",
            labels=[LABEL, "chosen_by"],
        )
        for replica in replicas:
            for reason in REASONS:
                requests.add_metric([replica.url, reason], replica.choices[reason])
        yield requests
        yield CounterMetricFamily(
            "rorqual:router_unserved_requests",
            "Requests that no replica was there for.",
            value=self._proxy.num_unserved,
        )


class _Given(Collector):
    """Metrics that are there already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics

    def describe(self) -> Iterable[Metric]:
        return ()


async def _published(replica: Replica) -> str:
    """What a replica publishes; nothing if it does not."""
    try:
        async with asyncio.timeout(_SECONDS_TO_SAY), replica.client.request("GET", "/metrics") as answer:
            return (await answer.body()).decode() if answer.status == 200 else ""
    except (HttpError, TimeoutError, UnicodeDecodeError):
        return ""


def _merged(texts: dict[str, str]) -> Iterator[Metric]:
    """The metrics of several replicas, each sample with the name of its own."""
    merged: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [sample._replace(labels={LABEL: name, **sample.labels}) for sample in family.samples]
    yield from merged.values()
