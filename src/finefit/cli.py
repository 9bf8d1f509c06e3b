"""The command line: each verb is a call of something else. Imports torch only where a verb trains or talks.

Errors that are the user's print one message and a hint and exit with 2; Ctrl-C exits with 130.
"""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from . import words as words_of
from .environment import kept_process, steady_environment
from .errors import ConfigError, FinefitError, did_you_mean

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Fine-tune the LLM you want on the GPU you have.",
)  # fmt: skip

LogFormat = Annotated[str, typer.Option(help="auto, live, plain or json")]
MemoryLimit = Annotated[
    str | None, typer.Option(help="refuse tensors beyond this, as a smaller device would: to try what a run does then")
]
Adapt = Annotated[bool, typer.Option("--adapt", help="use memory that turns out to be free: a faster plan, once")]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        "--gpus-per-node",
        help="how many devices: 2, or cpu:4 for processes on this CPU; with --gpu, of those in a machine",
    ),
]
Words = Annotated[list[str] | None, typer.Argument(help="MODEL [DATA] or run.yaml, then key=value settings")]


def _not_empty(device: str | None) -> str | None:
    """A device that was named; an empty name is a variable of the shell that is not set, not this machine."""
    if device is not None and not device.strip():
        raise ConfigError("the device has an empty name", hint="say a name (RTX 4090), or leave it out: this machine")
    return device


@app.command()
def plan(  # noqa: PLR0913 (each is an option)
    words: Words = None,
    gpu: Annotated[
        str | None,
        typer.Option(callback=_not_empty, help="plan for this device: 'RTX 4090', H100, 24GiB; default: this machine"),
    ] = None,
    budget: Annotated[str | None, typer.Option(help="memory to use: 8GiB, 80%, -1GiB, 6GiB..8GiB")] = None,
    method: Annotated[str | None, typer.Option(help="full, lora, qlora or auto")] = None,
    max_length: Annotated[int | None, typer.Option(help="tokens of the longest example")] = None,
    devices: Devices = None,
    nodes: Annotated[int | None, typer.Option(help="machines that the devices are in, as many in each")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the plan here; train --plan obeys it")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
    deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="print the plan's ZeRO as DeepSpeed's settings (JSON)")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="also show each plan beside it, and why not that")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="simulate the plan on the real model beside the prediction (needs torch)")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="compare two plan files: plan --diff A.json B.json")] = False,
) -> None:
    """Predict memory and choose how to train, before anything runs."""
    from . import planning
    from .spec import resolve_model
    from .terminal.planned import plan_view

    if diff:
        _show_diff(words or [], as_json)
        return
    if words_of.is_foreign(words or []):
        unheard = {"--budget": budget, "--method": method, "--max-length": max_length, "-o": output}
        switches = {"--explain": explain, "--verify": verify, "--deepspeed": deepspeed}
        given = [
            option for option, value in {**unheard, **switches}.items() if value is not None and value is not False
        ]
        _foretell(words or [], gpu, words_of.count_of(devices), as_json, given)
        return
    gpu = words_of.of_machines(gpu, devices, nodes)
    here = [] if gpu else words_of.of_devices(devices)
    chosen = {"memory.budget": budget, "method": method, "train.max_length": max_length}
    said = [f"{key}={value}" for key, value in chosen.items() if value is not None]
    config = words_of.config_of(words or [], [*said, *here])
    data = None
    if config.data is not None:
        from .assets import model_folder
        from .examples import read_data, tokenizer_of

        words_of.check_data(config)
        data = read_data(config, tokenizer_of(model_folder(config.model).folder))
    model, hardware = resolve_model(config.model), words_of.over_nodes(planning.hardware_of(config, gpu), nodes)
    made = planning.make_plan(config, replace(model, name=planning.called(config)), hardware, data)
    if output:
        made.save(output)
    found = _verified(made, config, model, hardware, data) if verify else {}
    if deepspeed:
        print(json.dumps(planning.deepspeed_json(made, model), indent=1))
        return
    if as_json:
        print(json.dumps({**made.to_json(), **({"verified": found} if found else {})}, indent=1))
        return
    plan_view(made.to_json(), explain=explain)
    if found:
        from .terminal.verified import verified_view

        verified_view(found)


