# SPDX-License-Identifier: Apache-2.0
"""`quads bench` without a GPU: shapes, floors, results, tables, plots, refusals, and what its error check compares."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_quads.bench import SHAPES, MissingEnvironment, MoEShape, Result, Series, environment, floors, shape_named
from vllm_quads.bench import serve as serving
from vllm_quads.bench.engines import (
    ENGINES,
    MODELOPT_NVFP4,
    engine_named,
    groups_that_fit,
    kv_bytes_per_token,
    model_config,
    weight_gib,
)
from vllm_quads.bench.layers import DEFAULT, PLAIN, QUARTER, RandomLayer, relative_error, uniform_inputs
from vllm_quads.bench.nudge import nudge, nudged
from vllm_quads.bench.plot import plot
from vllm_quads.bench.random_weights import random_checkpoint
from vllm_quads.bench.result import ratios
from vllm_quads.bench.stored import files_of, load_results
from vllm_quads.bench.tables import markdown, rac_cost, speedups
from vllm_quads.cli.app import app
from vllm_quads.nvfp4 import PackedTensor, QuadsError

RUNNER = CliRunner()
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")


# --- shapes and floors ------------------------------------------------------------------------------------------------


def test_named_shapes_are_those_of_the_models() -> None:
    """Each name stands for the published layer; DeepSeek's is the slice of one of eight expert-parallel ranks."""
    numbers = {n: (s.experts, s.top_k, s.hidden, s.intermediate) for n, s in SHAPES.items()}
    assert numbers == {
        "qwen3-30b-a3b": (128, 8, 2048, 768),
        "deepseek-v3-ep8": (256 // 8, 8, 7168, 2048),
        "mixtral-8x7b": (8, 2, 4096, 14336),
    }


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"experts": 0}, "--experts"), ({"hidden": 100}, "--hidden"), ({"top_k": 9}, "--top-k")],
)
def test_impossible_shapes_are_refused(wrong: dict[str, int], named: str) -> None:
    """A shape that no kernel can run names the option that is wrong."""
    numbers = {"experts": 8, "top_k": 2, "hidden": 64, "intermediate": 32} | wrong
    with pytest.raises(QuadsError, match=named):
        MoEShape("mine", **numbers)
    with pytest.raises(QuadsError, match="qwen3-30b-a3b"):
        shape_named("qwen")


def test_floors_of_the_qwen_layer() -> None:
    """Bytes and FLOPs of the Qwen3 layer: 79 µs for all experts at 4.3 TB/s, 391 µs of 4096 tokens at 790 TFLOP/s."""
    qwen = shape_named("qwen3-30b-a3b")
    assert floors.weight_bytes_us(qwen, 128, floors.NVFP4_BITS, 4.3e12) == pytest.approx(79.0, abs=0.1)
    assert floors.weight_bytes_us(qwen, 128, 8, 4.3e12) == pytest.approx(79.0 * 8 / 4.5, abs=0.2)
    assert floors.flops_us(qwen, 4096, 790e12) == pytest.approx(391, abs=1)
    assert floors.quantize_bytes(4096, 2048) == pytest.approx(33.6e6, rel=0.01)


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_expected_experts_hit_is_what_uniform_inputs_hit(tokens: int) -> None:
    """The formula for distinct experts agrees with the benchmark's own routing, which has no expert twice in a row."""
    shape = MoEShape("t", 32, 4, 16, 16)
    ids = [uniform_inputs(shape, tokens, seed, "cpu")[2] for seed in range(40)]
    assert all(len(set(row)) == 4 for row in ids[0].tolist())
    mean = sum(i.unique().numel() for i in ids) / len(ids)
    assert mean == pytest.approx(floors.expected_hit(32, 4, tokens), rel=0.05)


