# SPDX-License-Identifier: Apache-2.0
"""Refit metrics in vLLM's own `/metrics`.

The process that holds the weights is rarely the one that answers `/metrics`, so there are two ways from here to there,
both vLLM's:

- `PROMETHEUS_MULTIPROC_DIR` is set (by the user, or by vLLM for several API servers): prometheus_client itself writes
  to that directory and vLLM's registry reads all of it.
- It is not set (one API server): after each change the worker writes its metrics as text into a file named after the
  engine instance, and `RefitStatLogger`, which vLLM loads from the entry point group `vllm.stat_logger_plugins` in the
  API server, reads it at each scrape.

Every metric has the label `engine`, the data-parallel rank, as vLLM's own have.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_quads.refit import RefitReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class RefitMetrics:
    """The metrics of one engine (of one data-parallel rank). Only the first rank of an engine should hold one."""

    def __init__(self, engine: int = 0, file: Path | None = None) -> None:
        """engine: data-parallel rank; file: where to leave a text copy for an API server in another process."""
        self._engine = str(engine)
        self._file = file
        self._fingerprint: str | None = None
        self._metrics = _collectors(engine)
        # All outcomes exist from the start, so that a rate over them does not miss the first one.
        for outcome in ("committed", "refused", "rolled_back", "broken"):
            self._of("refit", outcome)
        self._of("version").set(0)
        if file is not None:
            _sweep(file.parent)
            atexit.register(file.unlink, missing_ok=True)
        self._publish()

    def _of(self, name: str, *labels: str) -> Any:
        return self._metrics[name].labels(self._engine, *labels)

    def committed(self, report: RefitReport) -> None:
        """A refit has been swapped in."""
        for phase, seconds in report.seconds.items():
            self._of("seconds", phase).observe(seconds)
        self._of("bytes", report.payload).inc(report.bytes)
        self._of("refit", "committed").inc()
        self.serves(report.policy_version, report.fingerprint)

    def ended(self, outcome: str, reason: str) -> None:
        """A refit has not been swapped in.

        outcome: `refused` or `rolled_back` (the previous weights serve on), or `broken` (nothing serves).
        reason: `manifest`, `tensor`, `verification`, `transport` or `interrupted`.
        """
        self._of("refusals", reason).inc()
        self._of("refit", outcome).inc()
        if outcome == "broken" and self._fingerprint is not None:
            self._forget(self._fingerprint)
            self._fingerprint = None
        self._publish()

    def serves(self, policy_version: int, fingerprint: str) -> None:
        """What is serving now."""
        self._of("version").set(policy_version)
        if fingerprint != self._fingerprint:
            if self._fingerprint is not None:
                self._forget(self._fingerprint)
            self._fingerprint = fingerprint
        self._of("fingerprint", fingerprint).set(1)
        self._publish()

    def _forget(self, fingerprint: str) -> None:
        # In the multi-process mode series cannot be removed: there the old fingerprint stays, with the value 0.
        self._of("fingerprint", fingerprint).set(0)
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            self._metrics["fingerprint"].remove(self._engine, fingerprint)

    def _publish(self) -> None:
        if self._file is None:
            return
        handle, partial = tempfile.mkstemp(dir=self._file.parent, prefix=self._file.name)
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(generate_latest(_registry()))
            os.replace(partial, self._file)
        except OSError:
            Path(partial).unlink(missing_ok=True)
            raise


_COLLECTORS: dict[str, Any] | None = None
_REGISTRY: CollectorRegistry | None = None


def _registry() -> CollectorRegistry:
    """Holds QUADS' metrics alone, for the text copy."""
    global _REGISTRY
    if _REGISTRY is None:
        _REGISTRY = CollectorRegistry()
    return _REGISTRY


