# SPDX-License-Identifier: Apache-2.0
"""`QuadsConfig`: what vLLM holds of a `quads` model. Decides per layer, and knows the engine's resolved contract."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_quads.checkpoint import verify_headers
from vllm_quads.checkpoint.disk_names import disk_name
from vllm_quads.compensation import CompensationState, uses_blocks
from vllm_quads.nvfp4 import (
    ActivationGlobalScale,
    Centering,
    CheckpointError,
    Contract,
    ContractError,
    QuantizedSet,
    RefitError,
    Scheme,
    WeightGlobalScale,
    canonical_name,
    expand,
)
from vllm_quads.plugin import compat
from vllm_quads.plugin.backend_choice import choose_backend
from vllm_quads.plugin.linear import DenseEmbeddingMethod, DenseLinearMethod, QuadsLinearMethod, full_rows
from vllm_quads.plugin.loading import PackedLoader
from vllm_quads.plugin.moe import QuadsMoEMethod
from vllm_quads.plugin.parameters import Matrix
from vllm_quads.plugin.reloads import Reloads
from vllm_quads.plugin.runtime import LayerRuntime
from vllm_quads.plugin.source import Source, parse, unquantized

logger = init_logger("vllm.quads")

_READS_SAFETENSORS = ("auto", "hf", "safetensors", "fastsafetensors")
OPTIONS_KEY = "quads"
"""Key of the user's options in vLLM's `--additional-config`."""
STATISTICS_KEY = "quads_statistics"
"""Key of a switch there: captured CUDA graphs shall be able to gather error statistics."""


class QuadsConfig(QuantizationConfig):
    """One per engine. Parsed from the checkpoint; bound to the engine when its model is built."""

    def __init__(self, source: Source | None = None) -> None:
        super().__init__()
        self.source = source or unquantized()
        self.policy_version = 0
        """Version of the weights that are serving, as counted by the trainer."""
        self._refusal: str | None = None
        self.runtimes: dict[str, LayerRuntime] = {}
        """Runtime of every quantized layer of this rank."""
        self.reloads = Reloads(self.runtimes)
        """vLLM's own reloads of this engine."""
        self.weights: dict[str, tuple[int, int]] = {}
        """Canonical name -> (N, K) of every linear, expert and embedding of the model."""
        self.quantized: QuantizedSet | None = None
        self.sensitivities: dict[str, float] = {}
        """Site sensitivities of the last calibration or push."""
        self._contract: Contract | None = None
        self._model: tuple[str, str | None] = ("", None)
        self._model_type = ""
        self._num_layers: int | None = None
        self._dummy = False
        self._captures = False
        self._graph_statistics = False
        self._verified = False
        self._act_dtype: torch.dtype | None = None
        self._hook: Any = None

    # -- what vLLM asks of the class -----------------------------------------------------------------------------

    def get_name(self) -> str:
        return "quads"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuadsConfig:
        return cls(parse(config))

    @classmethod
    def from_config_dict_json(cls, text: str) -> QuadsConfig:
        """For `hf_overrides={"quantization_config_dict_json": ...}` on an unquantized checkpoint."""
        return cls(Source("bf16", Contract.from_dict(json.loads(text))))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Serve ModelOpt and compressed-tensors NVFP4 checkpoints if the user asked for `quads`, and only then."""
        if user_quant != "quads":
            return None
        parse(hf_quant_cfg)  # refuses other schemes by name
        return "quads"

    # -- binding to an engine ------------------------------------------------------------------------------------

    @property
    def contract(self) -> Contract:
        """The contract of this engine: the checkpoint's with the user's options."""
        if self._contract is None:
            raise ContractError("the quads config is not bound to a model yet")
        return self._contract

    def replace_contract(self, contract: Contract) -> None:
        """Switch to a contract with the same weights (see `VllmEngine.set_activation`)."""
        if contract == self.contract:
            return
        self._refuse_under_graphs("keeps the options that its graphs were captured with")
        if needs_input_scales(contract):
            for runtime in self.runtimes.values():
                if not runtime.loader.has_input_scales():
                    name = runtime.loader.matrices[0].name
                    raise ContractError(
                        f"activation.global_scale: 'static' needs the input_scale of {name}, which the checkpoint of "
                        f"this engine does not have"
                    )
        self._contract = contract
        for runtime in self.runtimes.values():
            runtime.state_changed()

    @property
    def refusal(self) -> str | None:
        """Why no forward pass may run (weights of two policies, or none), or None."""
        return self.reloads.refusal if self._refusal is None else self._refusal

    @refusal.setter
    def refusal(self, reason: str | None) -> None:
        """None: the weights of this rank are those of one policy."""
        if reason is None:
            self.reloads.replaced()
        self._refusal = None if reason == self.reloads.refusal else reason

    def require_servable(self) -> None:
        """Raise RefitError if a refit is under way, or has failed and left no weights that could serve."""
        refusal = self.refusal
        if refusal is not None:
            self.refused()
            raise RefitError(f"this engine cannot serve: {refusal}")

    def refused(self) -> None:
        """A forward pass has been refused, for whatever reason: its requests end with it, see `give_up_requests`."""
        compat.give_up_requests()

    def collect(self, on: bool) -> None:
        """Start or stop gathering statistics in every layer. Raises ContractError where captured graphs would not."""
        if on and self._captures and not self._graphs_gather():
            self._refuse_under_graphs(
                "gathers no statistics in them: either its contract has no use for any (neither appended blocks nor "
                f"centring), or it was started without additional_config={{{STATISTICS_KEY!r}: True}}"
            )
        for runtime in self.runtimes.values():
            runtime.collect(on)

    def _graphs_gather(self) -> bool:
        """True if captured graphs hold the kernel that gathers statistics: on request (it costs 1 to 2 µs a layer even
        while it is switched off), where the contract has a use for them."""
        contract = self.contract
        useful = uses_blocks(contract) or contract.activation.centering is not Centering.NONE
        return self._graph_statistics and contract.scheme is Scheme.W4A4 and useful

    def _refuse_under_graphs(self, why: str) -> None:
        if self._captures:
            raise ContractError(f"this engine replays captured CUDA graphs and {why}; start it with enforce_eager=True")

    def _refuse_to_capture_reference(self, prefix: str) -> None:
        """Raise ContractError if CUDA graphs are captured and this layer runs the torch reference, which reads token
        counts on the host and moves its operands at a refit."""
        if not self._captures:
            return
        choice = choose_backend(torch.get_default_device())
        why = None
        if choice.name == "torch":
            why = choice.reason
        elif self._act_dtype is torch.float32:
            why = "the fused kernels take BF16 and FP16 only, and dtype float32 runs the torch reference"
        if why is not None:
            raise ContractError(
                f"{prefix}: cannot be captured into CUDA graphs ({why}); start with --enforce-eager "
                f"(enforce_eager=True), or keep it in BF16 (`ignore`) where the checkpoint allows that"
            )

    def _bind(self) -> None:
        if self._contract is not None:
            return
        vllm_config = get_current_vllm_config()
        extra = vllm_config.additional_config
        options = extra.get(OPTIONS_KEY, {}) if isinstance(extra, Mapping) else {}
        if not isinstance(options, Mapping):
            raise ContractError(f"additional_config['quads']: is {options!r}, expected an object with contract options")
        model_config = vllm_config.model_config
        self._model = (model_config.model, model_config.revision)
        load_format = str(vllm_config.load_config.load_format)
        info = None
        if load_format in _READS_SAFETENSORS and Path(model_config.model).is_dir():
            info = verify_headers(model_config.model)
            if info.contract is not None:  # what the files hold is a better witness than a foreign ignore list
                self.source = Source(self.source.format, info.contract)
        contract = self.source.with_options(options)
        if info is not None:
            chosen = contract.resolve(info.weights, info.num_layers)
            if self.source.packed:
                chosen.require_equal(info.quantized, "contract", "checkpoint")
            self._verified = True
        text_config = model_config.hf_text_config
        self._model_type = str(getattr(text_config, "model_type", ""))
        self._num_layers = getattr(text_config, "num_hidden_layers", None)
        self._dummy = load_format == "dummy"
        self._captures = compat.captures_graphs(vllm_config)
        self._graph_statistics = isinstance(extra, Mapping) and bool(extra.get(STATISTICS_KEY, False))
        self._act_dtype = model_config.dtype
        self._contract = contract
        compat.default_weight_transfer(vllm_config, "quads")
        if compat.is_cpu():
            self._hook = register_module_module_registration_hook(self._keep_plain)

    def _keep_plain(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        """Module registration hook while the model is built: routers that vLLM builds without a quantization config
        get the plain CPU method too, or no refit could reach them."""
        config = get_current_vllm_config_or_none()
        if config is None or config.quant_config is not self or not isinstance(submodule, LinearBase):
            return
        if type(submodule.quant_method) is UnquantizedLinearMethod:
            submodule.quant_method = DenseLinearMethod()

    # -- per layer -----------------------------------------------------------------------------------------------

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of one layer; raises ContractError for layers that the contract may not select."""
        self._bind()
        if isinstance(layer, RoutedExperts):
            if not self._decide(expert_shapes(layer, prefix)):
                return None
            self._refuse_to_capture_reference(prefix)
            return QuadsMoEMethod(self, prefix, layer)
        if isinstance(layer, LinearBase):
            shapes = self._linear_shapes(layer, prefix)
            if self._decide(shapes):
                self._refuse_to_capture_reference(prefix)
                return QuadsLinearMethod(self, prefix, list(shapes))
            return DenseLinearMethod(self)
        if isinstance(layer, VocabParallelEmbedding):
            self._decide({canonical_name(prefix): (layer.org_vocab_size, layer.embedding_dim)})
            return DenseEmbeddingMethod(self)
        return None

    def _linear_shapes(self, layer: LinearBase, prefix: str) -> dict[str, tuple[int, int]]:
        parts = expand(prefix)
        rows = full_rows(layer, [layer.output_size])
        if len(parts) != len(rows):  # a fusion that canonical names do not know
            head, _, leaf = canonical_name(prefix).rpartition(".")
            parts = [f"{head}.{part}" for part in self.packed_modules_mapping.get(leaf, [leaf])]
        if len(parts) != len(rows):
            return {canonical_name(prefix): (layer.output_size, layer.input_size)}
        return {part: (n, layer.input_size) for part, n in zip(parts, rows, strict=True)}

    def _decide(self, shapes: dict[str, tuple[int, int]]) -> bool:
        """True if all of these weights, which vLLM multiplies with as one, are quantized; False if none is."""
        self.weights |= shapes
        selected = {n: self.contract.selects(n, self._num_layers) for n in shapes}
        if not any(selected.values()):
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignore patterns are judged against the whole model, in `model_loaded`
            # Refuses routers, embeddings and lm_head, K that blocks do not divide, and halves of w13 or qkv.
            replace(self.contract, keep_last_layers=0).resolve(shapes)
        if not all(selected.values()):
            first, other = (next(n for n, s in selected.items() if s is want) for want in (True, False))
            raise ContractError(
                f"{first} is quantized but {other} is not; the rollout multiplies with both as one matrix or one "
                f"grouped GEMM, so select both or neither"
            )
        return True

    def make_loader(self, layer: nn.Module, groups: list[list[Matrix]]) -> PackedLoader:
        """The loader of a quantized layer."""
        frozen = self.contract.weight_global_scale is not WeightGlobalScale.LIVE
        loader = PackedLoader(layer, groups, self.disk_name, frozen=frozen)
        loader.awaits_placeholders = compat.awaits_placeholders()
        loader.on_failed = self.reloads.failed
        return loader

    def disk_name(self, name: str) -> str:
        """How checkpoints of this model spell a canonical tensor name."""
        return disk_name(name, {"model_type": self._model_type})

    def add_runtime(self, key: str, runtime: LayerRuntime) -> None:
        """Remember the runtime of a quantized layer, and make it findable in the engine's forward passes."""
        self.runtimes[key] = runtime
        self.reloads.watch(runtime)
        compat.register_forward_layer(get_current_vllm_config(), key, runtime)

    # -- after loading -------------------------------------------------------------------------------------------

    def after_loading(self, runtime: LayerRuntime) -> None:
        """A layer has been loaded, at start or by vLLM's layerwise reload: check that nothing is missing."""
        self.model_loaded()
        if self._captures and self._graphs_gather():
            runtime.gather_in_graphs()
        if self._dummy and not runtime.loader.ever_loaded:
            runtime.loader.fill_dummy()
            runtime.hand_over()
            return
        try:
            runtime.loader.finish(need_input_scale=needs_input_scales(self.contract))
            runtime.settle_for_graphs()
            runtime.hand_over()
        except BaseException as e:
            self.reloads.failed(e)
            raise
        self.reloads.loaded(runtime)

    def model_loaded(self) -> None:
        """The whole model has been built and loaded: resolve the contract against it, and load the saved state."""
        if self.quantized is not None:
            return
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        with warnings.catch_warnings():
            if self._verified:  # the checkpoint's own names have already been told about
                warnings.simplefilter("ignore")
            self.quantized = self.contract.resolve(self.weights, self._num_layers)
        state = CompensationState.load(_state_directory(*self._model)) if not self._dummy else None
        if state is not None:
            self.set_compensation(state)
        device = next((p.device for r in self.runtimes.values() for p in r.buffers()), torch.device("cpu"))
        choice = choose_backend(device)
        logger.info(
            "quads: %d of %d weights in NVFP4 (%s), from a %s checkpoint; backend %s (%s); contract %s",
            len(self.quantized),
            len(self.weights),
            self.contract.scheme.value,
            self.source.format,
            choice.name,
            choice.reason,
            self.contract.digest(),
        )

    def check_compensation(self, state: CompensationState) -> None:
        """Raise CheckpointError for state of a site that this model does not have, or of another shape."""
        sites = {name for r in self.runtimes.values() for name in r.specs}
        unknown = sorted(set(state.sites) - sites)
        if unknown:
            raise CheckpointError(
                f"compensation state names {unknown[0]}, which is no quantized site of this model (sites look like "
                f"{next(iter(sorted(sites)), '(none)')!r}); calibrate again with `quads quantize --calibrate`"
            )
        for runtime in self.runtimes.values():
            runtime.check_state(state.sites)

    def set_compensation(self, state: CompensationState) -> None:
        """Take over compensation state. Raises CheckpointError as `check_compensation` does; nothing changes then."""
        self.check_compensation(state)
        for runtime in self.runtimes.values():
            runtime.set_state(state.sites)
        self.sensitivities = dict(state.sensitivities)

    def compensation(self) -> CompensationState:
        """The state that is serving (of this rank), copied."""
        sites = {
            name: type(s)(s.center.cpu().clone(), s.blocks.cpu().clone())
            for r in self.runtimes.values()
            for name, s in r.states.items()
        }
        return CompensationState(sites, dict(self.sensitivities))


def expert_shapes(layer: RoutedExperts, prefix: str) -> dict[str, tuple[int, int]]:
    """Canonical name -> (N, K) of every matrix of a MoE layer, over all ranks."""
    moe = layer.moe_config
    hidden, inter = moe.hidden_dim, moe.intermediate_size_per_partition * moe.moe_parallel_config.tp_size
    gate_up = dict.fromkeys(expand(f"{prefix}.gate_up_proj", layer.global_num_experts), (inter, hidden))
    return gate_up | dict.fromkeys(expand(f"{prefix}.down_proj", layer.global_num_experts), (hidden, inter))


def needs_input_scales(contract: Contract) -> bool:
    """True if the contract takes activation scales from the checkpoint."""
    return contract.scheme is Scheme.W4A4 and contract.activation.global_scale is ActivationGlobalScale.STATIC


def _state_directory(model: str, revision: str | None) -> Path:
    """Where the checkpoint's files are: the directory itself, or the snapshot of a hub model."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else Path(model)
