"""A run of the tuner by the command line: storage, bench, search, and what becomes of the result."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from lynnc.autotune.budget import Budget
from lynnc.autotune.conditions import Conditions
from lynnc.autotune.gpubench import open_gpu_bench
from lynnc.autotune.noise import FLOOR, SIMULATED_FLOOR
from lynnc.autotune.problems import DECODE, Task, Wanted, tasks_of
from lynnc.autotune.publish import summary_of, write_records
from lynnc.autotune.search import Setting
from lynnc.autotune.simulatedbench import open_simulated_bench
from lynnc.autotune.storages import open_storage, runs_in
from lynnc.autotune.studies import Run
from lynnc.autotune.sweep import Sweep, Tried
from lynnc.autotune.synthetic import SyntheticBench, Traits
from lynnc.autotune.trial import Bench
from lynnc.autotune.tuner import About, Tuner
from lynnc.autotune.worker import Worker
from lynnc.cli.knownrecords import known_records, records_folder
from lynnc.cli.localplan import device_of
from lynnc.cli.output import note, print_json, warn
from lynnc.cli.parameters import store_path
from lynnc.cli.progress import tune_bar
from lynnc.cli.subject import find_model
from lynnc.cli.tunefleet import run_workers, worker_commands
from lynnc.cli.tunetables import print_sweep
from lynnc.cli.tunewish import REHEARSED_DEVICE, Arguments, Wish
from lynnc.compiler import Request
from lynnc.deviceidentity import Identity, identify, identity_of
from lynnc.errors import OptionError
from lynnc.jsonform import encode
from lynnc.model import ModelSpec
from lynnc.outputfile import write_file
from lynnc.plan import Options
from lynnc.recordfiles import check_records_folder
from lynnc.records import Records
from lynnc.runtime.cudadevice import open_device
from lynnc.store import Store, cache_folder
from lynnc.target import Device, find_device

REHEARSED_SECONDS = 0.01
"""What a measurement takes on the made-up device."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tuned: a model's tasks, for a device; ``gpu`` is what the driver calls it."""

    spec: ModelSpec
    device: Device
    identity: Identity
    gpu: str
    tasks: tuple[Task, ...]


def tune(arguments: Arguments, wish: Wish) -> None:
    """The whole of it; an interrupted run says how to go on."""
    budget = Budget(wish.seconds, wish.trials)
    subject = _subject(wish, arguments)
    if not (arguments.rehearse or arguments.search_only):
        check_records_folder(records_folder(arguments.records_folder), subject.identity)
    storage = arguments.storage or _usual_storage(subject)
    run = Run(open_storage(storage), _run_name(arguments, subject, storage), Worker.here(arguments.seed))
    with ExitStack() as stack:
        stack.callback(run.close)
        stack.enter_context(_telling_how_to_go_on(run.name))
        if len(wish.gpus) > 1:
            run_workers(worker_commands(arguments, wish, storage, run.name))
            if arguments.search_only:
                return
        bench = stack.enter_context(closing(open_bench(arguments, wish, subject)))
        tuner = _tuner(arguments, wish, subject, run, bench)
        if len(wish.gpus) == 1:
            _search(tuner, budget, arguments, wish, subject)
        if arguments.search_only:
            note(f"{budget.spent} candidates measured for the run {run.name}.")
            return
        known = _records(arguments, subject)
        sweep = tuner.conclude(budget, _about(arguments, wish, subject), known)
    _publish(arguments, subject, sweep)


def _subject(wish: Wish, arguments: Arguments) -> Subject:
    spec = find_model(wish.model)
    if wish.simulated or arguments.rehearse:
        device = wish.simulated or find_device(REHEARSED_DEVICE)
        identity, gpu = identity_of(device), f"{device.name}, not run"
    else:
        with closing(open_device(wish.gpus[0])) as opened:
            facts = opened.facts
        device, gpu = device_of(facts), facts.name
        identity = identify(facts.name, facts.capability, facts.sm_count, facts.l2_bytes)
    wanted = Wanted(device, wish.programs, wish.kernels, wish.without, Conditions().before(DECODE))
    return Subject(spec, device, identity, gpu, tasks_of(spec, wanted))


def _usual_storage(subject: Subject) -> str:
    folder = cache_folder(os.environ) / "tune"
    return str(folder / f"{subject.spec.name}.{subject.identity.name}.journal")


