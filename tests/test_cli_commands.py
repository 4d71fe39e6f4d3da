# SPDX-License-Identifier: Apache-2.0
"""The `quads` command: exit codes, JSON on a clean stdout, errors as one line."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import checkpoint_models as models
import pytest
import torch
from typer.testing import CliRunner

from vllm_quads.checkpoint import detect, quantize_checkpoint
from vllm_quads.cli.app import app
from vllm_quads.cli.options import parse_options
from vllm_quads.cli.run import check_writable
from vllm_quads.compensation import CompensationState
from vllm_quads.nvfp4 import Contract

RUNNER = CliRunner()


def quads(*arguments: object, code: int = 0) -> Any:
    """Run a command in this process; checks the exit code."""
    result = RUNNER.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
    return result


@pytest.fixture
def bf16(tmp_path: Path) -> Path:
    """A BF16 checkpoint in one shard."""
    return models.make(tmp_path / "bf16", shards=1)


def test_help_is_fast_and_names_the_exit_codes() -> None:
    """`quads --help` does not import torch (a fifth of a second on a quiet machine), and names every command."""
    code = "import sys; from vllm_quads.cli.app import app; app(['--help'], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for command in ("quantize", "inspect", "gap", "doctor", "bench"):
        assert command in run.stdout
        assert "Exit codes: 0 success; 1" in " ".join(quads(command, "--help").stdout.split())


@pytest.mark.parametrize("fmt", ["quads", "modelopt", "compressed-tensors"])
def test_quantize_and_inspect(bf16: Path, tmp_path: Path, fmt: str) -> None:
    """Both commands agree on the fingerprint, in JSON and in text."""
    made = json.loads(quads("quantize", bf16, tmp_path / "q", "--format", fmt, "--json").stdout)
    assert made["ok"]
    assert made["format"] == fmt
    seen = json.loads(quads("inspect", tmp_path / "q", "--json").stdout)
    assert seen["ok"]
    assert seen["fingerprint"] == made["fingerprint"]
    assert made["quantized"] == models.LAYERS * models.EXPERTS * 3
    text = quads("inspect", tmp_path / "q").stdout
    assert made["fingerprint"] in text
    assert "mlp.experts[4].up_proj" in text


def test_options_reach_the_contract(bf16: Path, tmp_path: Path) -> None:
    """--option sets nested options, numbers and lists; the checkpoint stores them."""
    options = ["-o", "compensation.ratio=0.5", "-o", "scheme=w4a16", "-o", "targets=*.experts.*,*.self_attn.*"]
    quads("quantize", bf16, tmp_path / "q", *options)
    contract = detect(tmp_path / "q").contract
    assert contract == Contract().merged(
        {"compensation": {"ratio": 0.5}, "scheme": "w4a16", "targets": ["*.experts.*", "*.self_attn.*"]}
    )


@pytest.mark.parametrize(
    ("pairs", "options"),
    [
        (["a.b=1", "a.c=x"], {"a": {"b": 1, "c": "x"}}),
        (["ignore=p, q"], {"ignore": ["p", "q"]}),
        (['targets=["x,y"]'], {"targets": ["x,y"]}),
        (["form=none"], {"form": "none"}),
        ([], {}),
    ],
)
def test_parse_options(pairs: list[str], options: dict[str, Any]) -> None:
    """JSON where it parses, strings else; lists by commas."""
    assert parse_options(pairs) == options


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-o", "compensation.ration=0.5"], 1, "error: compensation.ration: unknown option"),
        (["-o", "compensation.ratio=2"], 1, "error: compensation.ratio: is 2.0, expected 0 to 1"),
        (["-o", "targets=*.gate"], 1, "QUADS does not quantize a router"),
        (["-o", "scheme"], 2, "is not key=value"),
        (["-o", "scheme=w4a4", "-o", "scheme=w4a16"], 2, "is given twice"),
        (["--format", "gguf"], 2, "gguf"),
        (["--device", "tpu"], 2, "is not cpu, cuda, cuda:N or auto"),
        (["--device", "cudafoo"], 2, "is not cpu, cuda, cuda:N or auto"),
        (["--device", "cuda:99"], 2, "cuda:99 is not here"),
        (["--shard-gib", "inf"], 2, "--shard-gib"),
        (["-o", "a..b=1"], 2, "'a..b' is not the name of an option"),
        (["-o", "compensation=rows"], 1, "error: compensation: is 'rows', expected an object"),
        (["-o", "version=true"], 1, "error: version: this contract has version True"),
        (["-o", "keep_first_layers=99"], 1, "keep_first_layers and keep_last_layers keep all of its 3 layers"),
        (["-o", "ignore=*"], 1, "`ignore` excludes all that they match"),
        (["--calibrate", sys.executable], 1, "is not UTF-8 text"),
        (["-o", "activation.global_scale=static"], 1, "calibrate"),
        (["--calibrate", "/nowhere/prompts.txt"], 1, "/nowhere/prompts.txt: No such file"),
    ],
)
def test_bad_use_of_quantize(bf16: Path, tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    """Usage errors exit with 2, contract errors with 1; one line, no traceback, nothing at the destination."""
    result = quads("quantize", bf16, tmp_path / "q", *arguments, code=code)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output
    if code == 1:
        assert len(result.stderr.strip().splitlines()) <= 2  # a progress line may precede the error
    assert not (tmp_path / "q").exists()


def test_errors_in_json(tmp_path: Path) -> None:
    """With --json an error is one object on stdout and one line on stderr."""
    result = quads("inspect", tmp_path / "nothing", "--json", code=1)
    error = json.loads(result.stdout)
    assert error["ok"] is False
    assert error["error"]["type"] == "CheckpointError"
    assert "is not a directory" in error["error"]["message"]
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_usage_errors_in_json(bf16: Path, tmp_path: Path) -> None:
    """A bad value of an option is a JSON object as well, with exit code 2."""
    for arguments in (["-o", "scheme"], ["--device", "tpu"]):
        result = quads("quantize", bf16, tmp_path / "q", *arguments, "--json", code=2)
        assert json.loads(result.stdout)["error"]["type"] == "UsageError"
        assert arguments[0].lstrip("-")[0] in json.loads(result.stdout)["error"]["message"]


def test_inspect_of_a_broken_checkpoint_fails(bf16: Path, tmp_path: Path) -> None:
    """Exit code 1, every problem on stderr, the rest of the report still there."""
    quantize_checkpoint(bf16, tmp_path / "q")
    name = "model.layers.0.mlp.experts.1.up_proj"

    def damage(tensors: models.Tensors) -> None:
        tensors[f"{name}.weight_scale"].view(torch.uint8)[0, 0] = 0x7F
        del tensors["model.layers.1.mlp.experts.0.down_proj.weight_scale_2"]

    models.edit(tmp_path / "q", damage)
    result = quads("inspect", tmp_path / "q", code=1)
    assert f"error: {name}: 1 block scales are NaN" in result.stderr
    assert "error: model.layers.1.mlp.experts.0.down_proj.weight_scale_2: is missing" in result.stderr
    assert "broken" in result.stdout
    report = json.loads(quads("inspect", tmp_path / "q", "--json", code=1).stdout)
    assert len(report["problems"]) == 2
    assert report["fingerprint"] is None


def test_warning_for_an_ignore_that_matches_nothing(bf16: Path, tmp_path: Path) -> None:
    """Shown as one line on stderr; stdout stays JSON."""
    result = quads("quantize", bf16, tmp_path / "q", "-o", "ignore=*.q_prj", "--json")
    assert json.loads(result.stdout)["ok"]
    assert "warning: ignore: pattern '*.q_prj' matches no weight" in result.stderr


def test_existing_destination_needs_overwrite(bf16: Path, tmp_path: Path) -> None:
    """A second run says what is in the way, and replaces it when told to."""
    quads("quantize", bf16, tmp_path / "q")
    assert "exists and is not empty" in quads("quantize", bf16, tmp_path / "q", code=1).stderr
    quads("quantize", bf16, tmp_path / "q", "--overwrite")


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions, the entry point, the backend with its reason, and the self-check; all in one JSON object."""
    found = json.loads(quads("doctor", "--quick", "--json").stdout)
    checks = {c["name"]: c for c in found["checks"]}
    assert checks["reference on cpu"]["ok"]
    assert checks["plugin entry point"]["detail"].endswith("vllm_quads:register")
    assert found["environment"]["torch"] == torch.__version__
    assert found["devices"][0]["backend"] == "torch"
    assert found["devices"][0]["reason"]
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS=other excludes it" in quads("doctor", "--quick", code=3).stdout


