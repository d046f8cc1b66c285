"""The `jaxlm` command. Nothing heavy is imported before a command has been chosen."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from jaxlm import __version__
from jaxlm.core import collector, output, plugins
from jaxlm.core.errors import InputError, exit_status, in_one_line


class _Parser(argparse.ArgumentParser):
    """Bad arguments are one line, like every other bad input."""

    def error(self, message: str) -> None:
        raise InputError(f"{message} (see {self.prog} --help)")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    from jaxlm.cli import (
        bench,
        compare,
        compile,
        config,
        eval,
        export,
        generate,
        hardware,
        import_,
        plan,
        quantize,
        runs,
        serve,
        train,
    )

    parser = _Parser(prog="jaxlm", description="Language models in JAX, with every cost counted before it is paid.")
    parser.add_argument("--version", action="version", version=f"jaxlm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    of_models = train, eval, generate, serve, runs, compare, import_, export, quantize
    for module in (*of_models, plan, compile, hardware, config):
        _add(commands, module)
    measures = _add(commands, bench).add_subparsers(dest="part", metavar="WHAT", required=True)
    for module in bench.parts() if "bench" in arguments[:1] else ():
        _add(measures, module)
    chosen, rest = parser, list(arguments)
    for level in commands, measures:
        if rest and rest[0] in level.choices:
            chosen = level.choices[rest.pop(0)]
        elif rest and (near := difflib.get_close_matches(rest[0], level.choices, 1)):
            raise InputError(f"there is no command {rest[0]!r}; did you mean {near[0]}?")
        if chosen is not commands.choices["bench"]:
            break
    if chosen in (parser, commands.choices["bench"]):
        return parser.parse_args(arguments)
    # Options may stand between key=value overrides, which a parser with commands does not allow.
    return chosen.parse_intermixed_args(rest)


def _add(commands: Any, module: ModuleType) -> argparse.ArgumentParser:
    """Add the parser of a command to others."""
    name, summary = module.__name__.rpartition(".")[2].rstrip("_"), (module.__doc__ or "").strip().splitlines()[0]
    command = commands.add_parser(name, help=summary, description=module.__doc__)
    if hasattr(module, "main"):
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        command.add_argument(
            "--import",
            dest="plugins",
            action="append",
            default=[],
            metavar="MODULE",
            help="import a plug-in first, which registers parts: the name of a module, or the path of a .py file; give "
            "it again for another",
        )
        command.set_defaults(main=module.main)
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, 1 for a run that failed, 2 for bad input, 130 for Ctrl-C."""
    output.replace_unencodable()
    if arguments is None:  # of a process that starts for this command
        collector.begin_rarely()
    try:
        with output.flushed_output():
            chosen = _parse(sys.argv[1:] if arguments is None else arguments)
            plugins.begin(chosen.plugins)
            return chosen.main(chosen)
    except KeyboardInterrupt:
        print("jaxlm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        output.redirect_to_null(1, 2)  # the reader of a pipe left; there is nobody to tell
        return 1
    except Exception as error:
        line = in_one_line(error)
        if line is None:
            raise
        print(f"jaxlm: {line}", file=sys.stderr)
        return exit_status(error)
