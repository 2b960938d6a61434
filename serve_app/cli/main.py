"""`eesd`: what people type.

Turns words into a configuration and hands it to the part that does the work. The only module that
prints. Errors of ours are one line on standard error and an exit status: 2 for what the person can
mend in the command or its files, 1 for the rest.
"""

import argparse
import importlib
import json
import logging
import os
import random
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import get_args

import yaml

from eesd_dist.config import DTypeSetting, Numerics
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.errors import ConfigError, EesdError, RequestError, os_error_text
from eesd_dist.types import SpeculationParams, TreeShape
from serve_app.config import BUNDLED_MODEL, ServiceConfig, read_service_config, service_config
from serve_app.session.environment import prepare_for_cluster, prepare_for_local_ray

_DELEGATED = {
    "bench offline": "eesd_dist.bench.offline",
    "bench online": "eesd_dist.bench.online",
    "bench exact": "serve_app.bench.exact_over_actors",
    "bench noise": "eesd_dist.bench.noise",
    "bench control": "eesd_dist.bench.control",
    "bench chaos": "serve_app.bench.chaos.command",
    "bench handover": "serve_app.bench.kv_migration",
    "bench rounds": "serve_app.bench.rounds.command",
    "bench router": "serve_app.bench.router.command",
    "controllers": "serve_app.cli.controllers",
    "distill": "serve_app.distill.main",
    "pipelines": "serve_app.cli.pipelines",
    "plan": "cluster.planner",
    "preflight": "cluster.preflight",
}
"""Commands with a module and options of their own, loaded when they are asked for."""
_WANT_MODEL = frozenset({"bench offline", "bench exact", "bench control", "bench rounds"})


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        name, rest = _delegated(words)
        if name is not None:
            return _delegate(name, rest)
        arguments = _parser().parse_args(words)
        _log_to_stderr(is_verbose=arguments.verbose)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except (ConfigError, RequestError) as error:
        print(f"eesd: {error}", file=sys.stderr)
        return 2
    except EesdError as error:
        print(f"eesd: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# -- commands -----------------------------------------------------------------------------------


def _serve(arguments: argparse.Namespace) -> int:
    config = _config_of(arguments)
    if arguments.address is None:
        prepare_for_local_ray(shows_logs=arguments.verbose)
    else:
        prepare_for_cluster(shows_logs=arguments.verbose)
    # Ray reads the environment when it is imported.
    from serve_app.operations.serving import run_service

    run_service(
        config,
        address=arguments.address,
        shows_logs=arguments.verbose,
        say=lambda text: print(text, flush=True),
    )
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from serve_app.cli.generate import Wish, generate  # torch takes seconds to import

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    in_colour = arguments.color == "always" or (
        arguments.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    wish = Wish(
        prompt=prompt,
        is_raw=arguments.raw,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=random.getrandbits(31) if arguments.seed is None else arguments.seed,
        speculation=SpeculationParams(mode="off" if arguments.no_speculation else "auto"),
    )
    generate(
        _config_of(arguments).engine,
        wish,
        write=lambda text: print(text, end="", flush=True),
        note=lambda text: print(text, file=sys.stderr),
        in_colour=in_colour,
    )
    return 0


def _batch(arguments: argparse.Namespace) -> int:
    from serve_app.batch.runner import BatchOptions
    from serve_app.cli.batch import run_here, run_there  # torch takes seconds to import

    config = _config_of(arguments)
    options = BatchOptions(
        concurrency=arguments.concurrency,
        seed=arguments.seed,
        defaults=_defaults(arguments.default),
        ordered=arguments.ordered,
        force=arguments.force,
        show_progress=not arguments.quiet,
    )
    files = (arguments.input, arguments.output)
    if arguments.url is None:
        report = run_here(*files, config=config, options=options)
    else:
        key = os.environ.get(config.api_key_env) or None
        report = run_there(*files, url=arguments.url, api_key=key, config=config, options=options)
    print(
        f"{report.num_rows} rows: {report.num_skipped} done before, {report.num_completed} "
        f"answered, {report.num_failed} failed; {report.num_tokens} tokens"
    )
    if report.num_failed_before:
        print(f"{report.num_failed_before} of those done before had failed: correct their rows")
    return 1 if report.num_failed or report.num_failed_before else 0


def _defaults(settings: Sequence[str]) -> dict[str, object]:
    defaults: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--default {setting}: expected FIELD=VALUE")
        defaults[name] = _json_of(f"--default {setting}", _value_of(f"--default {setting}", value))
    return defaults


def _version(_: argparse.Namespace) -> int:
    try:
        print(f"eesd {version('eesd-dist')}")
    except PackageNotFoundError:
        print("eesd, not installed as a package")
    return 0


def _misplaced(_: argparse.Namespace) -> int:
    raise ConfigError("--verbose before a command with options of its own: leave it out")


def _delegated(words: list[str]) -> tuple[str | None, list[str]]:
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in _DELEGATED:
            return name, words[length:]
    return None, words


def _delegate(name: str, words: list[str]) -> int:
    if name in _WANT_MODEL and not {"--model", "-h", "--help"} & {w.split("=")[0] for w in words}:
        words = ["--model", str(BUNDLED_MODEL), *words]
    try:
        status: int = importlib.import_module(_DELEGATED[name]).main(words)
    except BrokenPipeError:
        raise
    except OSError as error:  # a file where a folder was meant, a disk that is full
        raise ConfigError(os_error_text(error)) from error
    return status


# -- configuration ------------------------------------------------------------------------------

_FLAGS = {
    "model": "engine.model.path",
    "head": "engine.model.head",
    "dtype": "engine.model.dtype",
    "numerics": "engine.model.numerics",
    "device": "engine.model.device",
    "draft_tp": "engine.parallel.draft_tensor_parallel_size",
    "verify_tp": "engine.parallel.verify_tensor_parallel_size",
    "stand_in": "engine.parallel.stand_in",
    "controller": "engine.speculation.controller",
    "max_draft_tokens": "engine.speculation.max_draft_tokens",
    "tree": "engine.speculation.tree.shape",
    "name": "model_name",
    "host": "host",
    "port": "port",
    "pipelines": "pipelines.max_count",
    "otlp_endpoint": "telemetry.otlp_endpoint",
    "trace_folder": "telemetry.trace_folder",
}
"""Flags are names for keys of the configuration; what is not given is not touched."""


def _config_of(arguments: argparse.Namespace) -> ServiceConfig:
    tree = read_service_config(arguments.config) if arguments.config is not None else {}
    for flag, key in _FLAGS.items():
        value = getattr(arguments, flag, None)
        if value is not None:
            _put(tree, key, str(value) if isinstance(value, Path) else value)
    if getattr(arguments, "pipelines", None) is not None:
        _put(tree, "pipelines.min_count", arguments.pipelines)
    for setting in arguments.set:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: expected KEY=VALUE")
        _put(tree, key, _value_of(f"--set {setting}", value))
    if _is_missing(tree, "engine.model.path"):
        _put(tree, "engine.model.path", str(BUNDLED_MODEL))
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if endpoint and _is_missing(tree, "telemetry.otlp_endpoint"):
        _put(tree, "telemetry.otlp_endpoint", endpoint)
    return service_config(tree)


def _value_of(argument: str, text: str) -> object:
    """Read as in a configuration file, only that null has to be written out."""
    try:
        value: object = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # the latter of a date that no calendar has
        reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
        raise ConfigError(
            f"{argument}: found no YAML ({reason}), expected a value: put a text into quotes of "
            "its own"
        ) from error
    if value is None and text.strip().lower() not in ("null", "~"):
        raise ConfigError(
            f"{argument}: found no value, expected one: write null, or put a text into quotes of "
            "its own"
        )
    return value


def _json_of(argument: str, value: object) -> object:
    """What a request's body can have; a job's manifest is compared with what it has written."""
    try:
        survives = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        survives = False
    if not survives:
        raise ConfigError(
            f"{argument}: found {value!r}, which JSON has no form for: put dates, and the keys of "
            "a mapping, into quotes of their own"
        )
    return value


def _put(tree: dict[str, object], key: str, value: object) -> None:
    *sections, last = key.split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{key}: {section} is {below!r}, expected a section")
        tree = below
    tree[last] = value


def _is_missing(tree: dict[str, object], key: str) -> bool:
    node: object = tree
    for part in key.split("."):
        if not isinstance(node, dict) or node.get(part) is None:
            return True
        node = node[part]
    return False


# -- words --------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eesd",
        description="Lossless early-exit speculative decoding. A model that is not named is the "
        "bundled one.",
        epilog="Also: eesd bench offline|online|exact|noise|control|router|rounds|chaos|handover, "
        "eesd controllers, eesd pipelines, eesd plan, eesd preflight, eesd distill; "
        "each explains itself with --help.",
    )
    parser.add_argument("--verbose", action="store_true", help="log what happens")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="the OpenAI-compatible service on Ray"))
    _add_generate(commands.add_parser("generate", help="one text, streamed to the terminal"))
    _add_batch(commands.add_parser("batch", help="a file of requests, one answer a line"))
    about = commands.add_parser("version", help="which version this is")
    about.set_defaults(run=_version)
    for name in _DELEGATED:  # for the usage error to list them; `main` runs them without us
        commands.add_parser(name, add_help=False).set_defaults(run=_misplaced)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_engine_flags(parser)
    add = parser.add_argument
    add("--host", help="address to listen on (127.0.0.1)")
    add("--port", type=int, help="port to listen on (8000)")
    add("--name", help="the model's name in the API (its folder's name)")
    add(
        "--stand-in",
        action="store_const",
        const=True,
        help="verify ranks also hold the draft ranks' layers: plain decoding while one is replaced",
    )
    add("--pipelines", type=int, help="how many pipelines serve (1)")
    add("--address", help="a running Ray cluster to join; without it, Ray is started here")
    add("--otlp-endpoint", help="OpenTelemetry collector, e.g. http://localhost:4318")
    add("--trace-folder", type=Path, help="folder for span files where there is no collector")
    parser.set_defaults(run=_serve)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", help="the prompt, or - to read it from standard input")
    _add_engine_flags(parser)
    add("--raw", action="store_true", help="continue the prompt itself: no chat template")
    add("--max-tokens", type=int, default=256)
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float, default=1.0)
    add("--seed", type=int, help="the same seed gives the same text (drawn, and shown)")
    add("--no-speculation", action="store_true", help="plain decoding: the same text, later")
    add("--color", choices=("auto", "always", "never"), default="auto")
    parser.set_defaults(run=_generate)