def _run_name(arguments: Arguments, subject: Subject, storage: str) -> str:
    """The name that was given, or the newest of this model and device for ``--resume``, or a new one."""
    kind = "rehearsed" if arguments.rehearse else "simulated" if arguments.simulate else "measured"
    start = f"{subject.spec.name}.{subject.identity.name}.{kind}."
    known = runs_in(open_storage(storage)) if arguments.resume else ()
    if arguments.resume:
        fitting = [
            name for name in known if name == arguments.study or (not arguments.study and name.startswith(start))
        ]
        if not fitting:
            what = arguments.study or f"a run of {subject.spec.name} on {subject.identity.name}"
            raise OptionError(f"--resume: the storage does not hold {what}; leave --resume out to begin.")
        return fitting[-1]
    return arguments.study or start + datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")


@contextmanager
def _telling_how_to_go_on(name: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        note(f"what was finished is kept in the run {name}: go on with --resume.")
        raise


def _search(tuner: Tuner, budget: Budget, arguments: Arguments, wish: Wish, subject: Subject) -> None:
    """Measures in this process, with a bar."""
    best: dict[str, float] = {}
    with tune_bar(wish.seconds, wish.trials) as bar:

        def say(task: Task, tried: Tried) -> None:
            if tried.outcome.is_timed:
                best[task.name] = min(tried.outcome.seconds, best.get(task.name, tried.outcome.seconds))
            if bar:
                bar(budget.seconds_spent, budget.spent, _line(task, tried, best.get(task.name)))

        tuner.search(budget, _records(arguments, subject), say)


def _tuner(arguments: Arguments, wish: Wish, subject: Subject, run: Run, bench: Bench) -> Tuner:
    ahead = max(8, 2 * len(os.sched_getaffinity(0)))
    floor = SIMULATED_FLOOR if wish.simulated else FLOOR
    setting = Setting(subject.device, Conditions().before(DECODE), arguments.seed, ahead, floor)
    return Tuner(subject.tasks, run, bench, setting, subject.identity)


def _about(arguments: Arguments, wish: Wish, subject: Subject) -> About:
    settings: Mapping[str, str | int] = {"seed": arguments.seed, "budget": wish.budget}
    if arguments.rehearse:
        settings = {**settings, "how": "a made-up device"}
    return About(subject.spec.name, subject.identity, bool(wish.simulated or arguments.rehearse), settings)


def open_bench(arguments: Arguments, wish: Wish, subject: Subject) -> Bench:
    """What measures: a GPU, a model of one, or a made-up device."""
    if arguments.rehearse:
        return SyntheticBench(subject.tasks, subject.device, Traits(measure_seconds=REHEARSED_SECONDS))
    store = Store(store_path(arguments.store), warn)
    options = Options(programs=_measured_programs(wish, subject.tasks), without=wish.without)
    records = _records(arguments, subject)
    request = Request(subject.device.target, subject.device, options, records=records)
    if wish.simulated:
        context = Conditions().before(DECODE)
        return open_simulated_bench(subject.spec, request, store, subject.tasks, context)
    return open_gpu_bench(subject.spec, request, store, wish.gpus[0])


def _measured_programs(wish: Wish, tasks: Sequence[Task]) -> tuple[str, ...]:
    """Those that were asked for, so that rows can be compared with other decode programs, and those of the tasks."""
    return tuple(dict.fromkeys([*wish.programs, *(task.program for task in tasks)]))


def _records(arguments: Arguments, subject: Subject) -> Records:
    """What the compiler would use now, of those that were asked for."""
    return known_records(subject.identity, arguments.records, arguments.records_folder)


def _line(task: Task, tried: Tried, best: float | None) -> str:
    found = f"{tried.outcome.seconds * 1e6:.2f} us" if tried.outcome.is_timed else tried.outcome.status.value
    return f"{task.program} {task.kernel.name}: {found}" + (f", best {best * 1e6:.2f} us" if best else "")


def _publish(arguments: Arguments, subject: Subject, sweep: Sweep) -> None:
    if not arguments.rehearse:
        folder = records_folder(arguments.records_folder)
        count = write_records(sweep, subject.identity, folder)
        note(f"{count} records of {subject.identity.name} written to {folder}.")
    summary = summary_of(sweep, subject.device.name, subject.gpu, Conditions().before)
    if arguments.output:
        write_file(arguments.output, encode(summary) + "\n", arguments.force)
    if arguments.as_json:
        print_json(summary)
    else:
        print_sweep(sweep)