def _verified(made: Any, config: Any, model: Any, hardware: Any, data: Any) -> dict[str, Any]:
    from .foretell import config_json
    from .planning import batches_of
    from .verify import verify

    return verify(made, config_json(config.model), model, batches_of(config, model, data), hardware).to_json()


@app.command()
def train(
    words: Words = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="obey this plan file")] = None,
    devices: Devices = None,
    log_format: LogFormat = "auto",
    memory_limit: MemoryLimit = None,
    adapt: Adapt = False,
) -> None:
    """Fine-tune: finefit train MODEL DATA [key=value …], or finefit train run.yaml [key=value …]."""
    from . import session
    from .engines.local import Options
    from .launch import launch

    kept_process()
    config = words_of.config_of(words or [], words_of.of_devices(devices))
    if config.data is None:
        raise ConfigError("no data is named", hint="finefit train MODEL DATA, or data: in the run file")
    words_of.check_data(config)
    launch(lambda: session.new(config, plan_file), Options(log_format, memory_limit, adapt), resumed=False)


@app.command()
def launch(
    words: Words = None,
    nodes: Annotated[int, typer.Option(help="machines")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="devices of each")] = 8,
    host: Annotated[str, typer.Option(help="name or address of the first machine")] = "",
    form: Annotated[str, typer.Option("--for", help="torchrun, slurm, skypilot or ray")] = "torchrun",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write it to this file")] = None,
    run: Annotated[bool, typer.Option("--run", help="carry out this machine's line, as on each of the others")] = False,
) -> None:
    """Several machines: print the line for each, or a job file for a cluster; --run carries it out here."""
    from . import jobs

    job = jobs.Job(words_of.for_all(words or []), nodes, gpus_per_node, host)
    if run:
        jobs.run(job)
    jobs.write(jobs.text_of(job, form), output)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="the run's folder")],
    words: Annotated[
        list[str] | None, typer.Argument(help="memory.… or hardware.… settings to go on by another plan")
    ] = None,
    log_format: LogFormat = "auto",
    memory_limit: MemoryLimit = None,
    adapt: Adapt = False,
) -> None:
    """Go on with a run that was stopped or killed, exactly where its last checkpoint was."""
    from . import session
    from .engines.local import Options
    from .launch import launch

    kept_process()
    launch(lambda: session.again(run, words or ()), Options(log_format, memory_limit, adapt), resumed=True)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="the run's folder")],
    md: Annotated[bool, typer.Option("--md", help="print the Markdown instead")] = False,
) -> None:
    """What a run did: loss, memory predicted beside measured, an example before and after."""
    from .report.markdown import to_markdown
    from .report.summary import summarize_run
    from .report.text import to_text

    summary = summarize_run(run)
    print(to_markdown(summary, str(run), ()) if md else to_text(summary, str(run)))


@app.command()
def chat(
    run: Annotated[Path, typer.Argument(help="a run's folder, or a model")],
    base: Annotated[bool, typer.Option("--base", help="talk to the model as it was before training")] = False,
    max_tokens: Annotated[int, typer.Option(help="longest answer")] = 256,
) -> None:
    """Talk to the result in the terminal."""
    steady_environment()
    from .chat import talk

    talk(run, base, max_tokens)


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="the folder of a run with lora or qlora, or of an adapter of peft's")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="the merged model's folder; default: merged, in there")
    ] = None,
    base: Annotated[str | None, typer.Option(help="the model it was trained on, where that is not as noted")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: as the base's files")
    ] = None,
) -> None:
    """Add a trained adapter into its base: a plain model folder, made in a few MiB whatever the model's size."""
    steady_environment()
    from .merge import merge as merging

    done = merging(adapter, output, base, dtype, lambda file: print(f"merging {file}", file=sys.stderr))
    print(f"merged: {done.folder}  ({done.says()})", file=sys.stderr)
    if done.minds():
        print(f"warning: {done.minds()}", file=sys.stderr)


@app.command()
def doctor(
    probe: Annotated[bool, typer.Option("--probe", help="measure this machine's rates and remember them")] = False,
) -> None:
    """What this machine can do, what is missing and the command that mends it; 1 when something keeps it from training."""
    from . import doctor as examination

    if not examination.show(probe=probe).is_healthy:
        raise typer.Exit(1)


