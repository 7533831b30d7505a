"""The command line: a verb for each thing that can be done, `train`, `predict`, `export` and the others.

Options are made from the settings classes; each verb imports what it needs inside itself, so that `--help` loads
neither torch nor transformers. Results go to stdout, notes and progress to stderr.
"""

import inspect
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from itertools import takewhile
from typing import Annotated, Any, NoReturn

import typer

from budgetformer.cli import exporting, folders, reporting, serving, verbs
from budgetformer.errors import BudgetFormerError
from budgetformer.settings import (
    CalibrateSettings,
    ConvertSettings,
    EvaluateSettings,
    ExportSettings,
    InspectSettings,
    PredictSettings,
    ReportSettings,
    ServeSettings,
    TrainSettings,
    TuneSettings,
    resolve,
)
from budgetformer.settings.rules import Checked, flag_of

EPILOG = (
    "Exit codes: 0 done; 1 failed at run time; 2 wrong usage; 3 data that cannot be used; 4 a model folder that cannot "
    "be used; 130 stopped by Ctrl-C; 143 stopped by SIGTERM. A setting is taken from its flag, else from the "
    "environment (BUDGETFORMER_<NAME>), else from the --config file, else it has its default."
)
KINDS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}

app = typer.Typer(
    help="Text classification where every input activates only the attention heads it needs.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors are one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in takewhile(lambda word: word != "--", arguments)
    _speak_utf8()
    # Threads that wait by spinning slow the neighbours, and on a busy machine one's own run many times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    before = signal.signal(signal.SIGTERM, _on_terminate)
    try:
        code = app(arguments, prog_name="budgetformer", standalone_mode=False) or 0
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, typer.Abort) as error:
        return _stopped(error)
    except BrokenPipeError:
        # The reader of our output has gone: no error of ours.
        _abandon_stdout()
        return 1
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError):
            _abandon_stdout()
        message, code = _explain(error)
        return _complain(_noted(message, error), code)
    finally:
        signal.signal(signal.SIGTERM, before)


