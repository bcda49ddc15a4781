"""`sparkling`: the library's functions as commands. Thin: it parses, calls, prints.

A mistake of the user is one line, `error: <sentence>`, on stderr and exit code 2; a failed run is
exit code 1; Ctrl-C is 130. Handlers import what they call themselves, so that `--help` and
`render` start without numpy, matplotlib or an HTTP client.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sparkling import __version__
from sparkling.errors import ServerError, SparklingError, UsageError

if TYPE_CHECKING:
    from sparkling.lane import Lane
    from sparkling.recipe import Launch, Recipe

INTERRUPTED = 130
KEEP_ALIVE = "SPARKLING_KEEP_ALIVE_S"  # seconds of silence before a comment; "" for none
# Modules with further commands: each has `register(command)`, and imports no more than we do.
MORE: tuple[str, ...] = (
    "cli_bench",
    "cli_sparklet",
    "cli_stats",
    "cli_eval",
    "cli_cost",
    "cli_weights",
    "cli_doctor",
    "cli_kernels",
    "cli_shapes",
    "cli_log",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help.\n")


# -- shared options ------------------------------------------------------------------------------


def _lane_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lane", default="auto", help="auto, spark, gpu or cpu (default: auto, what is found)"
    )
    parser.add_argument("--recipe", help="a recipe's name or file (default: the lane's)")
    parser.add_argument("--model", help="the checkpoint's directory (default: the recipe's)")
    parser.add_argument(
        "--i-know-this-can-lock-the-machine",
        dest="consent",
        action="store_true",
        help="start above a memory fraction of 0.68 on a Spark",
    )
    parser.add_argument(
        "--edition", help="the build of SGLang, one of the recipe's editions (default: its first)"
    )


def _launch_options(parser: argparse.ArgumentParser) -> None:
    _lane_options(parser)
    parser.add_argument("--variant", help="a variant of the recipe, laid over the stage")
    parser.add_argument("--port", type=int, help="port on 127.0.0.1 (default: 30000)")


def _lane(args: argparse.Namespace) -> Lane:
    from sparkling import lane

    # In our own environment, so that whatever we start (kernels of the suite) sees the same.
    told = {"RECIPE": args.recipe, "MODEL": args.model, "EDITION": getattr(args, "edition", None)}
    for name, value in told.items():
        if value:
            os.environ[f"SPARKLING_{name}"] = value
    if getattr(args, "consent", False):
        os.environ["SPARKLING_I_KNOW_THIS_CAN_LOCK_THE_MACHINE"] = "1"  # memory.I_KNOW
    return lane.detect(args.lane)


def _book(where: Lane) -> Recipe:
    from sparkling import recipe

    return recipe.load(where.recipe_path, root=where.root).with_edition(where.edition)


def _launch(args: argparse.Namespace, where: Lane, stage: str, variant: str | None) -> Launch:
    port = 30000 if args.port is None else args.port
    return _book(where).render(stage, model=where.model, port=port, variant=variant)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError
    return value


_seconds.__name__ = "number of seconds"  # what argparse calls a value that is none


def _say(text: str = "") -> None:
    print(text, flush=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


# -- commands ------------------------------------------------------------------------------------


def _render(args: argparse.Namespace) -> int:
    from sparkling import recipe

    where = _lane(args)
    launch = _launch(args, where, args.stage, args.variant)
    if args.diff is None:
        if args.format == "json":
            _print_json(launch.to_json())
        else:
            print(launch.shell(python=str(where.server_python)))
        return 0
    other, _, variant = args.diff.partition(":")
    before = _launch(args, where, other, variant or None)
    changes = recipe.diff(before, launch)
    if args.format == "json":
        _print_json(
            {
                "from": before.to_json(),
                "to": launch.to_json(),
                "changes": [vars(change) for change in changes],
                "comparable": before.regime == launch.regime,
            }
        )
        return 0
    for change in changes:
        print(change)
    if not changes:
        print("no difference")
    if before.regime != launch.regime:
        print(f"not comparable: {before.regime!r} against {launch.regime!r}")
    return 0


@contextlib.contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into the same orderly end as Ctrl-C, so that a server is never left behind."""

    def end(signum: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stamp() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def _silence() -> str:
    """Seconds of silence before a comment, as the caller's environment says; "" for none."""
    value = os.environ.get(KEEP_ALIVE, "15").strip()
    try:
        possible = not value or 0 < float(value) < float("inf")
    except ValueError:
        possible = False
    if not possible:
        raise UsageError(
            f"{KEEP_ALIVE} is {value!r}: set it to seconds above 0, to nothing for no comments, or "
            "unset it (15)."
        )
    return value


def _serve(args: argparse.Namespace) -> int:
    from sparkling import server, serving, weightcheck

    where = _lane(args)
    book = _book(where)
    launch = _launch(args, where, args.stage, args.variant)
    silence = _silence()
    weightcheck.check(where.model)
    log = Path(args.log) if args.log else where.runs / "serve" / f"{_stamp()}-{args.stage}.log"
    _say(f"Starting {launch.recipe}, stage {launch.stage}; log: {log}")
    with _ends_on_sigterm():
        running = server.start(
            launch,
            python=where.server_python,
            log=log,
            api_key=os.environ.get("SPARKLING_API_KEY") or None,
            deadline_s=args.deadline or book.timeouts.get("ready_s", 300),
            # Whoever serves others may stand behind a proxy that cuts silence off.
            extra_env={KEEP_ALIVE: silence},
            progress=_phases(),
            # Whoever names a port wants that one; without a name another may be taken.
            exact_port=bool(args.port),
            runs=where.runs,
        )
        with running, serving.remembered(running, where.runs):
            _say(f"Ready after {running.ready_seconds:.0f} s at {running.url}/v1 (Ctrl-C stops).")
            if getattr(running, "need", None):
                _say(f"It {running.need.line()}.")
            if banner := _banner(log):
                _say(banner)
            while running.alive():
                time.sleep(0.5)
            last = " | ".join(running.tail(3))
            raise ServerError(
                f"The server has ended; if nobody stopped it, the last lines of {log} say why: {last}"
            )


def _banner(log: Path) -> str:
    """The warning framed in `!!!` that a server broken by SPARKLING_TRAP starts with, or nothing."""
    try:
        lines = iter(log.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return ""
    first = next((line for line in lines if line.startswith("!!!")), "")
    rest = itertools.takewhile(lambda line: line.startswith("!!!"), lines)
    return "\n".join([first, *rest]) if first else ""


def _phases() -> Callable[[str, float], None]:
    """Return a progress callback that prints each phase once."""
    seen: set[str] = set()

    def progress(phase: str, seconds: float) -> None:
        if phase not in seen:
            seen.add(phase)
            _say(f"{seconds:5.0f} s  {phase}")

    return progress


def _stop(args: argparse.Namespace) -> int:
    from sparkling import lane, server

    if args.runs is not None and not os.path.isdir(args.runs):
        raise UsageError(f"There is no folder {args.runs!r}, so no server is recorded in it.")
    stopped = server.stop_all(lane.runs_folder() if args.runs is None else Path(args.runs))
    for line in stopped:
        print(line)
    if not stopped:
        print("No server of ours is running.")
    return 0


def _tiny(args: argparse.Namespace) -> int:
    from sparkling import lane, tiny

    # Never where SPARKLING_RECIPE or SPARKLING_MODEL point: a checkpoint there is somebody's own.
    dest = Path(args.dest) if args.dest else lane.tiny_model(lane.find_root())
    if args.if_needed is not None:
        used = _lane(_parser().parse_args(["suite", *args.if_needed])).model
        same = os.path.realpath(used) == os.path.realpath(dest)
        theirs = used.is_dir() and any(used.iterdir()) and not (used / tiny.MANIFEST).is_file()
        if theirs or not same:
            print(f"No tiny Ling is built: the checkpoint is {used}, which is another one.")
            return 0
    print(tiny.build(dest, seed=args.seed, noise=args.noise, random=args.random))
    return 0


def _session(args: argparse.Namespace, name: str, stages: Sequence[str]) -> Any:
    """A session for these stages (none: the ladder), each known to be one that can run here."""
    where = _lane(args)
    book = _book(where)
    for stage in stages or book.ladder:  # refuse before there is a run folder
        book.require(stage, where.kind)
        book.render(stage, model=where.model, variant=args.variant)
    if not where.server_python.exists():
        raise UsageError(
            f"There is no server environment at {where.server_python}; run {where.set_up}."
        )
    from sparkling import notebook

    return notebook.begin(name, lane=where.kind, run_id=args.run or "")


def _prove(args: argparse.Namespace) -> int:
    if args.stage is None:
        return _prove_served(args)
    session = _session(args, "prove", [args.stage])
    from sparkling import show

    with _ends_on_sigterm(), contextlib.closing(_Stopping(session)):
        _say(str(session.start(args.stage, variant=args.variant)))
        session.prove()
        for proof in session.proofs:
            _say(str(show.proof(proof)))
    return 0


def _prove_served(args: argparse.Namespace) -> int:
    from sparkling import lane, proof, serving, show

    found = proof.prove(serving.find(lane.runs_folder(), args.port))
    _say(str(show.proof(found)))
    found.require()
    return 0


class _Stopping:
    """A session as something that `closing` closes."""

    def __init__(self, session: Any) -> None:
        self.close = session.stop


def _params(pairs: Sequence[str]) -> dict[str, str]:
    params = {}
    for pair in pairs:
        name, eq, value = pair.partition("=")
        if not eq or not name.isidentifier():
            raise UsageError(f"-p {pair} is not of the form NAME=VALUE.")
        if name in params:
            raise UsageError(f"-p {name} is given twice.")
        params[name] = value
    return params


def _suite(args: argparse.Namespace) -> int:
    params, where = _params(args.param), _lane(args)
    from sparkling import suite

    result = suite.run_suite(
        where,
        notebooks=args.notebook or None,
        params=params,
        run_id=args.run,
        resume=args.resume,
        cell_timeout_s=args.cell_timeout,
        progress=_say,
        record_minutes=args.record_minutes,
    )
    _say()
    _say(result.text())
    return result.exit_code


_REPORTED = ("timings.json", "rows.jsonl", "*/*.jsonl")
"""What a run holds when there is something to report of it."""


def _run_folder(run: str | None) -> Path:
    from sparkling import lane, store

    runs = lane.runs_folder()
    if run is None:
        newest = store.latest(runs, holding=_REPORTED)
        if newest is None:
            raise UsageError(f"There is no run in {runs}; `sparkling suite` makes one.")
        return newest.dir
    folder = Path(run) if "/" in run else runs / run
    if not folder.is_dir():
        raise UsageError(f"There is no run {run!r} in {runs}.")
    return folder


def _report(args: argparse.Namespace) -> int:
    from sparkling import report

    print(report.build(_run_folder(args.run)))
    return 0


def _check_notebooks(args: argparse.Namespace) -> int:
    from sparkling import lane, nbcheck

    paths = [Path(p) for p in args.path] or [lane.find_root() / "notebooks"]
    for changed in nbcheck.fix(paths) if args.fix else ():
        print(f"{changed}: rewritten")
    problems = nbcheck.check(paths)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


# -- the parser ----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sparkling", description="Prove, measure and serve Ling-3.0, one step at a time."
    )
    parser.add_argument("--version", action="version", version=f"sparkling {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    def command(
        name: str, handler: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
        )
        sub.set_defaults(handler=handler)
        return sub

    render = command("render", _render, "print the command that starts a stage")
    render.add_argument("stage", metavar="STAGE")
    _launch_options(render)
    render.add_argument(
        "--diff", metavar="OTHER", help="what changes from OTHER, a stage or STAGE:VARIANT"
    )
    render.add_argument("--format", choices=("shell", "json"), default="shell")

    serve = command("serve", _serve, "start a stage and keep it running until Ctrl-C")
    serve.add_argument("stage", metavar="STAGE")
    _launch_options(serve)
    serve.add_argument("--log", help="the server's log file (default: in runs/serve)")
    serve.add_argument(
        "--deadline", type=_seconds, metavar="SECONDS", help="limit for the start (the recipe's)"
    )
    serve.epilog = "An API key is read from SPARKLING_API_KEY; there is none by default."

    stop = command("stop", _stop, "stop every server that we started")
    stop.add_argument("--runs", help="the folder of runs (default: runs)")

    prove = command("prove", _prove, "prove every switch of a server on or off")
    prove.add_argument(
        "stage",
        metavar="STAGE",
        nargs="?",
        help="start this stage for it, then stop it (default: the server of `sparkling serve`)",
    )
    _lane_options(prove)
    prove.add_argument("--variant", help="a variant of the recipe, laid over the stage")
    prove.add_argument("--port", type=int, help="which server of `sparkling serve`")
    prove.add_argument("--run", metavar="RUN", help="add to this run (default: a new one)")

    suite = command("suite", _suite, "run the notebooks in order and write the report")
    _lane_options(suite)
    suite.add_argument(
        "--notebook", action="append", metavar="NAME", help="only this one; may be repeated"
    )
    suite.add_argument(
        "-p",
        dest="param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the notebooks; may be repeated",
    )
    suite.add_argument("--run", metavar="RUN", help="the run's id (default: a new one)")
    suite.add_argument(
        "--resume", action="store_true", help="continue RUN, or the newest run of this lane"
    )
    suite.add_argument(
        "--cell-timeout", type=_seconds, metavar="SECONDS", help="limit for one cell"
    )
    suite.add_argument(
        "--record-minutes", action="store_true", help="write the minutes to notebooks/minutes.json"
    )

    report = command("report", _report, "write a run's report again and print its path")
    report.add_argument(
        "run", nargs="?", metavar="RUN", help="a run's id or folder (newest measured)"
    )

    tiny = command("tiny", _tiny, "build the tiny Ling checkpoint of the cpu lane")
    tiny.add_argument("--dest", help="the folder (default: where the recipe tiny-ling says)")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.add_argument("--noise", type=float, default=0.12, help="how often the draft errs (0.12)")
    tiny.add_argument("--random", action="store_true", help="random weights, for comparisons")
    tiny.add_argument(
        "--if-needed",
        nargs=argparse.REMAINDER,
        metavar="OPTION",
        help="only if `sparkling suite` with these options would use it",
    )

    check = command("check-notebooks", _check_notebooks, "check the notebooks without running them")
    check.add_argument("path", nargs="*", metavar="PATH", help="default: notebooks")
    check.add_argument("--fix", action="store_true", help="put their files into canonical form")

    for name in MORE:
        importlib.import_module(f"sparkling.{name}").register(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. Never shows a traceback for a user's mistake."""
    _streams()
    try:
        args = _parser().parse_args(argv)
        code = args.handler(args)
        sys.stdout.flush()
        return code
    except SparklingError as error:
        _flush()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        _flush()
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has seen enough; stdout must not complain again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        _flush()
        where = f"{error.filename}: " if error.filename else ""
        said = error.strerror or str(error) or type(error).__name__
        print(f"error: {where}{said}.", file=sys.stderr)
        return 1


def _streams() -> None:
    """Give us somewhere to print where the shell closed it (`>&-`), and let no letter stop us."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (as long as we live)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
