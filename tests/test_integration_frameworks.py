# SPDX-License-Identifier: Apache-2.0
"""verl and NeMo-RL: adapters fit the hooks that they are written against, and what they stream arrives.

Neither framework runs here (both need Ray and GPUs). Their hooks are described in framework_hooks.json; verl's source,
where it is installed, has to agree with that.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugin_helpers import scores
from torch import nn
from trainer_models import qwen3, single_thread  # noqa: F401
from transformers import AutoModelForCausalLM

from trainer_qat import RolloutSync, prepare_qat
from trainer_qat.integrations import nemo_rl, verl
from trainer_qat.integrations.stream import WeightStream, require_fingerprint
from trainer_qat.prepare import is_prepared, state_of
from vllm_quads.nvfp4 import Contract, ContractError, MismatchError
from vllm_quads.refit import as_engine

HOOKS = json.loads((Path(__file__).parent / "framework_hooks.json").read_text())
VERL = importlib.util.find_spec("verl")


# --- signatures ------------------------------------------------------------------------------------------------------


def described(arguments: ast.arguments) -> list[str]:
    """`name` or `name=default` of each parameter, as in framework_hooks.json."""
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = [a.arg if d is None else f"{a.arg}={ast.unparse(d)}" for a, d in zip(positional, defaults, strict=True)]
    if arguments.kwonlyargs:
        found.append("*" if arguments.vararg is None else f"*{arguments.vararg.arg}")
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        found += [a.arg if d is None else f"{a.arg}={ast.unparse(d)}" for a, d in pairs]
    elif arguments.vararg is not None:
        found.append(f"*{arguments.vararg.arg}")
    return found + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else [])


def as_function(parameters: list[str]) -> inspect.Signature:
    """The signature that a list of parameters describes."""
    namespace: dict[str, Any] = {}
    exec(f"def f({', '.join(parameters)}): ...", namespace)
    return inspect.signature(namespace["f"])


def accepts(mine: Callable[..., Any], theirs: inspect.Signature) -> bool:
    """True if whatever can be called by `theirs` can be called on `mine`."""
    own = inspect.signature(mine).parameters
    catches = {p.kind for p in own.values()}
    for name, parameter in theirs.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            if inspect.Parameter.VAR_KEYWORD not in catches:
                return False
        elif name not in own and not {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= catches:
            return False
    return True


def source_class(hook: dict[str, Any]) -> ast.ClassDef:
    """A class of the installed verl, not executed."""
    assert VERL is not None
    tree = ast.parse((Path(next(iter(VERL.submodule_search_locations or []))) / hook["file"]).read_text())
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == hook["class"])


@pytest.mark.skipif(VERL is None, reason="verl is not installed: its hooks are not compared with their description")
@pytest.mark.parametrize("name", [n for n in HOOKS["verl"] if n != "version"])
def test_installed_verl_has_the_described_hooks(name: str) -> None:
    """Methods with exactly these parameters, and attributes of these names, in verl's own source."""
    hook = HOOKS["verl"][name]
    found = source_class(hook)
    functions = {n.name: n for n in found.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for method, parameters in hook["methods"].items():
        assert described(functions[method].args) == parameters, method
    attributes = {n.attr for n in ast.walk(found) if isinstance(n, ast.Attribute)}
    assert set(hook["attributes"]) <= attributes


@pytest.mark.skipif(VERL is None, reason="verl is not installed: its registries are not looked at")
def test_an_engine_for_a_vendor_goes_before_verls_own() -> None:
    """verl's real registry hands out the engine that was registered for the vendor; its rollouts are found by name."""
    space: dict[str, Any] = {"BaseEngine": object, "os": SimpleNamespace(getenv=lambda _: None)}
    space |= {"get_device_name": lambda: "cuda", "get_vendor": lambda: "nvidia"}
    exec(ast.unparse(source_class(HOOKS["verl"]["EngineRegistry"])), space)
    registry = space["EngineRegistry"]
    general, ours = type("General", (), {}), type("Ours", (), {})
    registry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"])(general)
    registry.register(model_type="language_model", backend="fsdp2", device="cuda", vendor="nvidia")(ours)
    assert registry.get_engine_cls("language_model", "fsdp2") is ours
    assert registry.get_engine_cls("language_model", "fsdp") is general
    assert VERL is not None
    rollout = (Path(next(iter(VERL.submodule_search_locations or []))) / "workers/rollout/base.py").read_text()
    assert '("vllm", "async"): "verl.workers.rollout.vllm_rollout.ServerAdapter"' in rollout


def test_adapters_accept_what_the_frameworks_call_them_with() -> None:
    """Every overridden method takes the parameters of the framework's own, by position and by name."""
    engine = verl.quads_engine(Engine, Contract())
    adapter = verl.quads_server_adapter(Adapter)
    worker = nemo_rl.quads_policy_worker(Worker)
    for mine, hook in (
        (engine, HOOKS["verl"]["FSDPEngineWithLMHead"]),
        (adapter, HOOKS["verl"]["ServerAdapter"]),
        (worker, HOOKS["nemo_rl"]["DTensorPolicyWorkerV2Impl"]),
    ):
        overridden = [m for m in hook["methods"] if m in vars(mine)]
        assert overridden
        for method in overridden:
            assert accepts(getattr(mine, method), as_function(hook["methods"][method])), method


# --- behaviour on stand-ins with the described hooks -----------------------------------------------------------------


class Engine:
    """What verl's FSDP engine is to its subclass."""

    def __init__(self, **config: Any) -> None:
        self.engine_config = SimpleNamespace(**({"strategy": "fsdp2", "forward_only": False} | config))
        self._is_lora = config.get("lora", False)
        self._qat_enabled = config.get("qat", False)
        self.is_param_offload_enabled = False
        self.module: nn.Module

    def initialize(self) -> None:
        """verl builds the module, then shards it."""
        self.module = self._build_module()

    def _build_module(self) -> nn.Module:
        return qwen3()

    def get_per_tensor_param(self, layered_summon: bool = False, base_sync_done: bool = False, **_: Any) -> Any:
        """BF16 weights under the names of the module."""
        return iter(self.module.state_dict().items()), None


class Adapter:
    """What verl's rollout adapter is to its subclass."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self._has_server, self.answers, self.asked, self.sent = True, answers, [], {}

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        """Consumes the stream."""
        self.sent = dict(weights)

    async def _execute_method(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        self.asked.append((method, args))
        return self.answers


class Worker:
    """What NeMo-RL's policy worker is to its subclass."""

    def __init__(self, config: Any, weights_path: str | None = None, **_: Any) -> None:
        self.model = qwen3()
        self.lora_enabled, self.tp_size = config.get("lora", False), config.get("tp", 1)
        self.cpu_offload = False

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Swaps weights."""
        yield


def test_verl_actor_is_prepared_and_streams_packed_weights() -> None:
    """The actor is fake-quantized before sharding and sends packed tensors; a reference engine is left alone."""
    contract = Contract(keep_last_layers=1)
    engine = verl.quads_engine(Engine, contract)()
    engine.initialize()
    assert state_of(engine.module).contract == contract
    stream, peft = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    assert peft is None
    sent = dict(stream)
    assert {name: (tuple(t.shape), t.dtype) for name, t in sent.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in stream.specs().items()
    }
    assert sent["model.layers.0.mlp.experts.0.up_proj.weight"].dtype == torch.uint8
    assert sent["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.bfloat16
    assert stream.fingerprint == RolloutSync(engine.module, None).payload.fingerprint()
    reference = verl.quads_engine(Engine, contract)(forward_only=True)
    reference.initialize()
    assert not is_prepared(reference.module)
    assert "model.layers.0.mlp.experts.gate_up_proj" in dict(reference.get_per_tensor_param()[0])


@pytest.mark.parametrize(
    ("config", "message"),
    [({"strategy": "fsdp"}, "'fsdp2'"), ({"lora": True}, "lora_rank"), ({"qat": True}, "verl's own QAT")],
)
def test_verl_settings_that_contradict_quads_are_refused(config: dict[str, Any], message: str) -> None:
    """FSDP1, LoRA and verl's own QAT: named, before anything is built."""
    with pytest.raises(ContractError, match=message):
        verl.quads_engine(Engine, Contract())(**config).initialize()
    with pytest.raises(ContractError, match="frozen_from"):
        verl.quads_engine(Engine, Contract().merged({"weight_global_scale": "frozen"}))


def test_verl_rollout_is_asked_what_it_serves() -> None:
    """After every update all vLLM workers have to report the fingerprint of what was streamed."""
    model = qwen3()
    prepare_qat(model)
    good = RolloutSync(model, None).payload.fingerprint()
    for answers, message in (
        ([{"fingerprint": good}, {"fingerprint": good}], None),
        ([{"fingerprint": good}, {"fingerprint": "0" * 16}], "worker 1 .*fingerprint 0000"),
        ([{"error": "half of a weight is missing"}], "half of a weight"),
        ([], "no worker"),
    ):
        adapter = verl.quads_server_adapter(Adapter)(answers)
        update = adapter.update_weights(WeightStream(model), global_steps=3, peft_config=None, base_sync_done=True)
        if message is None:
            asyncio.run(update)
        else:
            with pytest.raises(MismatchError, match=message):
                asyncio.run(update)
        assert adapter.asked == [("weight_transfer_engine", (("fingerprint",)))]
        assert len(adapter.sent) == len(WeightStream(model).specs())
    foreign = verl.quads_server_adapter(Adapter)([])
    asyncio.run(foreign.update_weights(iter([("a", torch.zeros(1))])))
    assert foreign.asked == []


def test_an_open_stream_leaves_the_gradient_mode_alone() -> None:
    """A framework that stops reading half-way goes on training with gradients."""
    model = qwen3()
    prepare_qat(model)
    iterator = iter(WeightStream(model))
    _, tensor = next(iterator)
    assert torch.is_grad_enabled()
    assert not tensor.requires_grad


def test_engine_arguments_hold_the_contract() -> None:
    """What verl and NeMo-RL hand to vLLM parses back to the contract."""
    contract = Contract().merged({"compensation": {"ratio": 0.5}, "ignore": ["*.layers.0.*"]})
    arguments = verl.engine_kwargs(contract)
    assert arguments["quantization"] == "quads"
    assert Contract.from_dict(json.loads(arguments["additional_config"])["quads"]) == contract
    kwargs = nemo_rl.generation_config(contract)["vllm_kwargs"]
    assert kwargs["quantization"] == "quads"
    assert Contract.from_dict(kwargs["additional_config"]["quads"]) == contract


def test_nemo_rl_worker_announces_and_streams_packed_weights() -> None:
    """What is announced is what comes, its fingerprint is known, and the reference policy is scored in BF16."""
    worker = nemo_rl.quads_policy_worker(Worker)({})
    announced = worker.prepare_refit_info()
    with worker._streamed(None) as stream:
        sent = dict(stream)
    assert announced == {name: (tensor.shape, tensor.dtype) for name, tensor in sent.items()}
    assert worker.get_quads_fingerprint() == RolloutSync(worker.model, None).payload.fingerprint()
    with worker.use_reference_model():
        assert not state_of(worker.model).enabled
    assert state_of(worker.model).enabled
    with pytest.raises(ContractError, match="kv_scales"), worker._streamed({"a": 1.0}):
        pass
    for config, message in (({"lora": True}, "LoRA"), ({"tp": 2}, "tensor_parallel_size: is 2")):
        with pytest.raises(ContractError, match=message):
            nemo_rl.quads_policy_worker(Worker)(config)


# --- a real engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_buckets_through_load_weights_equal_a_push(
    packed: bool, tiny_qwen3_moe: Path, module_engine: Callable[..., Any]
) -> None:
    """Both frameworks load reused buckets and then call vLLM's own post-processing: the engine ends with the bytes and
    the log-probs of a push."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    llm = module_engine(tiny_qwen3_moe)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe, dtype=torch.bfloat16)
    prepare_qat(model)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + 100 * packed))
            parameter.add_(0.1 * noise.to(parameter.dtype))
    stream = WeightStream(model, packed=packed)

    def refit(engine_model: nn.Module) -> None:
        buffer = [(name, tensor.clone()) for name, tensor in stream]
        for start in range(0, len(buffer), 7):
            bucket = buffer[start : start + 7]
            engine_model.load_weights(bucket)  # type: ignore[operator]
            for _, tensor in bucket:
                tensor.reshape(-1).view(torch.uint8).zero_()
        config = llm.llm_engine.vllm_config
        with set_current_vllm_config(config):
            process_weights_after_loading(engine_model, config.model_config, torch.device("cpu"))

    before = scores(llm)
    llm.apply_model(refit)
    after = scores(llm)
    sent = RolloutSync(model, None).payload.fingerprint()
    require_fingerprint(sent, [{"fingerprint": as_engine(llm).fingerprint()}])
    assert stream.fingerprint == (sent if packed else None)
    RolloutSync(model, llm).push()
    assert scores(llm) == after != before
