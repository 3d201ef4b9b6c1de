"""``lynnc bench``: how fast a plan decodes on this machine's GPU, where the time goes, and what memory it takes."""

from __future__ import annotations

import shlex
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from lynnc.bench.census import census_of
from lynnc.bench.outcome import Outcome, records_of
from lynnc.bench.records import setting_of, write_records
from lynnc.bench.session import Session, Wish, open_session
from lynnc.bench.timing import Effort
from lynnc.cli.benchreport import print_census, print_kernels, print_loads, print_memory, print_peer, print_steps
from lynnc.cli.localplan import compile_here, device_of
from lynnc.cli.output import note, print_json
from lynnc.cli.parameters import complete_models, json_option, parse_programs, store_option, store_path
from lynnc.cli.progress import bytes_bar
from lynnc.cli.subject import Subject, find_subject
from lynnc.errors import OptionError
from lynnc.outputfile import check_file
from lynnc.programs import prefill_programs
from lynnc.runtime.cudadevice import open_device
from lynnc.runtime.executor import DECODE
from lynnc.runtime.loader import programs_of
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.runtime.loading.packedfolder import PackedFolder
from lynnc.runtime.loading.weightsource import WeightSource
from lynnc.runtime.peers.llamabench import PeerRun, import_writer, measure_peer, parse_peer
from lynnc.runtime.weights.packedindex import read_index
from lynnc.target import Device, find_device

USUAL_CONTEXTS = "128,4096"


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    subject: str
    weights: Path | None
    random_weights: bool
    seed: int | None
    contexts: str | None
    programs: str
    repeats: int
    steps: int
    kernels: bool
    breakdown: bool
    memory: bool
    census: bool
    loads: int
    device: str | None
    gpu: int
    peer: str | None
    peer_folder: Path | None
    store: Path | None
    output: Path | None
    force: bool
    as_json: bool


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
@click.option(
    "--programs", default=DECODE, show_default=True, metavar="LIST", help="Step kinds to load: decode/1 to decode/8."
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
    """Measure how fast a plan decodes on this machine's GPU.

    A model is compiled for the GPU first. Times are medians of repeated runs after a warm-up, by events on the GPU.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Checks what was asked for, loads, measures, prints; records are written even if a later measurement fails."""
    wish = _wish(arguments)
    if arguments.output:
        check_file(arguments.output, arguments.force)
    source = _source(arguments)
    peer = _peer(arguments)
    subject = find_subject(arguments.subject)
    if subject.plan:
        programs_of(subject.plan, wish.programs)
    wish = _fitted(wish, subject, is_asked=arguments.contexts is not None)
    if arguments.device:
        find_device(arguments.device)
    outcome = Outcome()
    with ExitStack() as stack:
        opened = stack.enter_context(closing(open_device(arguments.gpu)))  # held, so that no load makes the context
        device = device_of(opened.facts, arguments.device)
        folder = subject.folder if subject.plan else _compile(arguments, subject, device, stack)
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
                write_records(arguments.output, records_of(outcome, setting), arguments.force)
    if arguments.as_json:
        print_json([asdict(record) for record in records_of(outcome, setting)])
        return
    _print(arguments, outcome, device, wish)


def _measure(arguments: Arguments, session: Session, wish: Wish, outcome: Outcome) -> None:
    outcome.loads, outcome.memory = session.loads, session.memory
    outcome.census = census_of(session.executor, DECODE) if DECODE in wish.programs else None
    for step in session.step_times(wish, _say):
        outcome.steps.append(step)
    if wish.with_kernels:
        for kernel in session.kernel_times(wish, _say):
            outcome.kernels.append(kernel)


def _say(what: str) -> None:
    if sys.stderr.isatty():
        note(what)


def _wish(arguments: Arguments) -> Wish:
    contexts = _contexts(USUAL_CONTEXTS if arguments.contexts is None else arguments.contexts)
    programs = parse_programs(arguments.programs)
    if prefill_programs(programs):
        raise OptionError(f"--programs {arguments.programs}: prompts are not measured; name decode/1 to decode/8.")
    if DECODE not in programs and (arguments.kernels or arguments.breakdown or arguments.census or arguments.peer):
        raise OptionError(
            f"--programs {arguments.programs}: kernels, census and peer belong to {DECODE}; add it to the list."
        )
    return Wish(
        contexts=contexts,
        effort=Effort(arguments.repeats, arguments.steps),
        with_kernels=arguments.kernels or arguments.breakdown,
        with_marginal=arguments.breakdown,
        loads=arguments.loads,
        programs=programs,
    )


def _contexts(text: str) -> tuple[int, ...]:
    try:
        contexts = tuple(int(part) for part in text.split(","))
    except ValueError:
        contexts = (0,)
    if any(context < 1 for context in contexts):
        raise OptionError(f"--contexts {text}: write numbers above 0, such as 128,4096.")
    twice = next((context for context in contexts if contexts.count(context) > 1), None)
    if twice:
        raise OptionError(f"--contexts {text}: {twice} is given twice; name it once.")
    return contexts


def _fitted(wish: Wish, subject: Subject, is_asked: bool) -> Wish:
    """The wish, if the model has the positions for it; of the usual contexts those that it has."""
    most = subject.spec.max_context
    fitting = tuple(context for context in wish.contexts if replace(wish, contexts=(context,)).room <= most)
    if fitting and not is_asked:
        return replace(wish, contexts=fitting)
    if fitting != wish.contexts:
        raise OptionError(
            f"--contexts {','.join(map(str, wish.contexts))}: measuring there needs {wish.room} positions and "
            f"{subject.spec.name} has {most}; choose smaller ones."
        )
    return wish


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


def _compile(arguments: Arguments, subject: Subject, device: Device, stack: ExitStack) -> Path:
    programs = parse_programs(arguments.programs)
    return stack.enter_context(compile_here(subject.spec, device, programs, store_path(arguments.store)))


def _command_line() -> str:
    return shlex.join(["lynnc", *sys.argv[1:]])


def _print(arguments: Arguments, outcome: Outcome, device: Device, wish: Wish) -> None:
    print_loads(outcome.loads)
    if arguments.memory and outcome.memory:
        print_memory(outcome.memory)
    if arguments.census and outcome.census:
        print_census(outcome.census)
    print_steps(outcome.steps)
    if outcome.kernels:
        first = next(step for step in outcome.steps if step.rows == 1)
        print_kernels(outcome.kernels, first.step.median, device, wish.contexts[0])
    print_peer(outcome.peers, outcome.steps)