def test_doctor_notices_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device (here: a patched reference) that rounds differently fails the self-check with exit code 1."""
    from vllm_quads.nvfp4 import reference

    monkeypatch.setattr(reference, "_ONE_SIXTH", 0.16666668)
    result = quads("doctor", "--quick", code=1)
    assert "computes other bytes for" in result.stdout


def test_missing_package_is_an_environment_error(bf16: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without transformers, --calibrate exits with 3 and says what to install."""
    (tmp_path / "p.txt").write_text("hello\n")
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = quads("quantize", bf16, tmp_path / "q", "--calibrate", tmp_path / "p.txt", code=3)
    assert "'transformers' is not installed: pip install 'vllm-quads[trainer]'" in result.stderr


def _mixtral(path: Path) -> Path:
    """A real tiny Mixtral with a tokenizer, saved by transformers."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as tokenizer_models
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    vocabulary = {"<unk>": 0, **{f"w{i}": i for i in range(1, 64)}}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)
    return path


def test_calibrate(tmp_path: Path) -> None:
    """--calibrate stores channel sets, centring and input scales with the checkpoint; stdout stays JSON."""
    src = _mixtral(tmp_path / "src")
    (tmp_path / "prompts.txt").write_text("w1 w2 w3\n\nw9 w8 w7 w6\n")
    options = ["--calibrate", tmp_path / "prompts.txt", "--calibration-tokens", 8]
    made = json.loads(
        quads("quantize", src, tmp_path / "q", *options, "-o", "activation.global_scale=static", "--json").stdout
    )
    assert made["calibrated"]
    state = CompensationState.load(tmp_path / "q")
    assert state is not None
    assert set(state.sites) == {f"model.layers.{i}.mlp.experts.{s}" for i in (0, 1) for s in ("w13", "w2")}
    seen = json.loads(quads("inspect", tmp_path / "q", "--json").stdout)
    assert seen["compensation"]["selected_blocks"] > 0
    assert seen["calibrated"] is True
    assert seen["calibration"] is None
    assert "not calibrated" not in quads("inspect", tmp_path / "q").stdout
    scale = models.read(tmp_path / "q")["model.layers.0.block_sparse_moe.experts.0.w1.input_scale"]
    assert 1e-5 < scale < 0.1


@pytest.mark.parametrize(
    ("change", "says", "code"),
    [
        (lambda dst: (dst / "other").mkdir(parents=True), "exists and is not empty", 1),
        (lambda dst: dst.touch(), "is a file", 1),
        (lambda dst: None, "no weight", 1),
        (lambda dst: None, "cannot store it", 1),
        (lambda dst: dst.parent.rmdir() or dst.parent.touch(), "not a directory that can be written to", 2),
    ],
    ids=["in the way", "a file", "nothing matches", "format", "unwritable"],
)
def test_what_is_in_the_way_is_said_before_the_calibration(
    bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, says: str, code: int
) -> None:
    """--calibrate takes minutes: what headers and options tell is told before."""
    from vllm_quads.cli import calibration

    monkeypatch.setattr(calibration, "calibrate_checkpoint", Mock(side_effect=AssertionError("calibrated")))
    (tmp_path / "in").mkdir()
    change(tmp_path / "in" / "dst")
    options = {
        "no weight": ["-o", "targets=*.x"],
        "cannot store it": ["-o", "compensation.ratio=0.5", "--format", "modelopt"],
    }
    prompts = tmp_path / "prompts.txt"
    prompts.touch()
    result = quads(
        "quantize", bf16, tmp_path / "in" / "dst", "--calibrate", prompts, *options.get(says, []), "--json", code=code
    )
    assert says in json.loads(result.stdout)["error"]["message"]


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        (
            {},
            [
                "no block for RAC is chosen: prompt tokens are not compensated (on Hopper they are)",
                "no channel is centred",
            ],
        ),
        ({"activation.centering": "none", "compensation.form": "blocks"}, ["is chosen: tokens are not compensated"]),
        ({"compensation.form": "rows"}, ["no channel is centred"]),
        ({"compensation.form": "rows", "activation.centering": "none"}, []),
        ({"scheme": "w4a16"}, []),
    ],
)
def test_a_checkpoint_without_calibration_says_so(
    bf16: Path, tmp_path: Path, options: dict[str, str], lacking: list[str]
) -> None:
    """inspect and quantize say what a contract wants and the checkpoint lacks, and what to do; else nothing."""
    arguments = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    made = quads("quantize", bf16, tmp_path / "q", *arguments).stdout
    seen = json.loads(quads("inspect", tmp_path / "q", "--json").stdout)
    assert seen["ok"]
    text = quads("inspect", tmp_path / "q").stdout
    if not lacking:
        assert (seen["calibrated"], seen["calibration"]) == (None, None)
        assert "not calibrated" not in made + text
        return
    assert seen["calibrated"] is False
    assert seen["calibration"] in made
    assert seen["calibration"] in text
    assert seen["calibration"].startswith("not calibrated: quads/compensation.safetensors is not there")
    assert "--calibrate PROMPTS.txt" in seen["calibration"]
    assert all(part in seen["calibration"] for part in lacking)
    assert ("centred" in seen["calibration"]) == any("centred" in part for part in lacking)


def test_gap_passes_its_options_and_keeps_stdout_clean(
    bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`quads gap` hands every option to `run_gap`, prints its report, and writes both files with --out."""
    from vllm_quads import gap
    from vllm_quads.gap import GapOptions, GapReport, GapRow

    seen: list[GapOptions] = []

    def fake(model: Path, options: GapOptions, progress: Any) -> GapReport:
        seen.append(options)
        progress(0, 1, "step")
        rows = tuple(
            GapRow(trainer, rollout, kl, 0.1, 0.2, 0.3, kl, 0.9)
            for trainer in ("BF16", "QAT")
            for rollout, kl in (("BF16", 0.001), ("W4A4", 0.1))
        )
        return GapReport(model.name, rows, 7, {}, {}, {}, {"trainer": "cpu", "rollout": "cuda (X)"})

    monkeypatch.setattr(gap, "run_gap", fake)
    options = ["--arms", "quick", "--max-tokens", 5, "--seed", 3, "--target", "*.x", "--out", tmp_path / "out"]
    options += ["--trainer-device", "cpu"]
    report = json.loads(quads("gap", bf16, *options, "--json").stdout)
    assert report["rows"][3]["removed"] == 0.0
    assert (seen[0].arms, seen[0].max_tokens, seen[0].seed, seen[0].targets) == ("quick", 5, 3, ("*.x",))
    assert seen[0].trainer_device == "cpu"
    assert report["devices"] == {"trainer": "cpu", "rollout": "cuda (X)"}
    assert (tmp_path / "out" / "gap.png").exists()
    table = quads("gap", bf16).stdout
    assert "W4A4" in table
    assert "trainer on cpu, rollout on cuda (X)" in " ".join(table.split())
    assert seen[1].trainer_device == "auto"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that must be missing here is there")