@app.command()
def catalog(
    kind: Annotated[str, typer.Argument(help="models, gpus or hosts")],
    word: Annotated[str | None, typer.Argument(help="only those with this in a name")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON with every name and exact numbers")] = False,
) -> None:
    """What finefit knows by name: models, GPUs and slices of them, machines."""
    from .inventory import rows
    from .terminal.listing import show

    show(kind, rows(kind, word), as_json=as_json)


@app.command()
def fits(
    device: Annotated[
        str | None, typer.Argument(callback=_not_empty, help="24GiB, 'RTX 4090', H100; default: this machine")
    ] = None,
    method: Annotated[str | None, typer.Option(help="full, lora or qlora; default: each of them")] = None,
    model: Annotated[str, typer.Option(help="only models with this in their name")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON with exact numbers")] = False,
) -> None:
    """What fits a device: every known model, by method the longest example (in steps of 512 tokens), and how fast."""
    from .candidates import METHODS
    from .fits import fits
    from .hardware import HardwareSpec
    from .terminal.fitting import show_fits

    chosen = [known for known in METHODS if method in (None, "auto", known)]
    if not chosen:
        hint = did_you_mean(str(method), METHODS) or f"say {', '.join(METHODS)}"
        raise ConfigError(f"there is no method '{method}'", hint=hint)
    hardware = HardwareSpec.from_name(device) if device else HardwareSpec.of_this_machine()
    show_fits(fits(hardware, chosen, model), as_json=as_json)


def _foretell(words: list[str], gpu: str | None, devices: int | None, as_json: bool, given: list[str]) -> None:
    """``given`` are options that only finefit's own runs have."""
    from . import foretell as foretelling
    from .config.dialects import read
    from .hardware import HardwareSpec
    from .terminal.foretold import foretold_view, waiting

    path = foretelling.asked(words, devices, given)
    hardware = HardwareSpec.from_name(gpu) if gpu else HardwareSpec.of_this_machine()
    count = devices or (hardware.count if hardware.count > 1 else None)
    foreign = read(path, count)
    with waiting():
        told = foretelling.foretell(foreign, hardware).to_json()
    if as_json:
        print(json.dumps(told, indent=1))
    else:
        foretold_view(told)


def _show_diff(words: list[str], as_json: bool) -> None:
    from .plan import diff, load
    from .terminal.planned import diff_view

    if len(words) != 2:
        raise ConfigError("--diff compares two plan files", hint="finefit plan --diff A.json B.json")
    a, b = (load(Path(word)) for word in words)
    rows = diff(a, b)
    if as_json:
        print(json.dumps([{"what": what, "a": one, "b": other} for what, one, other in rows], indent=1))
    else:
        diff_view(rows, words)


def main() -> None:
    """Entry point: errors of the user's become one message, exit code 2; an interrupt 130; ours keep their traceback.

    A reader that has gone away (head, a pager) ends it with 141, as the signal would.
    """
    signal.signal(signal.SIGINT, _interrupted)
    try:
        _carried_out()
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, BrokenPipeError):  # the framework and the tables make it a plain 1
            raise
        code = 141
    except BrokenPipeError:
        code = 141
    except OSError as error:
        if error.filename is not None or not _output_fails():
            raise
        hint = "free some space, or send it elsewhere"
        print(f"error: the output could not be written: {error.strerror or error}\nhint: {hint}", file=sys.stderr)
        code = FinefitError.exit_code
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes nowhere, without a word
    raise SystemExit(code)


def _carried_out() -> None:
    """The verb; what it printed has left this process at the end, or the error says why not."""
    try:
        app()
    except FinefitError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    finally:
        if sys.stdout is not None:  # closed by who started this
            sys.stdout.flush()


def _output_fails() -> bool:
    """Whether it is the standard output that takes no more, rather than a file of ours."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _interrupted(_number: int, _frame: Any) -> None:
    """Ctrl-C outside the training loop, which has its own way to stop: nothing is half done, so leave."""
    print("interrupted", file=sys.stderr)
    raise SystemExit(130)


def _version(value: bool) -> None:
    if value:
        print(f"finefit {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    _v: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = False,
) -> None:
    pass
