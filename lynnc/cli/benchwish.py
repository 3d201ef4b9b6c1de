"""What ``lynnc bench`` was asked for: its options, and the ``Wish`` that they make with a model or a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lynnc.bench.session import Wish
from lynnc.bench.timing import Effort
from lynnc.cli.parameters import parse_programs
from lynnc.cli.subject import Subject
from lynnc.errors import OptionError
from lynnc.plan import Options
from lynnc.programs import prefill_programs
from lynnc.runtime.executor import DECODE

USUAL_CONTEXTS = "128,4096"


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    subject: str
    weights: Path | None
    random_weights: bool
    seed: int | None
    contexts: str | None
    prefill: str | None
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


def wish_of(arguments: Arguments) -> Wish:
    """The wish by itself, before anything is known of the model."""
    contexts = _numbers("--contexts", USUAL_CONTEXTS if arguments.contexts is None else arguments.contexts)
    prompts = () if arguments.prefill is None else _numbers("--prefill", arguments.prefill)
    programs = parse_programs(arguments.programs)
    if prefill_programs(programs) and not prompts:
        raise OptionError(
            f"--programs {arguments.programs}: prompts are measured by --prefill with their lengths; give it, or name "
            "decode/1 to decode/8 alone."
        )
    of_one_row = arguments.census or arguments.peer or (not prompts and (arguments.kernels or arguments.breakdown))
    if DECODE not in programs and of_one_row:
        raise OptionError(
            f"--programs {arguments.programs}: kernels, census and peer belong to {DECODE}; add it to the list."
        )
    return Wish(
        contexts=contexts,
        prompts=prompts,
        effort=Effort(arguments.repeats, arguments.steps),
        with_kernels=arguments.kernels or arguments.breakdown,
        with_marginal=arguments.breakdown,
        loads=arguments.loads,
        programs=programs,
    )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise OptionError(f"{option} {text}: write numbers above 0, such as 128,4096.")
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice:
        raise OptionError(f"{option} {text}: {twice} is given twice; name it once.")
    return numbers


def with_prompts(wish: Wish, subject: Subject) -> Wish:
    """The wish with programs for its prompts: those that were named, else all of the plan, or the compiler's usual."""
    if not wish.prompts:
        return wish
    most = subject.spec.max_context
    if max(wish.prompts) + 2 > most:
        raise OptionError(
            f"--prefill {','.join(map(str, wish.prompts))}: {subject.spec.name} has {most} positions, and a prompt "
            "needs two more than its tokens; choose shorter ones."
        )
    if prefill_programs(wish.programs):
        return wish
    known = subject.plan.programs if subject.plan else Options().programs
    found = prefill_programs(known)
    if not found:
        raise OptionError(f"{subject.folder} has no program for prompts: compile it with --programs decode/1,prefill.")
    return replace(wish, programs=(*wish.programs, *found))


def fitted(wish: Wish, subject: Subject, is_asked: bool) -> Wish:
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