def test_gap_without_the_gpu_that_was_asked_for(bf16: Path) -> None:
    """--trainer-device cuda without a GPU ends before any engine starts, with the exit code for what is missing."""
    result = quads("gap", bf16, "--trainer-device", "cuda", "--json", code=3)
    assert "finds no GPU" in json.loads(result.stdout)["error"]["message"]


def test_gap_of_no_checkpoint(tmp_path: Path) -> None:
    """A directory that is not there is named before anything is loaded."""
    message = f"error: {tmp_path / 'no'}: is not a directory"
    assert message in " ".join(quads("gap", tmp_path / "no", code=1).stderr.split())


def test_progress_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal progress is a line per tenth, and one more where a step begins 15 s after the last line."""
    from vllm_quads.cli.run import _PlainProgress

    clock = [0.0]
    monkeypatch.setattr("vllm_quads.cli.run.time.monotonic", lambda: clock[0])
    report = _PlainProgress("gap")
    for done, seconds in ((0, 0.0), (1, 3.0), (2, 20.0), (3, 21.0), (20, 22.0)):
        clock[0] = seconds
        report(done, 100, f"step {done}")
    assert capsys.readouterr().err.splitlines() == ["gap: 0 % step 0", "gap: 2 % step 2", "gap: 20 % step 20"]


@pytest.mark.parametrize("command", ["moe", "quantize", "serve", "logprobs", "gap"])
def test_measurements_ask_for_their_folder_first(command: str, tmp_path: Path) -> None:
    """A result that cannot be written is known before it is measured: usage error, and a JSON object with --json."""
    (tmp_path / "file").touch()
    arguments = {"logprobs": [tmp_path, "--against", tmp_path / "file"], "gap": [tmp_path]}.get(command, [])
    result = quads(
        *(["gap"] if command == "gap" else ["bench", command]),
        *arguments,
        "--out",
        tmp_path / "file" / "out",
        "--json",
        code=2,
    )
    assert json.loads(result.stdout)["error"]["message"] == (
        f"--out: {tmp_path / 'file'} is not a directory that can be written to (Not a directory)"
    )


def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses, whatever its permissions say, is noticed before anything is measured; what is asked
    leaves nothing behind, no folder either."""

    def refused(dir: Path) -> None:
        assert dir == tmp_path
        raise OSError(errno.EROFS, "Read-only file system")

    check_writable("--out", tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    result = quads("bench", "moe", "--out", tmp_path / "a" / "b", "--json", code=2)
    message = json.loads(result.stdout)["error"]["message"]
    assert message == f"--out: {tmp_path} is not a directory that can be written to (Read-only file system)"
