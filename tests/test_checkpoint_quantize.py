# SPDX-License-Identifier: Apache-2.0
"""`quantize_checkpoint`: bytes, names and configuration of what is written, and what happens when it is interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoint_models as models
import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch

from vllm_quads.checkpoint import (
    CheckpointWriter,
    Format,
    detect,
    fingerprint_checkpoint,
    inspect_checkpoint,
    iter_packed,
    load_packed,
    quantize_checkpoint,
    verify_headers,
)
from vllm_quads.compensation import CompensationState, SiteState
from vllm_quads.nvfp4 import (
    CheckpointError,
    Contract,
    ContractError,
    FormatError,
    PackedTensor,
    canonical_name,
    encode_scale,
    fingerprint_of,
    weight_amax,
)

FORMATS = ["quads", "modelopt", "compressed-tensors"]
DENSE_TOO = Contract(targets=("*.experts.*", "*_proj"))


def _expected(tensors: models.Tensors) -> dict[str, PackedTensor]:
    """Packed experts of per-expert tensors, gate and up with their joint amax, made without the code under test."""
    experts = {canonical_name(n): t for n, t in tensors.items() if ".experts." in n}
    out = {}
    for name, w in experts.items():
        pair = [name.replace("up_proj", "gate_proj"), name.replace("gate_proj", "up_proj")]
        amax = torch.stack([weight_amax(experts[p]) for p in pair]).amax()
        out[name] = PackedTensor.quantize(w, amax=amax)
    return out


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek"])
def test_packed_bytes_names_and_rest(tmp_path: Path, name: str, fmt: str) -> None:
    """Every expert has the bytes of the reference under the family's own names; everything else is untouched."""
    config, tensors = models.family(name)
    src = models.save(tmp_path / "src", config, tensors, shards=3)
    report = quantize_checkpoint(src, tmp_path / "dst", format=fmt)
    expected = _expected(tensors)
    got = dict(iter_packed(tmp_path / "dst"))
    assert got.keys() == expected.keys()
    for n, packed in got.items():
        assert torch.equal(packed.codes, expected[n].codes), n
        assert torch.equal(packed.block_scales.view(torch.uint8), expected[n].block_scales.view(torch.uint8)), n
        assert torch.equal(packed.decode_scale, expected[n].decode_scale), n
    assert report.fingerprint == fingerprint_of(expected) == fingerprint_checkpoint(tmp_path / "dst")
    written = models.read(tmp_path / "dst")
    for n, t in tensors.items():
        if ".experts." not in n:
            assert torch.equal(written[n], t), n
    suffix = "weight_packed" if fmt == "compressed-tensors" else "weight"
    modules = {n.removesuffix(".weight") for n in tensors if ".experts." in n}
    assert {n.removesuffix(f".{suffix}") for n in written if n.endswith(f".{suffix}") and ".experts." in n} == modules
    assert report.bytes_after < report.bytes_before
    assert (tmp_path / "dst" / "tokenizer.json").read_text() == '{"made": "up"}'
    assert not list(tmp_path.glob(".*"))


def test_bytes_of_one_expert_equal_the_oracle(tmp_path: Path) -> None:
    """Walk one weight from the source file to the written file and compare with the numpy oracle."""
    src = models.make(tmp_path / "src")
    quantize_checkpoint(src, tmp_path / "dst")
    name, source = "model.layers.1.mlp.experts.2.down_proj", models.read(src)
    codes, scales = oracle.quantize(source[f"{name}.weight"].float().numpy())
    packed = load_packed(tmp_path / "dst", name)
    np.testing.assert_array_equal(packed.block_scales.view(torch.uint8).numpy(), scales)
    np.testing.assert_array_equal(packed.codes.numpy(), codes[:, 0::2] | codes[:, 1::2] << 4)


def test_scale_direction_and_shape_of_each_format(tmp_path: Path) -> None:
    """weight_scale_2 is decode and scalar, weight_global_scale is encode and [1]; both give the same decode bits."""
    src = models.make(tmp_path / "src")
    for fmt in FORMATS:
        quantize_checkpoint(src, tmp_path / fmt, format=fmt)
    module = "model.layers.0.mlp.experts.0.down_proj"
    decode = models.read(tmp_path / "quads")[f"{module}.weight_scale_2"]
    encode = models.read(tmp_path / "compressed-tensors")[f"{module}.weight_global_scale"]
    amax = weight_amax(models.read(src)[f"{module}.weight"])
    assert decode.shape == ()
    assert encode.shape == (1,)
    torch.testing.assert_close(encode[0], torch.tensor(2688.0) / amax, rtol=2**-22, atol=0)
    assert decode == 1 / encode[0]
    assert models.read(tmp_path / "modelopt")[f"{module}.weight_scale_2"] == decode
    assert f"{module}.input_scale" not in models.read(tmp_path / "quads")
    assert models.read(tmp_path / "modelopt")[f"{module}.input_scale"] == 1.0
    assert len({fingerprint_checkpoint(tmp_path / fmt) for fmt in FORMATS}) == 1


