"""``lynnc completion``: the script with which a shell completes ``lynnc``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion", epilog='Example: eval "$(lynnc completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL: commands, options, models, targets, devices, passes, knobs, programs.

    bash and zsh evaluate it from their start-up file; fish reads it from
    ~/.config/fish/completions/lynnc.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    click.echo(kind(ctx.find_root().command, {}, "lynnc", "_LYNNC_COMPLETE").source())
