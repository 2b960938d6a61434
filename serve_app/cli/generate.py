"""`eesd generate`."""

import os
import random
import sys
from functools import partial

from typer import echo

from serve_app.cli.configuration import EngineFlags, GenerateOptions, config_of


def generate(options: GenerateOptions, engine: EngineFlags) -> None:
    """Generates one text and streams it to the terminal."""
    from serve_app.cli.terminal import stream_text  # torch takes seconds to import

    in_colour = options.color == "always" or (
        options.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    stream_text(
        config_of(engine).engine,
        options,
        prompt=sys.stdin.read() if options.prompt == "-" else options.prompt,
        seed=random.getrandbits(31) if options.seed is None else options.seed,
        write=partial(echo, nl=False, color=in_colour),
        note=partial(echo, err=True),
        in_colour=in_colour,
    )
