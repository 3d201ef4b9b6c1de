"""``lynnc bench``: how fast a plan decodes and reads prompts on this GPU, where the time goes, what memory it takes."""

from __future__ import annotations

import shlex
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lynnc.bench.census import census_of
from lynnc.bench.outcome import Outcome, records_of
from lynnc.bench.records import setting_of, write_records
from lynnc.bench.session import Session, Wish, open_session
from lynnc.cli.benchprompts import print_prompt_kernels, print_prompts
from lynnc.cli.benchreport import print_census, print_kernels, print_loads, print_memory, print_peer, print_steps
from lynnc.cli.benchwish import USUAL_CONTEXTS, Arguments, fitted, wish_of, with_prompts
from lynnc.cli.localplan import compile_here, device_of
from lynnc.cli.localplan import records_of as gpu_records
from lynnc.cli.output import note, print_json
from lynnc.cli.parameters import complete_models, json_option, store_option, store_path
from lynnc.cli.progress import bytes_bar
from lynnc.cli.subject import Subject, find_subject
from lynnc.errors import OptionError
from lynnc.outputfile import check_file
from lynnc.runtime.cudadevice import open_device
from lynnc.runtime.device import DeviceFacts
from lynnc.runtime.executor import DECODE
from lynnc.runtime.loader import programs_of
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.runtime.loading.packedfolder import PackedFolder
from lynnc.runtime.loading.weightsource import WeightSource
from lynnc.runtime.peers.llamabench import PeerRun, import_writer, measure_peer, parse_peer
from lynnc.runtime.weights.packedindex import read_index
from lynnc.target import Device, find_device