def _add_batch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", type=Path, metavar="IN.jsonl", help="OpenAI batch lines, or plain bodies")
    add("output", type=Path, metavar="OUT.jsonl", help="goes on where an earlier run ended")
    _add_engine_flags(parser)
    add("--url", help="a running service to ask; without it, the engine runs here")
    add("--concurrency", type=int, default=16, help="rows that run at the same time")
    add("--seed", type=int, default=0, help="the job's seed; a row's own wins")
    add("--default", action="append", default=[], metavar="FIELD=VALUE", help="for every row")
    add("--ordered", action="store_true", help="leave the output in the input's order")
    add("--force", action="store_true", help="go on behind rows made otherwise")
    add("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=_batch)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.yaml", help="a service configuration; flags win")
    add("--model", type=Path, help="folder of the target model (the bundled one)")
    add("--head", type=Path, help="folder of the exit head (MODEL/exit_head)")
    add(
        "--dtype",
        choices=get_args(DTypeSetting),
        help="type of the weights (auto: the checkpoint's own)",
    )
    add("--numerics", choices=get_args(Numerics), help="invariant keeps texts bit for bit")
    add("--device", choices=("auto", "cpu", "cuda"), help="where to compute (auto)")
    add("--draft-tp", type=int, metavar="N", help="ranks of the draft stage (1)")
    add("--verify-tp", type=int, metavar="N", help="ranks of the verify stage (1)")
    add("--controller", choices=CONTROLLER_NAMES, help="decides when a draft ends")
    add("--tree", choices=get_args(TreeShape), help="alternatives beside first choices (none)")
    add("--max-draft-tokens", type=int, metavar="K", help="ceiling on a draft; 0 drafts nothing")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any other key")


def _log_to_stderr(*, is_verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if is_verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


if __name__ == "__main__":
    raise SystemExit(main())