def _on_terminate(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _stopped(error: BaseException) -> int:
    """The exit code of a run that was told to stop: SIGTERM says so in the exception, everything else is Ctrl-C."""
    by = "SIGTERM" if "SIGTERM" in error.args else "SIGINT"
    return _complain(_noted(f"stopped by {by}", error), {"SIGTERM": 143, "SIGINT": 130}[by])


def _noted(message: str, error: BaseException) -> str:
    """The message, and what was added to the error on its way up."""
    return "; ".join([message, *getattr(error, "__notes__", [])])


def _explain(error: Exception) -> tuple[str, int]:
    """What happened, where and what to do, in one line; and the exit code."""
    if isinstance(error, BudgetFormerError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror or error}; check the path, its rights and the free space", 1
    # Wrong usage that the parser found; its class moved between versions of typer.
    wording = getattr(error, "format_message", None)
    if wording is not None:
        # Without any argument the help has been shown, and there is nothing to add.
        return f"{wording()} See budgetformer --help" if wording() else "", getattr(error, "exit_code", 2)
    return f"{type(error).__name__}: {error}; --debug shows where", 1


def _abandon_stdout() -> None:
    """Let go what stdout cannot take (disk full, reader gone): Python would try it again at exit, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, code: int) -> int:
    if message:
        print("budgetformer: " + " ".join(message.split()), file=sys.stderr)
    return code


def _speak_utf8() -> None:
    """Answers are UTF-8 whatever the locale; what has no UTF-8 (half a surrogate pair) is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _version(asked: bool) -> None:
    if asked:
        from budgetformer import __version__

        print(f"budgetformer {__version__}")
        raise typer.Exit


@app.callback()
def _budgetformer(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


Run = Callable[..., int]


def _add(
    name: str, cls: type[Checked], run: Run, *, help: str, example: str, extra: Sequence[inspect.Parameter] = ()
) -> None:
    """Add a verb with the fields of `cls` as options; `run` gets the settings, their sources and what `extra` names."""
    others = {parameter.name for parameter in extra}

    def command(**flags: Any) -> int:
        given = {key: value for key, value in flags.items() if key not in others}
        config = given.pop("config")
        del given["debug"]
        settings, sources = resolve(cls, given, config, os.environ)
        try:
            return run(settings, sources, **{key: flags[key] for key in others})
        except KeyboardInterrupt as error:
            # Caught here, because typer would make the same of every signal.
            return _stopped(error)

    own = [_parameter(field) for field in fields(cls)]  # pyright: ignore[reportArgumentType]
    config = typer.Option(
        "--config", help="YAML, TOML or JSON file of settings.", rich_help_panel="General", metavar="FILE"
    )
    debug = typer.Option("--debug", help="Show tracebacks.", rich_help_panel="General")
    command.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [*own, *extra, _keyword("config", str | None, config), _keyword("debug", bool, debug, default=False)]
    )
    app.command(name, help=help, epilog=f"Example: {example}")(command)


def _parameter(field: "Field[Any]") -> inspect.Parameter:
    """A field as a parameter of a command. None means: not given on the command line."""
    meta = field.metadata
    kind = meta["rule"].kind
    if meta["argument"]:
        argument = typer.Argument(help=_literal(meta["help"]), metavar=field.name.upper(), show_default=False)
        return _keyword(field.name, str | None, argument)
    shown = field.default if field.default not in (MISSING, None, False) else None
    help = _literal(meta["help"] + (f" [default: {shown}]" if shown is not None else ""))
    flag = flag_of(field)
    if kind is bool:
        names = [f"{flag}/--no-{flag.removeprefix('--')}"]
        return _keyword(
            field.name, bool | None, typer.Option(*names, help=help, rich_help_panel=meta["panel"], show_default=False)
        )
    # Numbers come as text: one parser, one message, whether from a flag, the environment or a file.
    option = typer.Option(flag, help=help, rich_help_panel=meta["panel"], metavar=KINDS[kind], show_default=False)
    return _keyword(field.name, str | None, option)


def _keyword(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _literal(text: str) -> str:
    """Help as Rich is to show it: what stands in brackets is no markup."""
    return text.replace("[", "\\[")


_TEXTS = typer.Argument(help="Texts to classify.", metavar="TEXT", show_default=False)
_RUNS = typer.Argument(help="Folders that train wrote.", metavar="RUN_DIR", show_default=False)
_add(
    "train",
    TrainSettings,
    verbs.train,
    help="Train a dense twin and a budgeted classifier, and compare them.",
    example="budgetformer train --data demo --target-budget 0.4 --output-dir runs/demo",
)
_add(
    "evaluate",
    EvaluateSettings,
    verbs.evaluate,
    help="Measure a trained model on labelled data.",
    example="budgetformer evaluate --model runs/demo --data demo --budget 0.25",
)
_add(
    "predict",
    PredictSettings,
    verbs.predict,
    help="Classify texts: one JSON object a line, in the order and number of the input.",
    example="budgetformer predict --model runs/demo --input questions.csv --output answers.jsonl",
    extra=[_keyword("texts", list[str] | None, _TEXTS)],
)
_add(
    "inspect",
    InspectSettings,
    verbs.inspect,
    help="Show which heads one text activates, layer by layer.",
    example='budgetformer inspect "Where is my new card?" --model runs/demo --png heads.png',
)
_add(
    "tune",
    TuneSettings,
    folders.tune,
    help="Measure a trained model at many budgets, and pick the one for a time or an accuracy.",
    example="budgetformer tune --model runs/demo --data demo --max-accuracy-loss 0.01",
)
_add(
    "calibrate",
    CalibrateSettings,
    folders.calibrate,
    help="Choose the cheapest way of answering that provably gives the full model's labels, for --budget calibrated.",
    example="budgetformer calibrate --model runs/demo --data demo --agree 0.99 --confidence 0.95",
)
_add(
    "report",
    ReportSettings,
    reporting.report,
    help="Write one page of one run or several: tables, curves, maps of what ran, confusions, calibration.",
    example="budgetformer report runs/demo runs/demo-quick --output report.html",
    extra=[_keyword("runs", list[str] | None, _RUNS)],
)
_add(
    "convert",
    ConvertSettings,
    folders.convert,
    help="Turn a dense checkpoint of the BERT family into a model folder, all heads on; with --dtype, a trained model "
    "into one that answers in int8 or bf16.",
    example="budgetformer convert --from demo --output-dir runs/converted",
)
_add(
    "export",
    ExportSettings,
    exporting.export,
    help="Write a trained model as an ONNX graph, or without the units that your texts never use.",
    example="budgetformer export --model runs/demo --format onnx --output-dir runs/demo-onnx",
)
_add(
    "serve",
    ServeSettings,
    serving.serve,
    help="Answer over HTTP, and show a page with what each text activates.",
    example="budgetformer serve --model runs/demo --port 8000 --budget 0.2:1.0",
)


@app.command(
    "env",
    help="Print versions, processor, threads and engine, for bug reports.",
    epilog="Example: budgetformer env --json",
)
def _env(
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    from budgetformer.environment import environment

    found = environment()
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    paths = found["engine_paths"].items()
    found["engine_paths"] = ", ".join(f"{path} ({' '.join(dtypes)})" for path, dtypes in paths)
    for name, value in found.items():
        print(f"{name:>15}  {'none' if value is None else value}")