def _collectors(engine: int) -> dict[str, Any]:
    """One set per process, made when first needed: only then is vLLM's multi-process directory known."""
    global _COLLECTORS
    if _COLLECTORS is not None:
        return _COLLECTORS
    made = {
        "seconds": Histogram(
            "quads_refit_seconds", "Duration of one phase of a refit.", ["engine", "phase"], buckets=_SECONDS,
            registry=_registry(),
        ),
        "bytes": Counter(
            "quads_refit_bytes", "Bytes of tensors that refits brought.", ["engine", "payload"], registry=_registry()
        ),
        "refit": Counter("quads_refit", "Refits by outcome.", ["engine", "outcome"], registry=_registry()),
        "refusals": Counter(
            "quads_refit_refusals", "Refused refits by reason.", ["engine", "reason"], registry=_registry()
        ),
        "version": Gauge(
            "quads_policy_version", "Policy version that is serving.", ["engine"], multiprocess_mode="mostrecent",
            registry=_registry(),
        ),
        "fingerprint": Gauge(
            "quads_fingerprint_info", "1 for the fingerprint of the weights that are serving.",
            ["engine", "fingerprint"], multiprocess_mode="mostrecent", registry=_registry(),
        ),
    }  # fmt: skip
    for collector in made.values():
        REGISTRY.register(collector)  # an in-process engine is scraped, if at all, through this process' own exporter
    _COLLECTORS = made
    return made


def bridge_file(vllm_config: VllmConfig, rank: int) -> Path | None:
    """Text copy of one data-parallel rank for the API server; None if prometheus_client shares metrics itself."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ or not vllm_config.instance_id:
        return None
    return _bridge_files(vllm_config.instance_id).with_suffix(f".{rank}.{os.getpid()}.prom")


def _bridge_files(instance: str) -> Path:
    # The instances of data-parallel ranks are named <instance>_dp<rank> in vLLM.
    return Path(tempfile.gettempdir()) / f"quads-metrics-{instance.split('_dp')[0]}"


class _Bridge:
    """Collector of an API server: what the workers of its engine have written last."""

    def __init__(self, pattern: Path) -> None:
        self._pattern = pattern

    def files(self) -> list[Path]:
        """Files of this user's that running workers have written, one per rank."""
        found = sorted(self._pattern.parent.glob(f"{self._pattern.name}.*.prom"))
        return [f for f in found if f.stat().st_uid == os.getuid() and _is_running(int(f.suffixes[-2][1:]))]

    def describe(self) -> list[Metric]:
        """Nothing: names are known only at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families of all ranks."""
        merged: dict[str, Metric] = {}
        for file in self.files():
            for family in text_string_to_metric_families(file.read_text()):
                merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged[family.name].samples += family.samples
        yield from merged.values()

    def remove(self) -> None:
        """Delete the files, at the end of the API server."""
        for file in self._pattern.parent.glob(f"{self._pattern.name}.*.prom"):
            with contextlib.suppress(OSError):
                file.unlink()


def _sweep(directory: Path) -> None:
    """Delete what workers of this user have left that were killed."""
    for file in directory.glob("quads-metrics-*.prom"):
        with contextlib.suppress(OSError, ValueError):
            if file.stat().st_uid == os.getuid() and not _is_running(int(file.suffixes[-2][1:])):
                file.unlink()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


class RefitStatLogger(StatLoggerBase):
    """vLLM makes one per engine in the API server. It logs nothing: it puts the workers' metrics in `/metrics`."""

    _bridged: set[Path] = set()  # noqa: RUF012 (one API server may hold several data-parallel engines)

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        model = vllm_config.model_config
        if model is None or model.quantization != "quads" or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            return
        pattern = _bridge_files(vllm_config.instance_id)
        if vllm_config.instance_id and pattern not in self._bridged:
            self._bridged.add(pattern)
            bridge = _Bridge(pattern)
            REGISTRY.register(bridge)
            atexit.register(bridge.remove)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing per step."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


__all__ = ["RefitMetrics", "RefitStatLogger", "bridge_file"]