# --- the error check --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [PLAIN, QUARTER, DEFAULT], ids=lambda v: v.name)
def test_the_reference_is_the_layer_of_the_contract(variant: Any) -> None:
    """What kernels are held against equals the torch reference of the contract to the rounding of outputs to BF16."""
    from vllm_quads.compensation.experts import experts_forward, prepare_experts
    from vllm_quads.compensation.state import SiteState
    from vllm_quads.nvfp4 import Contract

    layer = RandomLayer(MoEShape("t", 6, 2, 64, 96), 0, "cpu")
    x, weights, ids = uniform_inputs(layer.shape, 24, 1, "cpu")
    c = layer.compensation(variant)
    center = torch.zeros(64) if c.center13 is None else c.center13

    def blocks(mask: torch.Tensor | None, groups: int, k: int) -> torch.Tensor:
        return torch.zeros(groups, k // 16, dtype=torch.bool) if mask is None else mask

    codes13, scales13, decode13, codes2, scales2, decode2 = layer.packed
    sites = (
        SiteState(center, blocks(c.mask13, 1, 64)),
        SiteState(torch.zeros(96), blocks(c.mask2, 6, 96)),
    )
    contract = Contract().merged(
        {
            "activation": {
                "block_scale_rule": "four_over_six" if variant.four_over_six else "max_to_six",
                "centering": "median" if variant.centering else "none",
            },
            "compensation": {"form": {0.0: "none", 1.0: "rows"}.get(variant.ratio, "blocks")},
        }
    )
    prepared = prepare_experts((codes13, scales13, decode13), (codes2, scales2, decode2), *sites)
    want = experts_forward(
        x, prepared, weights, ids, contract, w13_site=sites[0], g13=None, g2=None,
        decode=torch.ones(24, dtype=torch.bool), w13_statistics=None, w2_statistics=None,
    )  # fmt: skip
    if c.bias13 is not None:  # the benchmark's bias is random; the contract's is the product with the centre
        w13 = torch.stack([PackedTensor(codes13[e], scales13[e], torch.ones(())).scaled() for e in range(6)])
        c = replace(c, bias13=(w13 @ center) * decode13.repeat_interleave(96, dim=1))
    assert relative_error(layer.reference((x, weights, ids), variant, c), want.double()) < 6e-3


def test_block_sets_have_the_size_of_a_contract() -> None:
    """A quarter of the blocks means a quarter in every expert, not on average."""
    c = RandomLayer(MoEShape("t", 6, 2, 512, 128), 0, "cpu").compensation(QUARTER)
    assert c.mask13 is not None
    assert c.mask2 is not None
    assert c.mask13.sum(1).tolist() == [8]
    assert c.mask2.sum(1).tolist() == [2] * 6


# --- results ----------------------------------------------------------------------------------------------------------

VALUES = st.dictionaries(st.integers(1, 10**6), st.floats(1e-6, 1e9, allow_nan=False).map(lambda v: float(f"{v:.6g}")))


@settings(max_examples=30, deadline=None)
@given(first=VALUES, second=VALUES, facts=st.dictionaries(st.text(max_size=8), st.floats(1, 1e13)))
def test_results_survive_json(first: dict[int, float], second: dict[int, float], facts: dict[str, float]) -> None:
    """A result is the same after to_dict, JSON text and from_dict."""
    series = (Series("a", "quads", "us", first, "note"), Series("b", "peer", "us", second))
    result = Result("moe", "T", "tokens", series, {"card": "X"}, {"name": "n"}, facts, {"a": {"k": 1}}, {"c": "why"})
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 0}, "schema"),
        ({"bench": "other"}, "bench"),
        ({"series": [{"name": "a"}]}, "damaged"),
        ({"series": [{"name": "a", "role": "mine", "unit": "us", "values": {}}]}, "role"),
        ({"surplus": 1}, "damaged"),
        ({"title": None}, "damaged.*title"),
        ({"settings": None}, "damaged.*settings"),
        ({"environment": []}, "damaged.*environment"),
        ({"environment": {"card": 3}}, "damaged.*environment"),
        ({"facts": {"copy": "fast"}}, "damaged.*facts"),
        ({"details": {"a": 1}}, "damaged.*details"),
        ({"missing": ["a"]}, "damaged.*missing"),
    ],
)
def test_damaged_results_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    """A file that is no result of this schema says so instead of giving a wrong table."""
    file = tmp_path / "r.json"
    file.write_text(json.dumps(moe_result().to_dict() | change))
    with pytest.raises(QuadsError, match=says):
        Result.load(file)
    assert RUNNER.invoke(app, ["bench", "show", str(file)]).exit_code == 1


