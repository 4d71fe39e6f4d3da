# SPDX-License-Identifier: Apache-2.0
"""What a quantized layer needs of its engine's configuration. Lets layers be written without knowing `config`."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from vllm_quads.nvfp4 import Contract
from vllm_quads.plugin.loading import PackedLoader
from vllm_quads.plugin.parameters import Matrix


class LayerHost(Protocol):
    """Implemented by `config.QuadsConfig`, one per engine."""

    @property
    def contract(self) -> Contract:
        """The engine's contract; its scheme, activation and compensation sections may change at run time."""

    def require_servable(self) -> None:
        """Raise RefitError if the weights are not those of one policy."""

    def refused(self) -> None:
        """A forward pass has been refused, for whatever reason."""

    def make_loader(self, layer: nn.Module, groups: list[list[Matrix]]) -> PackedLoader:
        """The loader of a quantized layer."""

    def add_runtime(self, key: str, runtime: Any) -> None:
        """Remember the runtime of a quantized layer."""

    def after_loading(self, runtime: Any) -> None:
        """A layer has been loaded: check that nothing is missing."""

    def model_loaded(self) -> None:
        """The whole model has been built and loaded."""