@click.command("bench", epilog="Example: lynnc bench qwen3.6-35b-a3b --random-weights --contexts 128,4096,32768")
@click.argument("subject", metavar="MODEL|PLAN", shell_complete=complete_models)
@click.option("--weights", type=click.Path(path_type=Path), help="Packed folder to load (`lynnc pack` makes one).")
@click.option("--random-weights", is_flag=True, help="Make random weights on the GPU, to measure speed alone.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Seed of --random-weights; 0 if not given.")
@click.option(
    "--contexts",
    metavar="LIST",
    help=f"Tokens before the ones decoded; if not given, of {USUAL_CONTEXTS} what fits.",
)
@click.option("--prefill", metavar="LIST", help="Lengths of prompts to measure, such as 16,64,512,2048,8192.")
@click.option(
    "--programs",
    default=DECODE,
    show_default=True,
    metavar="LIST",
    help="Step kinds to load: decode/1 to decode/8; with --prefill those of prompts, too, all if none is named.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=20, show_default=True, help="Runs of each measurement.")
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Steps of each run.")
@click.option("--kernels", is_flag=True, help="Time every kernel in a chain of its own launches.")
@click.option("--breakdown", is_flag=True, help="Like --kernels, and the step without each of them.")
@click.option("--memory", is_flag=True, help="Print the memory taken, by class.")
@click.option("--census", is_flag=True, help="Print the launches of a step.")
@click.option(
    "--loads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Times to load; from 2 on the first is cold.",
)
@click.option("--device", metavar="NAME", help="GPU whose figures and records count; by its name if not given.")
@click.option("--gpu", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the GPU to use.")
@click.option(
    "--peer",
    metavar="llama-bench=PATH",
    help="Run llama.cpp's benchmark on this shape, too; needs [bench].",
)
@click.option("--peer-folder", type=click.Path(path_type=Path), help="Where the peer's model is written meanwhile.")
@store_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write the records to, as JSON.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@json_option
def command(**options: Any) -> None:
    """Measure how fast a plan decodes, and reads prompts, on this machine's GPU.

    A model is compiled for the GPU first. Times are medians of repeated runs after a warm-up, by events on the GPU.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Checks what was asked for, loads, measures, prints; records are written even if a later measurement fails."""
    wish = wish_of(arguments)
    if arguments.output:
        check_file(arguments.output, arguments.force)
    source = _source(arguments)
    peer = _peer(arguments)
    subject = find_subject(arguments.subject)
    wish = with_prompts(wish, subject)
    if subject.plan:
        programs_of(subject.plan, wish.programs)
    wish = fitted(wish, subject, is_asked=arguments.contexts is not None)
    if arguments.device:
        find_device(arguments.device)
    outcome = Outcome()
    with ExitStack() as stack:
        opened = stack.enter_context(closing(open_device(arguments.gpu)))  # held, so that no load makes the context
        device = device_of(opened.facts, arguments.device)
        folder = subject.folder if subject.plan else _compile(arguments, wish, subject, opened.facts, stack)
        with bytes_bar("loading") as on_bytes:
            progress = (lambda done, total: on_bytes(done, total, "")) if on_bytes else None
            session = open_session(folder, source, wish, arguments.gpu, progress)
        stack.enter_context(session.executor)
        setting = setting_of(session.plan, opened.facts, {"weights": _weights_text(arguments)}, _command_line())
        try:
            _measure(arguments, session, wish, outcome)
            session.executor.close()
            opened.close()
            if peer:
                note("writing a model for llama-bench and running it")
                place = arguments.peer_folder or Path(tempfile.gettempdir())
                outcome.peers += measure_peer(peer, subject.spec, PeerRun(folder=place, contexts=wish.contexts))
        finally:
            if arguments.output:
                write_records(arguments.output, records_of(outcome, setting, device), arguments.force)
    if arguments.as_json:
        print_json([asdict(record) for record in records_of(outcome, setting, device)])
        return
    _print(arguments, outcome, device, wish)


def _measure(arguments: Arguments, session: Session, wish: Wish, outcome: Outcome) -> None:
    outcome.loads, outcome.memory = session.loads, session.memory
    outcome.census = census_of(session.executor, DECODE) if DECODE in wish.programs else None
    for step in session.step_times(wish, _say):
        outcome.steps.append(step)
    if wish.with_kernels and DECODE in wish.programs:
        for kernel in session.kernel_times(wish, _say):
            outcome.kernels.append(kernel)
    for prompt in session.prompt_times(wish, _say):
        outcome.prompts.append(prompt)
    if wish.with_kernels:
        for found in session.prompt_kernels(wish, _say):
            outcome.prompt_kernels.append(found)


def _say(what: str) -> None:
    if sys.stderr.isatty():
        note(what)


def _source(arguments: Arguments) -> WeightSource:
    if arguments.random_weights == (arguments.weights is not None):
        raise OptionError("Weights are needed, once: give --weights FOLDER or --random-weights.")
    if arguments.weights is None:
        return GeneratedWeights(arguments.seed or 0)
    if arguments.seed is not None:
        raise OptionError(f"--seed {arguments.seed} is the seed of --random-weights: leave it out with --weights.")
    read_index(arguments.weights)
    return PackedFolder(arguments.weights)


def _peer(arguments: Arguments) -> Path | None:
    """The peer's program; what is missing for it is said before anything is measured."""
    if not arguments.peer:
        if arguments.peer_folder:
            raise OptionError(
                f"--peer-folder {arguments.peer_folder} is where the model of --peer is written: give --peer, too, or "
                "leave it out."
            )
        return None
    program = parse_peer(arguments.peer)
    if arguments.peer_folder and not arguments.peer_folder.is_dir():
        raise OptionError(f"--peer-folder {arguments.peer_folder} is not a folder: make it, or choose another.")
    import_writer()
    return program


def _weights_text(arguments: Arguments) -> str:
    return "packed" if arguments.weights else f"random, seed {arguments.seed or 0}"


def _compile(arguments: Arguments, wish: Wish, subject: Subject, facts: DeviceFacts, stack: ExitStack) -> Path:
    device, records = device_of(facts, arguments.device), gpu_records(facts, arguments.device)
    plan = compile_here(subject.spec, device, records, wish.programs, store_path(arguments.store))
    return stack.enter_context(plan)


def _command_line() -> str:
    return shlex.join(["lynnc", *sys.argv[1:]])


def _print(arguments: Arguments, outcome: Outcome, device: Device, wish: Wish) -> None:
    print_loads(outcome.loads)
    if arguments.memory and outcome.memory:
        print_memory(outcome.memory)
    if arguments.census and outcome.census:
        print_census(outcome.census)
    if outcome.steps:
        print_steps(outcome.steps)
    if outcome.kernels:
        first = next(step for step in outcome.steps if step.rows == 1)
        print_kernels(outcome.kernels, first.step.median, device, wish.contexts[0])
    if outcome.prompts:
        print_prompts(outcome.prompts)
    for prompt, kernels in zip(outcome.prompts, outcome.prompt_kernels, strict=False):
        print_prompt_kernels(kernels, prompt, device)
    print_peer(outcome.peers, outcome.steps)
