"""The command line's entry: which commands there are, and how every failure becomes one line and an exit code.

In: arguments. Out: what the command prints, and 0; 1 for our own failures, 2 for bad input, 130 after Ctrl-C. A
command's module is imported only when the command is run or its help is shown, so ``lynnc --help`` starts in no time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from lynnc.errors import LynncError, OptionError
from lynnc.version import VERSION

INTERRUPTED = 130
TERMINATED = 143


EXTRAS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **{name: (name, "weights") for name in ("torch", "safetensors", "xxhash", "tokenizers", "numpy")},
        "cuda": ("cuda-bindings", "runtime"),
        "gguf": ("gguf", "bench"),
        "optuna": ("optuna", "tune"),
    }
)
"""Package and extra of the modules that only some commands import; ``lynnc compile`` works without."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command lives (a module with a ``command``), the line that says what it does, and the extra that brings
    all it imports, where that is one."""

    module: str
    help: str
    extra: str = ""


COMMANDS: Mapping[str, Entry] = MappingProxyType(
    {
        "compile": Entry("lynnc.cli.compile", "Compile a model to a plan."),
        "show": Entry("lynnc.cli.show", "Print a model's graph, kernel choices, Triton source or PTX."),
        "explain": Entry("lynnc.cli.explain", "Print the bytes, FLOPs and speed ceilings of a model."),
        "report": Entry("lynnc.cli.report", "Write one HTML page about a plan."),
        "run": Entry("lynnc.cli.run", "Let a packed model go on with a text.", extra="run"),
        "eval": Entry("lynnc.cli.eval", "Measure how well a packed model predicts a text.", extra="run"),
        "import-config": Entry("lynnc.cli.import_config", "Write a model file from a published config.json."),
        "bench": Entry("lynnc.cli.bench", "Measure how fast a plan decodes on this machine's GPU."),
        "tune": Entry("lynnc.cli.tune", "Find the best knobs for every kernel on a GPU.", extra="tune"),
        "gate": Entry("lynnc.cli.gate", "Say whether a change of plan or weights may ship."),
        "pack": Entry("lynnc.cli.pack", "Pack a checkpoint into the layout that plans load."),
        "unpack": Entry("lynnc.cli.unpack", "Write a Hugging Face checkpoint from packed weights."),
        "inspect": Entry("lynnc.cli.inspect", "Say what a checkpoint or packed folder holds."),
        "routing": Entry("lynnc.cli.routing", "Count how a text's tokens choose their experts."),
        "prune": Entry("lynnc.cli.prune", "Choose the experts to keep from routing statistics."),
        "models": Entry("lynnc.cli.models", "List the models that come with lynnc."),
        "targets": Entry("lynnc.cli.targets", "List GPU architectures and devices."),
        "doctor": Entry("lynnc.cli.doctor", "Check tools, GPU and store of this machine."),
        "completion": Entry("lynnc.cli.completion", "Print the completion script of a shell."),
    }
)
"""Every command, in the order of the help."""


class Commands(click.Group):
    """The group of ``COMMANDS``; names and short helps are known without importing a command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        try:
            command = import_module(entry.module).command
        except ModuleNotFoundError as error:
            package, extra = EXTRAS.get((error.name or "").partition(".")[0], ("", ""))
            if not package:
                raise
            raise OptionError(
                f"lynnc {cmd_name} needs the Python package {package}: install lynnc with its extra, as in "
                f"`pip install -e '.[{entry.extra or extra}]'`."
            ) from None
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Like click's, but with the nearest command in the message."""
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"There is no command {args[0]}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of commands, or options of the group."""
        found = {name: entry for name, entry in COMMANDS.items() if name.startswith(incomplete)}
        names = [CompletionItem(name, help=entry.help) for name, entry in found.items()]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; our own errors become one line on standard error and their exit code."""
        try:
            super().invoke(ctx)
            sys.stdout.flush()
        except LynncError as error:
            if ctx.params["debug"]:
                raise
            complain(str(error))
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            _silence_output()

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Like click's, with usage errors in one line and 130 after Ctrl-C; leaves through ``SystemExit``."""
        try:
            code = super().main(args, "lynnc", complete_var, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.ClickException as error:
            complain(_sentence(error))
            code = 2
        except click.Abort:
            complain("interrupted.")
            code = INTERRUPTED
        sys.exit(code or 0)


def complain(message: str) -> None:
    """One line on standard error."""
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"lynnc: {' '.join(message.split())}", err=True)


def _sentence(error: click.ClickException) -> str:
    message = error.format_message().strip()
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else "lynnc"
    return f"{message}{'' if message[-1:] in '.?!' else '.'} Run `{path} --help`."


def _silence_output() -> None:
    """The reader has gone, as in ``lynnc show ... | head``: nothing more to say, now or at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=Commands, epilog="Example: lynnc compile lynn-27b-a3b --device spark")
@click.version_option(VERSION, message="lynnc %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Compile pruned mixture-of-experts language models to plans: GPU machine code and the launches of one step."""


def main() -> NoReturn:
    """Entry point of the ``lynnc`` command."""
    signal.signal(signal.SIGTERM, _terminate)
    cli.main()
    raise AssertionError("Commands.main leaves through SystemExit")


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """End as after an error, so that compiler processes and half-written folders go."""
    sys.exit(TERMINATED)
