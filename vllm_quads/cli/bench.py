# SPDX-License-Identifier: Apache-2.0
"""`quads bench`: moe, quantize, serve, logprobs, show."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_quads.cli.run import EXIT_CODES, Json, check_writable, print_json, progress, reporting, stdout_to_stderr
from vllm_quads.cli.run import INTERRUPTED as EXIT_INTERRUPTED

if TYPE_CHECKING:
    from vllm_quads.bench.result import Result

app = typer.Typer(
    name="bench",
    help="Measure the kernels and the engine on this GPU, beside vLLM's own, and write JSON and a plot.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Out = Annotated[Path, typer.Option(metavar="DIR", help="Where NAME.json and NAME.png are written.")]
_OUT = Path("quads-bench")


class Routing(str, Enum):
    """Who chooses the experts."""

    UNIFORM = "uniform"
    MODEL = "model"


class Weights(str, Enum):
    """What the engines load."""

    DUMMY = "dummy"
    RANDOM = "random"


@app.command(epilog=EXIT_CODES)
def moe(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="qwen3-30b-a3b, deepseek-v3-ep8 or mixtral-8x7b; repeatable. Default: the first."
        ),
    ] = None,
    experts: Annotated[int | None, typer.Option(help="A shape of your own: experts on this GPU.")] = None,
    top_k: Annotated[int | None, typer.Option(help="... experts per token that land on this GPU.")] = None,
    hidden: Annotated[int | None, typer.Option(help="... hidden size.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="... intermediate size of an expert, on this GPU.")] = None,
    tokens: Annotated[
        str, typer.Option(metavar="N,N,...", help="Tokens in the batch.")
    ] = "1,4,16,64,128,256,512,1024,4096",
    peers: Annotated[bool, typer.Option(help="Also measure vLLM's kernels, in the same process.")] = True,
    check: Annotated[bool, typer.Option(help="Compare outputs with FP64, up to 1024 tokens.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Timed replays of each kernel; the median counts.")] = 15,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """One MoE layer: µs of QUADS (plain, without RAC, RAC 25 % and 100 %) and of vLLM's BF16, FP8 and Marlin NVFP4.

    With the byte and FLOP floors from bandwidth and matmul speed measured in the same run, ratios, the cost of RAC, and
    the error against FP64. Needs an H100 or H200.
    """
    with reporting(as_json):
        from vllm_quads.bench.shapes import MoEShape, shape_named

        check_writable("--out", out)
        own = {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}
        shapes = [shape_named(name) for name in shape or ()]
        if any(v is not None for v in own.values()):
            absent = [f"--{k.replace('_', '-')}" for k, v in own.items() if v is None]
            if absent:
                raise typer.BadParameter(f"a shape of your own also needs {', '.join(absent)}")
            e, k, h, i = (v or 0 for v in own.values())
            shapes.append(MoEShape(f"e{e}-k{k}-h{h}-i{i}", e, k, h, i))
        counts = _integers("--tokens", tokens)
        results = []
        with stdout_to_stderr(), progress("moe") as update:
            from vllm_quads.bench.moe import run_moe

            for s in shapes or [shape_named("qwen3-30b-a3b")]:
                results.append(run_moe(s, counts, peers=peers, check=check, repeats=repeats, progress=update))
                _save(results[-1:], out)
        _report(results, out, as_json)


@app.command(epilog=EXIT_CODES)
def quantize(
    rows: Annotated[
        str, typer.Option(metavar="M,M,...", help="Rows of the activations.")
    ] = "1,16,64,256,1024,4096,16384,32768",
    channels: Annotated[str, typer.Option(metavar="K,K,...", help="Channels; one result for each.")] = "768,2048,7168",
    repeats: Annotated[int, typer.Option(min=1, help="Timed replays of each kernel; the median counts.")] = 15,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """Activation quantization with residual: µs a call, and the share of the copy bandwidth measured in the same run.

    Needs an H100 or H200; vLLM is not used.
    """
    with reporting(as_json):
        check_writable("--out", out)
        counts, ks = _integers("--rows", rows), _integers("--channels", channels)
        with stdout_to_stderr(), progress("quantize") as update:
            from vllm_quads.bench.quantize import run_quantize

            results = run_quantize(counts, ks, repeats=repeats, progress=update)
            _save(results, out)
        _report(results, out, as_json)


@app.command(epilog=EXIT_CODES)
def serve(
    engines: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Of bf16, fp8, fp8-block, marlin, quads and quads-plain.")
    ] = "bf16,fp8-block,marlin,quads",
    sequences: Annotated[str, typer.Option(metavar="N,N,...", help="Concurrent sequences.")] = "16,64,256",
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 64,
    output: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the Qwen3-30B-A3B.")] = 48,
    routing: Annotated[
        Routing,
        typer.Option(help="uniform: every token to random experts. model: the model's router, on random weights."),
    ] = Routing.UNIFORM,
    weights: Annotated[
        Weights | None,
        typer.Option(
            help="dummy: vLLM's. random: N(0, 0.02²), generated on the GPU. Default: dummy for uniform routing, "
            "random for the model's own."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the best counts.")] = 3,
    together: Annotated[
        bool,
        typer.Option("--together", help="Start as many engines as fit side by side; they generate in turn."),
    ] = False,
    kv_gib: Annotated[float, typer.Option(min=0.1, help="KV cache of each engine with --together.")] = 10.0,
    torch_compile: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="vLLM's torch.compile. Without it engines start sooner; decode is in CUDA graphs anyway.",
        ),
    ] = True,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that an engine may take to start, or to answer.")
    ] = 900,
    logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the engines' logs there.")] = None,
    count_experts: Annotated[
        bool,
        typer.Option(
            "--count-experts", help="Also count the experts that a decode step uses (starts one engine more)."
        ),
    ] = False,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """Whole engines: output tokens/s of QUADS, BF16, FP8 block and Marlin NVFP4, and the memory left for the KV cache.

    A Qwen3-30B-A3B without a checkpoint; one process per engine. Needs an H100 or H200 (140 GB for BF16) and vLLM.
    """
    with reporting(as_json):
        check_writable("--out", out)
        if logs is not None:
            check_writable("--logs", logs)
        with stdout_to_stderr(), progress("serve") as update:
            from vllm_quads.bench.serve import INTERRUPTED, ServeOptions, run_serve

            options = ServeOptions(
                engines=tuple(part.strip() for part in engines.split(",") if part.strip()),
                sequences=_integers("--sequences", sequences),
                prompt=prompt,
                output=output,
                layers=layers,
                routing=routing.value,
                weights=None if weights is None else weights.value,
                repeats=repeats,
                together=together,
                kv_gib=kv_gib,
                compile=torch_compile,
                timeout=timeout,
                logs=logs,
                count_experts=count_experts,
            )
            results = [run_serve(options, update)]
            _save(results, out)
        _report(results, out, as_json)
        if INTERRUPTED in results[0].missing:
            raise typer.Exit(EXIT_INTERRUPTED)


@app.command(epilog=EXIT_CODES)
def logprobs(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="BF16 checkpoint directory, the same on both machines.")
    ],
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Sample and decode here, and write what to compare with.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Decode the tokens recorded elsewhere, and compare.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the package to record.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer to record.")] = 32,
    nudge: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="With --against: also move this share of the activations by one BF16 value, at random."
        ),
    ] = 0.0,
    out: Out = _OUT,
    as_json: Json = False,
) -> None:
    """Log-probs on two machines, such as a CPU and a GPU: BF16, W4A4 and W4A4 with the residual, on the same tokens.

    First with --record on one machine, then with --against on the other. What BF16 shows is the drift of the engine;
    --nudge shows what each arm makes of rounding differences, on one machine.
    """
    with reporting(as_json):
        if (record is None) == (against is None):
            raise typer.BadParameter("give either --record or --against")
        if record is not None and nudge:
            raise typer.BadParameter("--nudge compares: give it with --against")
        check_writable("--out" if record is None else "--record", out if record is None else record.parent)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        with stdout_to_stderr(), progress("logprobs") as update:
            from vllm_quads.bench import logprobs as bench

            if record is not None:
                found = bench.record(model, bench.package_prompts(model, prompts), max_tokens, update)
                found.save(record)
            elif against is not None:
                results = [bench.run_logprobs(model, bench.Recording.load(against), update, nudge)]
                _save(results, out)
        if record is None:
            _report(results, out, as_json)
        elif as_json:
            print_json({"ok": True, "tokens": sum(map(len, found.tokens)), "files": [str(record)]})
        else:
            typer.echo(f"{sum(map(len, found.tokens))} tokens\nwritten: {record}")


@app.command(epilog=EXIT_CODES)
def show(
    result: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT.json|DIR...", help="Results written by this command, or folders of them."),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw the plots again, into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Print the tables of stored results, and draw their plots again. Needs no GPU.

    Files of other kinds are named and left out; if nothing is left, that is an error.
    """
    with reporting(as_json):
        from vllm_quads.bench.stored import files_of, load_results

        results, others = load_results(files_of(result))
        files = []
        if out is not None:
            check_writable("--out", out)
            from vllm_quads.bench.plot import plot

            files = [str(plot(r, out / f"{p.stem}.png")) for p, r in results.items()]
        for path, kind in others.items():
            typer.echo(f"not shown: {path}: {kind}", err=True)
        _print([*results.values()], files, as_json, not_shown={str(p): kind for p, kind in others.items()})


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as e:
        raise typer.BadParameter(f"{option}: {text!r} is not a list of numbers such as 1,16,64") from e
    if not values or min(values) < 1:
        raise typer.BadParameter(f"{option}: {text!r}: expected numbers of 1 or more")
    return tuple(sorted(set(values)))


def _save(results: Iterable[Result], out: Path) -> None:
    """JSON first: a missing matplotlib must not cost what took minutes to measure."""
    for r in results:
        r.save(out / f"{r.stem}.json")


def _report(results: list[Result], out: Path, as_json: bool) -> None:
    files = [str(out / f"{r.stem}.json") for r in results]
    try:
        from vllm_quads.bench.plot import plot

        files += [str(plot(r, out / f"{r.stem}.png")) for r in results]
    except ModuleNotFoundError as e:
        typer.echo(
            f"warning: no plot, {e.name} is not installed; `quads bench show --out DIR` draws it later", err=True
        )
    _print(results, files, as_json)
    if any(r.missing for r in results):
        typer.echo("warning: not everything was measured, see `missing`", err=True)


def _print(results: list[Result], files: list[str], as_json: bool, **more: dict[str, str]) -> None:
    if as_json:
        print_json({"ok": True, "results": [r.to_dict() for r in results], "files": files, **more})
        return
    from vllm_quads.bench.tables import markdown

    for r in results:
        typer.echo(markdown(r) + "\n")
    for file in files:
        typer.echo(f"written: {file}")