def moe_result() -> Result:
    """A small result of each kind of series."""
    series = (
        Series("QUADS 4/6 + centring, no RAC", "quads", "us", {1: 20.0, 64: 100.0}),
        Series("QUADS 4/6 + centring, RAC 25 %", "quads", "us", {1: 20.5, 64: 102.0}),
        Series("QUADS 4/6 + centring, RAC 100 % (default contract)", "quads", "us", {1: 21.0, 64: 104.0}),
        Series("FP8 128x128 block", "peer", "us", {1: 28.0, 64: 166.4}),
        Series("floor: NVFP4 bytes", "floor", "us", {1: 5.0, 64: 78.0}),
        Series("error against FP64", "check", "relative error", {64: 2.5e-3}),
    )
    return Result(
        "moe",
        "One MoE layer, qwen3-30b-a3b",
        "tokens",
        series,
        {"date": "2026-01-02T03:04:05", "card": "NVIDIA H200", "driver": "580", "torch": "2.11"},
        {"name": "qwen3-30b-a3b"},
        {"copy bandwidth, bytes/s": 4.25e12},
        missing={"BF16": "ImportError: moved"},
    )


def serve_result() -> Result:
    """Two engines with memory."""
    base, own = ENGINES["fp8-block"].label, ENGINES["quads"].label
    series = (
        Series(base, "peer", "tokens/s", {16: 1754.0, 64: 5259.0, 256: 14687.0}),
        Series(own, "quads", "tokens/s", {16: 2180.0, 64: 6869.0, 256: 17285.0}),
    )
    details = {own: {"weights_gib": 17.1, "kv_left_gib": 100.5, "kv_left_tokens": 1_097_000}}
    return Result("serve", "T", "sequences", series, {"card": "X"}, {"name": "n", "baseline": base}, details=details)


def test_tables_hold_the_ratios() -> None:
    """The moe table has speed-ups over each peer, the share of the floor and RAC's cost; the serve table ratios."""
    text = markdown(moe_result())
    assert "| FP8 128x128 block / default contract | 1.33× | 1.60× |" in text
    assert "| NVFP4 byte floor / default contract | 24% | 75% |" in text
    assert "| cost of RAC 25 % | +2.5 % | +2.0 % |" in text
    assert "| error against FP64 | 2.50e-03 |" in text
    assert "BF16 (ImportError: moved)" in text
    assert rac_cost(moe_result())["RAC 100 %"][64] == pytest.approx(4.0)
    assert speedups(moe_result())["FP8 128x128 block"][1] == pytest.approx(28 / 21)
    served = markdown(serve_result())
    assert "| 2180 (1.24×) | 6869 (1.31×) | 17285 (1.18×) |" in served
    assert "| 17.1 | 100.5 | 1097000 |" in served


def test_ratios_take_common_points_only() -> None:
    """A kernel that could not run at some size has no ratio there."""
    assert ratios(Series("a", "peer", "us", {1: 2.0, 4: 8.0}), Series("b", "quads", "us", {4: 4.0, 9: 1.0})) == {4: 2.0}


def quantize_result() -> Result:
    """One kernel with its share of the bandwidth."""
    series = (
        Series("merged", "quads", "us", {64: 4.0, 4096: 12.0}),
        Series("floor: 16 bits in and out", "floor", "us", {64: 0.1, 4096: 7.9}),
        Series("share of copy bandwidth: merged", "check", "share", {64: 0.03, 4096: 0.66}),
    )
    return Result("quantize", "Q", "rows", series, {"card": "X"}, {"name": "k2048"})


def logprobs_result() -> Result:
    """Drift of two arms."""
    series = (
        Series("BF16, here against there", "peer", "nats", {0: 0.001, 1: 0.01, 2: 0.1, 3: 0.2}),
        Series("W4A4, here against there", "quads", "nats", {0: 0.002, 1: 0.02, 2: 0.2, 3: 0.4}),
    )
    return Result("logprobs", "L", "column", series, {"card": "X"}, {"name": "m", "columns": ["KL", "a", "b", "c"]})


def other_result() -> Result:
    """A benchmark without a table of its own."""
    return Result("training", "S", "layers", (Series("a step", "quads", "ms", {4: 12.5, 8: 25.0}),), {"card": "X"})