def test_fused_stacks_give_what_single_experts_give(tmp_path: Path) -> None:
    """A transformers-5 checkpoint (3-D stacks) and its per-expert twin quantize to the same checkpoint."""
    config, fused = models.family("fused")
    single = {n: t for n, t in fused.items() if ".experts." not in n}
    for n, t in fused.items():
        for e in range(models.EXPERTS if ".experts." in n else 0):
            head = n.rpartition(".")[0]
            if n.endswith("gate_up_proj"):
                single[f"{head}.{e}.gate_proj.weight"] = t[e, : models.INTER].contiguous()
                single[f"{head}.{e}.up_proj.weight"] = t[e, models.INTER :].contiguous()
            else:
                single[f"{head}.{e}.down_proj.weight"] = t[e].contiguous()
    a = quantize_checkpoint(models.save(tmp_path / "fused", config, fused), tmp_path / "a")
    b = quantize_checkpoint(models.save(tmp_path / "single", config, single), tmp_path / "b")
    assert a.fingerprint == b.fingerprint
    assert models.read(tmp_path / "a").keys() == models.read(tmp_path / "b").keys()


def test_a_part_of_a_stack_can_stay_in_bf16(tmp_path: Path) -> None:
    """A contract may keep a layer or an expert of a fused checkpoint: it is written per expert, unchanged."""
    config, fused = models.family("fused")
    contract = Contract(keep_first_layers=1, ignore=("*.layers.1.mlp.experts.3.*",))
    quantize_checkpoint(models.save(tmp_path / "src", config, fused), tmp_path / "dst", contract=contract)
    written = models.read(tmp_path / "dst")
    stack = fused["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(written["model.layers.1.mlp.experts.3.up_proj.weight"], stack[3, models.INTER :])
    assert written["model.layers.1.mlp.experts.2.up_proj.weight"].dtype == torch.uint8
    assert torch.equal(
        written["model.layers.0.mlp.experts.1.down_proj.weight"], fused["model.layers.0.mlp.experts.down_proj"][1]
    )
    assert len(verify_headers(tmp_path / "dst").quantized) == 3 * (models.EXPERTS * (models.LAYERS - 1) - 1)


@pytest.mark.parametrize(
    "change", [{"model_type": "gpt_oss"}, {"model_type": "llama4_text"}, {"hidden_size": models.H + 16}]
)
def test_transposed_stacks_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """Fused experts of another layout (K and N swapped, or interleaved) are an error, not garbage."""
    config, fused = models.family("fused")
    src = models.save(tmp_path / "src", {**config, **change}, fused)
    with pytest.raises(FormatError, match=r"experts.\w+_proj: the fused experts .* expected \[E, (2I, H|H, I)\]"):
        quantize_checkpoint(src, tmp_path / "dst")


def test_dense_linears_are_quantized_when_the_contract_says_so(tmp_path: Path) -> None:
    """q, k, v, o and shared experts too: q, k, v share one global scale, gate and up theirs; the router stays."""
    src = models.make(tmp_path / "src", "deepseek")
    quantize_checkpoint(src, tmp_path / "dst", contract=DENSE_TOO)
    packed = dict(iter_packed(tmp_path / "dst"))
    source = models.read(src)
    for group in ("qkv", "o"):
        names = [f"model.layers.1.self_attn.{n}_proj" for n in group]
        amax = torch.stack([weight_amax(source[f"{n}.weight"]) for n in names]).amax()
        assert {packed[n].decode_scale.item() for n in names} == {(1 / encode_scale(amax)).item()}
    assert "model.layers.0.mlp.gate_proj" in packed
    assert models.read(tmp_path / "dst")["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "contract", [Contract(), Contract(keep_last_layers=1), DENSE_TOO, Contract.from_dict({"scheme": "w4a16"})]
)
def test_configuration_reads_back(tmp_path: Path, fmt: str, contract: Contract) -> None:
    """detect gives the format, the scheme, and a contract that resolves to exactly the packed set."""
    src = models.make(tmp_path / "src", "deepseek")
    quantize_checkpoint(src, tmp_path / "dst", format=fmt, contract=contract)
    info = verify_headers(tmp_path / "dst")
    assert info.format is Format(fmt)
    assert info.scheme is contract.scheme
    assert info.contract is not None
    assert info.contract.resolve(info.weights).shapes == contract.resolve(info.weights).shapes == info.quantized.shapes
    if fmt == "quads":
        assert info.contract == contract
        assert json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"] == contract.to_dict()


def test_modelopt_is_described_by_either_file(tmp_path: Path) -> None:
    """hf_quant_config.json alone, or quantization_config alone, is enough."""
    src = models.make(tmp_path / "src")
    quantize_checkpoint(src, tmp_path / "a", format="modelopt")
    quantize_checkpoint(src, tmp_path / "b", format="modelopt")
    models.edit_config(tmp_path / "a", lambda c: c.pop("quantization_config"))
    (tmp_path / "b" / "hf_quant_config.json").unlink()
    for path in (tmp_path / "a", tmp_path / "b"):
        assert verify_headers(path).format is Format.MODELOPT


def test_other_tools_read_what_is_written(tmp_path: Path) -> None:
    """compressed-tensors parses our quantization_config and decompresses our tensors to the same numbers."""
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    src = models.make(tmp_path / "src")
    quantize_checkpoint(src, tmp_path / "dst", format="compressed-tensors")
    config = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert scheme.weights.group_size == 16
    module = "model.layers.0.mlp.experts.1.up_proj"
    parts = {n.rpartition(".")[2]: t for n, t in models.read(tmp_path / "dst").items() if n.startswith(module)}
    theirs = NVFP4PackedCompressor.decompress(parts, scheme)["weight"].float()
    ours = load_packed(tmp_path / "dst", module).dequantize()
    torch.testing.assert_close(theirs, ours, rtol=2**-7, atol=0)  # theirs is rounded to BF16


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    """A checkpoint without lm_head gets none, the flag stays, and the embedding is untouched."""
    src = models.make(tmp_path / "src", "mixtral")
    quantize_checkpoint(src, tmp_path / "dst")
    info = detect(tmp_path / "dst")
    assert info.tied_embeddings
    assert "lm_head.weight" not in models.read(tmp_path / "dst")


def test_compensation_state_is_stored_beside_the_shards(tmp_path: Path) -> None:
    """`quads/compensation.safetensors` reads back equal, is not taken for a shard, and shows in inspect."""
    site = SiteState(torch.arange(models.H).float(), torch.tensor([[True, False]]))
    state = CompensationState({"model.layers.0.mlp.experts.w13": site}, {"model.layers.0.mlp.experts.w13": 2.0})
    quantize_checkpoint(models.make(tmp_path / "src"), tmp_path / "dst", compensation=state)
    back = CompensationState.load(tmp_path / "dst")
    assert back is not None
    assert back.fingerprint() == state.fingerprint()
    report = inspect_checkpoint(tmp_path / "dst")
    assert report.ok
    assert report.compensation is not None
    assert (report.compensation["selected_blocks"], report.compensation["blocks"]) == (1, 2)
    assert report.calibrated
    CompensationState({name: SiteState.empty(site.center.numel()) for name in state.sites}).save(tmp_path / "dst")
    report = inspect_checkpoint(tmp_path / "dst")
    assert report.calibration is not None
    assert "compensation.safetensors is incomplete" in report.calibration


def test_input_scales(tmp_path: Path) -> None:
    """A static contract needs an input scale for every weight, and stores it in each format's direction."""
    src = models.make(tmp_path / "src")
    static = Contract.from_dict({"activation": {"global_scale": "static"}})
    with pytest.raises(ContractError, match=r"no input scale for model.layers.0.*use `token`"):
        quantize_checkpoint(src, tmp_path / "dst", contract=static)
    scales = dict.fromkeys(detect(src).weights, 0.25)
    quantize_checkpoint(src, tmp_path / "a", contract=static, input_scales=scales)
    quantize_checkpoint(src, tmp_path / "b", format="compressed-tensors", input_scales=scales)
    module = "model.layers.0.mlp.experts.0.down_proj"
    assert models.read(tmp_path / "a")[f"{module}.input_scale"] == 0.25
    assert models.read(tmp_path / "b")[f"{module}.input_global_scale"].tolist() == [4.0]


def test_foreign_formats_refuse_options_that_they_cannot_store(tmp_path: Path) -> None:
    """An RAC ratio would be lost in a ModelOpt checkpoint: said so instead."""
    contract = Contract().merged({"compensation": {"ratio": 0.5}})
    with pytest.raises(ContractError, match="compensation: the modelopt format cannot store it"):
        quantize_checkpoint(models.make(tmp_path / "src"), tmp_path / "dst", format="modelopt", contract=contract)


def test_small_shards(tmp_path: Path) -> None:
    """The shard size bounds the files; the index lists every tensor; the result is the same."""
    src = models.make(tmp_path / "src")
    one = quantize_checkpoint(src, tmp_path / "one")
    many = quantize_checkpoint(src, tmp_path / "many", max_shard_bytes=8192)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert max(f.stat().st_size for f in files) < 3 * 8192
    assert many.fingerprint == one.fingerprint
    assert (tmp_path / "one" / "model.safetensors").exists()
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == models.read(tmp_path / "many").keys()


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Progress counts source bytes upwards to their total."""
    calls: list[tuple[int, int, str]] = []
    quantize_checkpoint(models.make(tmp_path / "src"), tmp_path / "dst", progress=lambda *a: calls.append(a))
    done = [c[0] for c in calls]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == calls[-1][1] == detect_bytes(tmp_path / "src")


def detect_bytes(path: Path) -> int:
    return sum(t.nbytes for t in models.read(path).values())


def test_interrupted_run_leaves_no_checkpoint_and_restarts(tmp_path: Path) -> None:
    """An error half-way removes the partial directory; a killed run's leftovers are cleared by the next one."""
    src = models.make(tmp_path / "src")

    def stop(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(src, tmp_path / "dst", progress=stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]
    partial = tmp_path / ".dst.partial"
    (partial / "quads").mkdir(parents=True)
    (partial / "shard-00007.safetensors").write_bytes(b"half")
    report = quantize_checkpoint(src, tmp_path / "dst")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dst", "src"]
    assert fingerprint_checkpoint(tmp_path / "dst") == report.fingerprint


def test_killed_process_leaves_nothing_at_dst(tmp_path: Path) -> None:
    """SIGKILL in the middle: `dst` does not exist, and a second run completes."""
    src = models.make(tmp_path / "src")
    pid = os.fork()
    if pid == 0:
        quantize_checkpoint(
            src, tmp_path / "dst", max_shard_bytes=4096, progress=lambda d, t, n: d > t // 2 and os.kill(os.getpid(), 9)
        )
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    assert not (tmp_path / "dst").exists()
    assert (tmp_path / ".dst.partial").exists()
    quantize_checkpoint(src, tmp_path / "dst")
    assert inspect_checkpoint(tmp_path / "dst").ok


def test_two_writers_do_not_share_a_directory(tmp_path: Path) -> None:
    """A second process that writes to the same place is refused while the first is at it."""
    config, _ = models.family("qwen3")
    with CheckpointWriter(tmp_path / "dst", config=config):
        pid = os.fork()
        if pid == 0:
            try:
                CheckpointWriter(tmp_path / "dst", config=config)
            except CheckpointError as e:
                os._exit(7 if "another process" in str(e) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_existing_destination(tmp_path: Path) -> None:
    """A checkpoint is not touched unless told to, anything else never; replacing is one step."""
    src = models.make(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        quantize_checkpoint(src, tmp_path / "dst")
    assert (tmp_path / "dst" / "precious").exists()
    with pytest.raises(CheckpointError, match="holds no config.json, so it is no checkpoint and is not overwritten"):
        quantize_checkpoint(src, tmp_path / "dst", overwrite=True)
    assert (tmp_path / "dst" / "precious").exists()
    (tmp_path / "dst" / "config.json").write_text("{}")
    quantize_checkpoint(src, tmp_path / "dst", overwrite=True)
    assert not (tmp_path / "dst" / "precious").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file: is a file; choose a directory"):
        quantize_checkpoint(src, tmp_path / "file", overwrite=True)
    assert (tmp_path / "file").read_text() == "x"
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(CheckpointError, match="is the source itself"):
        quantize_checkpoint(src, src, overwrite=True)
    with pytest.raises(CheckpointError, match="holds the source"):
        quantize_checkpoint(src, tmp_path, overwrite=True)
    assert inspect_checkpoint(src).ok
    (tmp_path / "dst").rename(tmp_path / ".dst.replaced")  # what a kill between the two renames leaves
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        quantize_checkpoint(src, tmp_path / "dst")
    assert inspect_checkpoint(tmp_path / "dst").ok


def test_destination_behind_a_link(tmp_path: Path) -> None:
    """What the link points at is written and replaced; the link stays."""
    src = models.make(tmp_path / "src")
    (tmp_path / "link").symlink_to("disk")
    for overwrite in (False, True):
        quantize_checkpoint(src, tmp_path / "link", overwrite=overwrite)
        assert (tmp_path / "link").is_symlink()
        assert inspect_checkpoint(tmp_path / "disk").ok
    assert not list(tmp_path.glob(".*"))


def test_snapshot_of_links(tmp_path: Path) -> None:
    """A hub's snapshot directory is read through its links and copied as files; a link to nothing is an error."""
    src, snapshot = models.make(tmp_path / "src"), tmp_path / "snapshot"
    snapshot.mkdir()
    for path in src.iterdir():
        (snapshot / path.name).symlink_to(path)
    (src / "additional_chat_templates").mkdir()
    (src / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    (snapshot / "additional_chat_templates").symlink_to(src / "additional_chat_templates")
    quantize_checkpoint(snapshot, tmp_path / "dst")
    assert not any(p.is_symlink() for p in (tmp_path / "dst").iterdir())
    assert (tmp_path / "dst" / "additional_chat_templates" / "tool.jinja").read_text() == "{{ x }}"
    (src / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer.json: is a link to nothing"):
        quantize_checkpoint(snapshot, tmp_path / "dst2")


def test_full_disk(tmp_path: Path) -> None:
    """A file system that takes no more bytes: one error with the reason, nothing left behind."""
    src = models.make(tmp_path / "src")
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "from vllm_quads.cli.app import app\n"
        f"app(['quantize', {str(src)!r}, {str(tmp_path / 'dst')!r}, '--json'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stderr
    assert "dst: cannot be written (" in json.loads(run.stdout)["error"]["message"]
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_what_was_written_is_verified_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that returns other bytes than were written is noticed, and nothing appears at `dst`."""
    from vllm_quads.checkpoint import writer

    original = writer.save_file

    def corrupt(tensors: models.Tensors, path: Path, **kwargs: object) -> None:
        name = next(n for n, t in tensors.items() if t.dtype == torch.uint8)
        original({**tensors, name: tensors[name] ^ 1}, path, **kwargs)

    monkeypatch.setattr(writer, "save_file", corrupt)
    with pytest.raises(CheckpointError, match="reads back with fingerprint"):
        quantize_checkpoint(models.make(tmp_path / "src"), tmp_path / "dst")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.3.up_proj", "model.layers.0.self_attn.q_proj"])
def test_bad_weight_is_refused_by_name(tmp_path: Path, value: float, name: str) -> None:
    """NaN or Inf in a weight, quantized or not, stops the run with its name."""
    config, tensors = models.family("qwen3")
    tensors[f"{name}.weight"][3, 5] = value
    with pytest.raises(FormatError, match=f"{name}.*: holds NaN or Inf"):
        quantize_checkpoint(models.save(tmp_path / "src", config, tensors), tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_refusals(tmp_path: Path) -> None:
    """Already quantized, no experts under the default contract, K % 16, router and lm_head asked for."""
    src = models.make(tmp_path / "src")
    quantize_checkpoint(src, tmp_path / "q")
    with pytest.raises(CheckpointError, match=r"is already quantized \(quads\)"):
        quantize_checkpoint(tmp_path / "q", tmp_path / "qq")
    with pytest.raises(ContractError, match="no routed experts"):
        quantize_checkpoint(models.make(tmp_path / "dense", "dense"), tmp_path / "x")
    for target, reason in (("*.gate", "does not quantize a router"), ("lm_head", "does not quantize an lm_head")):
        with pytest.raises(ContractError, match=reason):
            quantize_checkpoint(src, tmp_path / "x", contract=Contract(targets=("*.experts.*", target)))
    config, tensors = models.family("qwen3")
    for n, t in tensors.items():
        if ".experts." in n:
            tensors[n] = (t[:, :40] if "down_proj" in n else t[:40]).contiguous()
    with pytest.raises(ContractError, match=r"mlp.experts.\d.down_proj: K = 40 is not a multiple of 16"):
        quantize_checkpoint(models.save(tmp_path / "k", config, tensors), tmp_path / "x")


def test_source_with_a_missing_expert_is_refused(tmp_path: Path) -> None:
    """config.json promises four experts; a layer with three is an incomplete download."""
    config, tensors = models.family("qwen3")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.2.up_proj: is missing \(1 of 12"):
        quantize_checkpoint(models.save(tmp_path / "src", config, tensors), tmp_path / "dst")
