"""What ``lynnc show`` and ``lynnc explain`` are about: a model, or a plan that was compiled from one.

In: the name of a shipped model, the path of a model file, a packed folder, or a plan folder. Out: a ``ModelSpec``, or
a ``Subject`` that also holds the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lynnc.activations import Settled, settle_activations
from lynnc.artifact import digest
from lynnc.cli.output import warn
from lynnc.compiler import model_of
from lynnc.errors import OptionError, PlanError
from lynnc.model import ModelSpec
from lynnc.modelfile import dump_model, load_model, shipped_models
from lynnc.plan import Options, Plan
from lynnc.planfile import PLAN_FILE, load_plan
from lynnc.runtime.weights.packedindex import MODEL_FILE
from lynnc.target import Target


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and the plan and its folder if one was named; ``options`` are the plan's, or made from the command's."""

    spec: ModelSpec
    options: Options
    plan: Plan | None = None
    folder: Path = Path()


def find_model(name: str) -> ModelSpec:
    """A shipped model by its name or as ``models/NAME.yaml``, a model file, or a packed folder, which holds one."""
    if is_packed(name):
        return load_model(str(Path(name) / MODEL_FILE))
    path = PurePosixPath(name)
    if path.parts == ("models", path.name) and path.stem in shipped_models() and not _is(Path.exists, Path(name)):
        return load_model(path.stem)
    return load_model(name)


def is_packed(name: str) -> bool:
    """Whether a folder of ``lynnc pack`` is meant."""
    return name not in shipped_models() and _is(Path.is_file, Path(name) / MODEL_FILE)


def is_plan(name: str) -> bool:
    """Whether a plan folder is meant rather than a model."""
    if name in shipped_models() or is_packed(name):
        return False
    return _is(Path.is_dir, Path(name)) or name.rstrip("/").endswith(".plan")


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    """Whether a path is of a kind; not, where nobody can look: it may be too long for a name, or out of bounds."""
    try:
        return kind(path)
    except OSError:
        return False


def find_subject(name: str, without: Sequence[str] = ()) -> Subject:
    """The model or plan; a plan brings its options, so ``without`` must be empty for one."""
    if not is_plan(name):
        return Subject(find_model(name), Options(without=tuple(without)))
    if without:
        raise OptionError(f"{name} is a plan and has its own passes: leave --without out, or name a model.")
    plan = load_plan(name)
    return Subject(plan_model(plan, Path(name)), plan.options, plan, Path(name))


def plan_model(plan: Plan, folder: Path) -> ModelSpec:
    """The model in a plan; PlanError if it is not the one whose digest the plan holds."""
    spec = model_of(plan, folder)
    if digest(dump_model(spec).encode()) != plan.model_digest:
        raise PlanError(
            f"{folder / PLAN_FILE}: the model does not fit its digest: "
            f"run `lynnc compile {plan.model_name} --target {plan.target}` again."
        )
    return spec


def settle_with_warning(subject: Subject, target: Target) -> Settled:
    """What a subject's options leave out and what the target cannot do; warns of declared activations not followed."""
    settled = settle_activations(subject.spec, target, subject.options.without)
    if settled.note:
        warn(settled.note)
    return settled