@pytest.mark.parametrize("make", [moe_result, serve_result, quantize_result, logprobs_result, other_result])
def test_stored_results_can_be_shown_and_drawn(make: Any, tmp_path: Path) -> None:
    """`quads bench show` prints the table of a stored result and draws its plot on a machine without a GPU."""
    file = make().save(tmp_path / "r.json")
    done = RUNNER.invoke(app, ["bench", "show", str(file), "--out", str(tmp_path / "plots")])
    assert done.exit_code == 0, done.stderr
    assert markdown(make()).splitlines()[2] in done.stdout
    assert (tmp_path / "plots" / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_is_shown_but_for_what_is_no_result(tmp_path: Path) -> None:
    """`quads bench show FOLDER` shows every result; each other JSON file is named with what it is, in JSON output too.
    Without any result that is an error."""
    moe_result().save(tmp_path / "moe.json")
    (tmp_path / "gap.json").write_text('{"model": "m", "rows": [], "tokens": 1}')
    (tmp_path / "refit-quads.jsonl").write_text('{"event": "start", "layers": 2}\n{"event": "done"}\n')
    (tmp_path / "trl.jsonl").write_text('{"what": "a run of TRL"}\n')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "moe.png").write_bytes(b"\x89PNG")
    others = {
        "gap.json": "`quads gap`",
        "refit-quads.jsonl": "2 events of a run of benchmarks/refit.py",
        "trl.jsonl": "a run of TRL",
        "list.json": "a JSON list",
        "config.json": "the keys model_type",
    }
    done = RUNNER.invoke(app, ["bench", "show", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    assert markdown(moe_result()).splitlines()[2] in done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == len(others)
    for name, kind in others.items():
        assert [kind in line for line in lines if name in line] == [True], name
    answer = json.loads(RUNNER.invoke(app, ["bench", "show", str(tmp_path), "--json"]).stdout)
    assert len(answer["results"]) == 1
    assert {Path(file).name for file in answer["not_shown"]} == set(others)
    (tmp_path / "moe.json").unlink()
    done = RUNNER.invoke(app, ["bench", "show", str(tmp_path)])
    assert done.exit_code == 1
    assert "no result" in done.stderr
    assert all(kind in done.stderr for kind in others.values())


@pytest.mark.parametrize(("name", "content"), [("r.json", b"{"), ("r.jsonl", b"{\n"), ("r.png", b"\x89PNG")])
def test_what_is_no_json_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    """`quads bench show` of a broken file names it and says that it is not JSON."""
    (tmp_path / name).write_bytes(content)
    done = RUNNER.invoke(app, ["bench", "show", str(tmp_path / name)])
    assert done.exit_code == 1
    assert f"{tmp_path / name}: " in done.stderr
    assert "not JSON" in done.stderr


def test_a_plot_needs_no_baseline(tmp_path: Path) -> None:
    """Without peers there is nothing to divide by; the plot is drawn all the same."""
    result = moe_result()
    alone = replace(result, series=tuple(s for s in result.series if s.role == "quads"))
    assert plot(alone, tmp_path / "a.png").is_file()
    assert "FP8" not in markdown(alone)


def test_results_in_the_repository_can_be_read() -> None:
    """Every stored result of a benchmark has date, card, driver, versions and command, and gives a table.

    None names a commit that its files differed from.
    """
    folder = Path(__file__).parents[1] / "benchmarks" / "results"
    stored, others = load_results(files_of([folder]))
    forms = ("gap-", "refit-two-", ".jsonl")  # `quads gap`, benchmarks/refit_two_gpus.py, and logs
    assert not [p for p in others if not any(form in p.name for form in forms)]
    for path, result in stored.items():
        missing = {"date", "card", "driver", "torch", "vllm-quads", "command"} - set(result.environment)
        if result.environment["card"] == "x86_64":
            missing.remove("driver")
        assert not missing, (path.name, missing)
        assert "+" not in result.environment.get("commit", ""), path.name
        assert markdown(result)
        assert path.with_suffix(".png").is_file() or result.bench in ("weights", "training"), path.name


# --- what is refused --------------------------------------------------------------------------------------------------


@NO_GPU
@pytest.mark.parametrize("command", ["moe", "quantize", "serve"])
def test_no_gpu_is_a_clear_refusal(command: str, tmp_path: Path) -> None:
    """Exit code 3 and a line that says what is missing, in text and in JSON; nothing is written."""
    done = RUNNER.invoke(app, ["bench", command, "--json", "--out", str(tmp_path / "out")])
    assert done.exit_code == 3
    assert "a CUDA GPU" in done.stderr
    answer = json.loads(done.stdout)
    assert not answer["ok"]
    assert answer["error"]["type"] == "MissingEnvironment"
    assert not (tmp_path / "out").exists()


@NO_GPU
@pytest.mark.parametrize(
    ("module", "arguments", "gpus"),
    [
        ("training", [], "a CUDA GPU"),
        ("weights", [], "a CUDA GPU"),
        ("refit", ["quads"], "a CUDA GPU"),
        ("refit_two_gpus", ["nccl"], "2 CUDA GPUs"),
        ("fsdp", [], "a CUDA GPU"),
    ],
)
def test_scripts_without_a_gpu_say_so(
    module: str, arguments: list[str], gpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m benchmarks.NAME` ends with one line and exit code 3, as the command line does."""
    pytest.importorskip("vllm" if module.startswith("refit") else "torch")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as stopped:  # imported scripts set variables
        importlib.import_module(f"benchmarks.{module}").main()
    assert stopped.value.code == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: this benchmark needs {gpus} ")


def test_two_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark of two GPUs says how many there are on a machine with one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(MissingEnvironment, match=r"2 GPUs \(torch sees 1\)"):
        environment.require(hopper=False, vllm=False, gpus=2)


def test_refusals_name_everything_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Ampere card without vLLM: both are named at once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "vllm" else found(n, *a))
    with pytest.raises(MissingEnvironment, match=r"sm_90 GPU.*A100 is sm_80.*vLLM"):
        environment.require()
    environment.require(hopper=False, vllm=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["moe", "--tokens", "1,x"], "--tokens"),
        (["moe", "--tokens", "0"], "--tokens"),
        (["moe", "--experts", "8", "--top-k", "2"], "--hidden, --intermediate"),
        (["quantize", "--rows", ","], "--rows"),
        (["logprobs", "m"], "--record"),
        (["logprobs", "m", "--record", "r", "--nudge", "0.5"], "--nudge"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str) -> None:
    """Exit code 2, naming the option."""
    done = RUNNER.invoke(app, ["bench", *arguments])
    assert done.exit_code == 2, done.stdout
    assert says in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["moe", "--shape", "qwen"], "mixtral-8x7b"),
        (["quantize", "--channels", "100"], "--channels"),
        (["serve", "--engines", "fp9"], "fp8-block"),
        (["serve", "--engines", "quads,quads"], "once"),
        (["serve", "--routing", "model", "--weights", "dummy"], "--weights random"),
        (["show", "nothing.json"], "nothing.json"),
    ],
)
def test_impossible_wishes(arguments: list[str], says: str) -> None:
    """Exit code 1 and one line that says what to ask for instead, also where there is no GPU."""
    done = RUNNER.invoke(app, ["bench", *arguments])
    assert done.exit_code == 1, done.stdout
    assert says in done.stderr


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("moe", ["--shape", "--experts", "--tokens", "--no-peers", "--no-check", "--repeats", "--out", "--json"]),
        ("quantize", ["--rows", "--channels", "--repeats", "--out", "--json"]),
        (
            "serve",
            [
                "--engines",
                "--sequences",
                "--layers",
                "--routing",
                "--weights",
                "--together",
                "--kv-gib",
                "--no-compile",
            ],
        ),
        ("logprobs", ["--record", "--against", "--prompts", "--max-tokens", "--nudge"]),
        ("show", ["--out", "--json"]),
    ],
)
def test_help_texts_are_complete(command: str, options: list[str]) -> None:
    """Each command's help has its options and the exit codes."""
    text = RUNNER.invoke(app, ["bench", command, "--help"], env={"COLUMNS": "200"}).stdout
    assert not [o for o in options if o not in text]
    assert "Exit codes" in text


def test_results_say_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Date, card, versions, digest of the CUDA sources and command line; no directory of this machine."""
    typed = ["/opt/bin/quads", "bench", "moe", "--out", "/home/me/x", "--tokens", "1,4", "--logs=/tmp/l"]
    monkeypatch.setattr(sys, "argv", typed)
    assert environment.command_line() == "quads bench moe --tokens 1,4"
    monkeypatch.setattr(sys, "argv", ["quads", "bench", "logprobs", "/data/m", "--against=/d/cpu.safetensors", "a/b"])
    assert environment.command_line() == "quads bench logprobs m --against=cpu.safetensors a/b"
    found = environment.describe()
    assert {"date", "card", "python", "torch", "vllm-quads", "source", "kernels", "command"} <= set(found)
    assert not [v for v in found.values() if str(Path.home()) in v or str(Path(__file__).parents[1]) in v]


def test_a_changed_checkout_names_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is recorded only where tracked files are those of the commit; the digest of the sources always is."""
    answers = {"rev-parse": "0123456789ab", "status": ""}
    monkeypatch.setattr(environment, "_first_line", lambda command: answers[command[3]] if "-C" in command else "")
    monkeypatch.setattr(Path, "exists", lambda self: True)
    assert environment._commit() == "0123456789ab"
    answers["status"] = "M vllm_quads/__init__.py"
    assert environment._commit() == "unknown: files differ from the checkout's commit"
    assert len(environment.source_digest()) == 16


# --- engines ----------------------------------------------------------------------------------------------------------


def test_engines_differ_in_their_quantization_only() -> None:
    """Same model, limits and CUDA graphs for every engine; QUADS starts as users start it."""
    configs = {n: model_config(e, 4) for n, e in ENGINES.items()}
    for config in configs.values():
        assert {k: v for k, v in config.items() if k != "quantization_config"} == configs["bf16"]
    assert engine_named("quads").arguments == {"quantization": "quads"}
    kept = configs["fp8-block"]["quantization_config"]["modules_to_not_convert"]
    assert kept == ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(4))]
    assert configs["marlin"]["quantization_config"] == MODELOPT_NVFP4
    options = serving.engine_options(serving.ServeOptions(sequences=(4, 32)))
    assert options["compilation_config"] == {"cudagraph_capture_sizes": [4, 32]}
    assert options["max_num_seqs"] == 32
    graphs = serving.engine_options(serving.ServeOptions(compile=False))["compilation_config"]
    assert (graphs["mode"], graphs["cudagraph_mode"]) == (0, "FULL_DECODE_ONLY")


@pytest.mark.parametrize("form", ["bf16", "fp8-block", "nvfp4"])
def test_random_checkpoints_are_checkpoints(form: str) -> None:
    """Names and shapes are those of Qwen3-MoE; every form decodes to the same weights of realistic scale."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, vocab_size=300, tie_word_embeddings=False,
    )  # fmt: skip
    plain = dict(random_checkpoint(config, "bf16", "cpu"))
    made = dict(random_checkpoint(config, form, "cpu"))
    assert list(plain) == [n for n in made if n.endswith(".weight")]
    if form == "bf16":
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        dense = {n: tuple(p.shape) for n, p in model.named_parameters() if ".experts." not in n}
        assert {n: tuple(t.shape) for n, t in plain.items() if ".experts." not in n} == dense
        experts = [n for n in plain if ".experts." in n]
        assert len(experts) == 2 * 4 * 3
        assert 0.019 < float(plain["lm_head.weight"].float().std()) < 0.021
        assert not torch.equal(plain[experts[0]], plain[experts[3]])
        return
    for name, weight in plain.items():
        got = made[name]
        if got.dtype == weight.dtype:
            assert torch.equal(got, weight)
            assert "_proj" not in name
            continue
        stem = name.removesuffix(".weight")
        if form == "fp8-block":
            scale = made[f"{stem}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            decoded, tolerance = got.float() * scale, 0.04
        else:
            packed = PackedTensor(got, made[f"{stem}.weight_scale"], made[f"{stem}.weight_scale_2"])
            decoded, tolerance = packed.dequantize(), 0.15
        assert relative_error(decoded, weight.double()) < tolerance, name


FAKE_WORKER = """
import json, sys
request = json.load(open(sys.argv[1]))
name = request["arguments"].get("quantization") or request["form"]
def answer(**m): print(json.dumps(m), flush=True)
print("Using 'MARLIN' NvFp4 MoE backend", file=sys.stderr)
if name == "nvfp4":
    answer(event="failed", error="ValueError: no such kernel"); sys.exit(1)
answer(event="ready", start_s=1.0)
for line in sys.stdin:
    m = json.loads(line)
    if m.get("event") == "memory":
        answer(event="memory", weights_gib=17.0, kv_cache_tokens=100_000, reserved_gib=40.0, card_gib=140.0)
    elif m.get("event") == "experts":
        answer(event="experts", hit=m["sequences"] / 4)
    elif name == "fp8-block" and m["sequences"] == 64 and m["output"] > 16:
        print("RuntimeError: out of memory", file=sys.stderr); sys.exit(7)
    else:
        answer(event="done", seconds=1.0 if name == "quads" else 2.0)
"""


@pytest.mark.parametrize("together", [False, True])
def test_one_engine_s_failure_costs_no_other_its_numbers(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that do not start or die are reported with the reason; the others are measured, and memory is left."""
    fake = tmp_path / "worker.py"
    fake.write_text(FAKE_WORKER)
    monkeypatch.setattr(serving, "WORKER", (str(fake),))
    monkeypatch.setattr(environment, "require", lambda **_: None)
    card = SimpleNamespace(total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: card)
    steps: list[tuple[int, int]] = []
    options = serving.ServeOptions(layers=4, repeats=2, sequences=(16, 64), together=together, count_experts=True)
    result = serving.run_serve(options, lambda done, total, _: steps.append((done, total)))
    assert result.missing["marlin"] == "ValueError: no such kernel"
    assert "code 7: RuntimeError: out of memory" in result.missing["fp8-block"]
    quads, bf16 = result.get(ENGINES["quads"].label), result.get(ENGINES["bf16"].label)
    assert quads is not None
    assert bf16 is not None
    assert quads.values == {16: 16 * 256.0, 64: 64 * 256.0}
    assert bf16.values == {16: 16 * 128.0, 64: 64 * 128.0}
    assert result.get(ENGINES["fp8-block"].label).values == {16: 16 * 128.0}  # type: ignore[union-attr]
    memory = result.details[ENGINES["quads"].label]
    cache = 100_000 * kv_bytes_per_token(4) / 2**30
    assert memory["kv_left_gib"] == pytest.approx(0.9 * 140 - (40 - cache), abs=0.01)
    assert memory["kernels"] == ["Using 'MARLIN' NvFp4 MoE backend"]
    assert result.settings["experts_hit"] == {"16": 4.0, "64": 16.0}
    assert all(d <= t for d, t in steps)
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))).xs() == [16, 64]


def test_an_interruption_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the first numbers gives a result that says what is missing, and leaves no process behind."""
    fake = tmp_path / "worker.py"
    fake.write_text(FAKE_WORKER)
    monkeypatch.setattr(serving, "WORKER", (str(fake),))
    monkeypatch.setattr(environment, "require", lambda **_: None)

    def stop_at(step: int) -> Any:
        def progress(done: int, total: int, what: str) -> None:
            if done == step:
                raise KeyboardInterrupt

        return progress

    options = serving.ServeOptions(engines=("bf16",), sequences=(16, 64), repeats=1)
    up_and_warm = 3
    result = serving.run_serve(options, stop_at(up_and_warm + 1))
    assert result.missing == {serving.INTERRUPTED: "interrupted"}
    assert result.get(ENGINES["bf16"].label).values == {16: 16 * 128.0}  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        serving.run_serve(options, stop_at(up_and_warm))


def test_engines_share_a_card_as_far_as_they_fit() -> None:
    """On an H200 three quantized engines of 48 layers fit together, and BF16 gets a turn of its own."""
    names = ["bf16", "fp8-block", "marlin", "quads"]
    assert groups_that_fit(names, 48, 14.0, 0.9 * 139.8) == [["marlin", "quads", "fp8-block"], ["bf16"]]
    assert len(groups_that_fit(names, 2, 14.0, 0.9 * 139.8)) == 1
    sizes = [round(weight_gib(ENGINES[n], 48)) for n in names]
    assert sizes == [57, 29, 17, 18]


def test_experts_are_counted_per_step_and_layer() -> None:
    """Distinct experts over the sequences of one decode step in one layer, averaged; the prompt does not count."""
    from vllm_quads.bench.serve_worker import experts_hit

    prompt = [[[0, 1], [2, 3]]]
    routed = ([*prompt, [[0, 1], [2, 3]], [[0, 1], [4, 5]]], [*prompt, [[1, 2], [2, 3]], [[0, 1], [6, 7]]])
    outputs = [SimpleNamespace(outputs=[SimpleNamespace(routed_experts=r)]) for r in routed]
    assert experts_hit(outputs, prompt=1) == (3 + 2 + 2 + 4) / 4


def test_no_engine_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a single number is no result."""
    fake = tmp_path / "worker.py"
    fake.write_text("import sys; sys.exit('ImportError: no vllm')")
    monkeypatch.setattr(serving, "WORKER", (str(fake),))
    monkeypatch.setattr(environment, "require", lambda **_: None)
    with pytest.raises(QuadsError, match="ImportError: no vllm"):
        serving.run_serve(serving.ServeOptions(engines=("bf16",)))


def test_the_cache_of_48_layers_takes_96_kib_a_token() -> None:
    """Keys and values of 4 heads of 128 in BF16."""
    assert kv_bytes_per_token(48) == 2 * 48 * 4 * 128 * 2 == 96 * 1024


# --- log-probs --------------------------------------------------------------------------------------------------------


def test_log_prob_differences_against_the_full_divergence(tmp_path: Path) -> None:
    """Equal distributions differ by nothing; where all mass is recorded the KL is the exact one; files round-trip."""
    from vllm_quads.bench.logprobs import BF16, ROWS, TOP, Recording, compare, differences, nudged_name

    gen = torch.Generator().manual_seed(0)
    rows = torch.log_softmax(torch.randn(40, TOP + 1, generator=gen) * 2, dim=1)
    other = torch.log_softmax(rows + 0.1 * torch.randn(rows.shape, generator=gen), dim=1)
    tokens = torch.randint(0, TOP + 1, (40, 1), generator=gen)
    top = rows.topk(TOP, dim=1)
    chosen = rows.gather(1, tokens)[:, 0]
    same = differences(chosen, top.indices, top.values, chosen, rows)
    assert max(same) < 1e-6
    kl, mean, p99, largest = differences(chosen, top.indices, top.values, other.gather(1, tokens)[:, 0], other)
    exact = (rows.double().exp() * (rows.double() - other.double())).sum(1).mean()
    assert kl == pytest.approx(float(exact), rel=1e-4)
    assert 0 < mean < p99 <= largest

    recording = Recording(
        [[1, 2]],
        [tokens[:, 0].tolist()],
        {BF16: chosen, ROWS: chosen},
        dict.fromkeys((BF16, ROWS), top.indices.to(torch.int32)),
        dict.fromkeys((BF16, ROWS), top.values),
        {"card": "x86_64"},
    )
    back = Recording.load(recording.save(tmp_path / "r.safetensors"))
    assert (back.prompts, back.tokens, back.environment) == (recording.prompts, recording.tokens, recording.environment)
    result = compare(back, {BF16: rows, ROWS: other}, {"card": "H200"}, "m")
    assert result.get(f"{BF16}, here against there").values[3] < 1e-6  # type: ignore[union-attr]
    assert result.get(f"{ROWS}, here against there").values[0] == pytest.approx(kl)  # type: ignore[union-attr]
    moved = compare(back, {BF16: rows, ROWS: rows}, {"card": "H200"}, "m", {BF16: rows, ROWS: other}, 0.25)
    assert moved.get(nudged_name(BF16)).values[3] == 0  # type: ignore[union-attr]
    assert moved.get(nudged_name(ROWS)).values[0] == pytest.approx(kl)  # type: ignore[union-attr]
    assert moved.settings["nudge"].startswith("0.25 of")
    (tmp_path / "bad").write_bytes(b"nothing")
    with pytest.raises(QuadsError, match="--record"):
        Recording.load(tmp_path / "bad")


def test_a_nudge_is_one_bf16_value_up_or_down() -> None:
    """The given share of elements moves to a neighbouring value, both ways; zeros and the largest values stay."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[0], x[1] = 0, torch.finfo(torch.bfloat16).max
    moved = nudge(x, 0.25, torch.Generator().manual_seed(1))
    steps = moved.view(torch.int16).int() - x.view(torch.int16).int()
    assert set(steps.unique().tolist()) == {-1, 0, 1}
    assert moved.isfinite().all()
    assert not steps[0].any()
    assert (steps[2:] == 1).float().mean() == pytest.approx(0.125, abs=0.01)
    assert (steps[2:] == -1).float().mean() == pytest.approx(0.125, abs=0.01)
    assert torch.equal(nudge(x, 0.0, torch.Generator()), x)


def test_only_the_parts_of_decoder_layers_are_nudged_and_only_inside() -> None:
    """Norms, attention and feed-forward blocks, first outputs; other modules and later calls are left alone."""

    class Fused(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"norm": Fused()})])})
    model["head"] = torch.nn.Identity()
    worker = SimpleNamespace(get_model=lambda: model)
    engine = SimpleNamespace(collective_rpc=lambda f: [f(worker)])
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    norm = model["layers"][0]["norm"]  # type: ignore[index]
    with nudged(engine, 1.0) as count:
        first, second = norm(x)
        assert count == 1
        assert (first != 1).all()
        assert (second == 1).all()
        assert (model["head"](x) == 1).all()
    assert (norm(x)[0] == 1).all()
    model["layers"] = torch.nn.Identity()
    with pytest.raises(QuadsError, match="layers.N"), nudged(engine, 1.0):
        pass
