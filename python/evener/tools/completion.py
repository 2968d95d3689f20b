"""`evener completion`: the script by which a shell completes `evener`'s commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

WHERE = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc",
    "fish": "~/.config/fish/config.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(WHERE)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes SHELL complete `evener`.

    \b
        eval "$(evener completion bash)"        # in ~/.bashrc
        eval "$(evener completion zsh)"         # in ~/.zshrc
        evener completion fish | source         # in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(ctx.find_root().command, {}, "evener", "_EVENER_COMPLETE")
    # Not kind.source(), which for bash looks for bash and its version.
    click.echo(made.source_template % made.source_vars())
