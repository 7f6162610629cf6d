"""The command line: each command ends with 0, or with the error's exit code and one message of cause and cure.

Exit codes: 0 done; 1 unknown failure; 2 spec or usage; 3 buffer; 4 deadline; 5 fenced; 6 proof; 7 ledger; 8 training;
130 and 143: stopped by SIGINT and SIGTERM, with a checkpoint.
"""

import json
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import redis
import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from buffer.errors import ForebayError, LedgerBroken, SpecError
from buffer.ledger import Ledger
from deploy import progress, run_folder
from deploy.check import CheckReport, check_spec
from deploy.spec import RunSpec, load_spec, schema
from deploy.status import Status, read_status

if TYPE_CHECKING:
    from deploy.controller.client import ControllerClient

app = typer.Typer(
    name="forebay",
    help="Post-train language models by reinforcement learning, with producers and consumers scaled apart.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
out, err = Console(), Console(stderr=True)

QUIET_SECONDS = 5.0  # between two lines about the same wait

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The run spec, a YAML file.")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The run folder (key `folder` of the spec).")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the spec, e.g. steps=20.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Post-train language models by reinforcement learning, with producers and consumers scaled apart."""
    if version:
        print(f"forebay {installed_version('forebay')}")
        raise typer.Exit


@app.command()
def run(
    spec_file: SpecFile,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in the run folder.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Keep an ended run's folder aside and begin anew.")
    ] = False,
    changes: Changes = None,
) -> None:
    """Start everything on this machine, train to the end, write report.json. Ctrl-C drains and checkpoints."""
    if resume and restart:
        raise SpecError("--resume and --restart exclude each other", where="command line", cure="give one of them")
    # Here, as what else is needed by one command only: a quick command should not wait for the imports of a slow one.
    from deploy.run import Run, set_aside

    spec = load_spec(spec_file, changes or ())
    check_spec(spec).raise_problems()
    if restart and (aside := set_aside(spec.path)):
        err.print(f"the earlier run is kept in {aside}", soft_wrap=True, highlight=False)
    with ExitStack() as stack:
        view = _LiveView(stack) if out.is_terminal else _PlainView()
        ending, code, report = Run(spec, resume=resume, show=view.show).run()
    _print_end(ending, report, spec)
    raise typer.Exit(code)


class _LiveView:
    """A picture that changes in place."""

    def __init__(self, stack: ExitStack) -> None:
        self._live = stack.enter_context(Live(console=out, refresh_per_second=4, transient=False))

    def show(self, status: Status) -> None:
        self._live.update(progress.render(status))


class _PlainView:
    """A line for each new step, and every few seconds why there is none, for logs."""

    def __init__(self) -> None:
        self._shown: tuple[object, ...] = ()
        self._at = 0.0

    def show(self, status: Status) -> None:
        what = (status.step, status.accuracy and status.accuracy.version, status.phase)
        if what != self._shown or (status.step is None and time.monotonic() - self._at > QUIET_SECONDS):
            self._shown, self._at = what, time.monotonic()
            print(progress.line(status), flush=True)


def _print_end(ending: str, report: dict[str, Any], spec: RunSpec) -> None:
    if ending == "failed":
        err.print(f"[bold red]failed:[/] {escape(str(report['reason']))}", highlight=False, soft_wrap=True)
    else:
        out.print(f"[bold]{ending}:[/] {escape(str(report['reason']))}", highlight=False)
    found = report.get("eval") or {}
    if found.get("first") is not None:
        first, last = found["first"], found["last"]
        out.print(f"held-out accuracy {first:.3f} -> {last:.3f} ({len(found['history'])} evaluations)", highlight=False)
    problems = (report.get("ledger") or {}).get("problems")
    if problems is not None:
        out.print("ledger: " + ("every prompt is accounted for" if not problems else "; ".join(problems)))
    out.print(f"report: {spec.folder}/{run_folder.REPORT_FILE}   curves: {spec.folder}/tensorboard", highlight=False)
    if ending != "finished":
        out.print("go on with --resume", highlight=False)


@app.command()
def check(spec_file: SpecFile, changes: Changes = None, as_json: AsJson = False) -> None:
    """Print the resolved spec, what follows from it, and what does not fit; start nothing."""
    spec = load_spec(spec_file, changes or ())
    report = check_spec(spec)
    if as_json:
        content = {
            "spec": spec.model_dump(mode="json"),
            "derived": report.derived,
            "notes": report.notes,
            "problems": [{"what": p.what, "where": p.where, "cure": p.cure} for p in report.problems],
        }
        print(json.dumps(content, indent=2))
    else:
        _print_check(spec, report)
    if report.problems:
        raise typer.Exit(SpecError.exit_code)


def _print_check(spec: RunSpec, report: CheckReport) -> None:
    import yaml
    from rich.syntax import Syntax

    text = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False)
    out.print(Syntax(text, "yaml", background_color="default"))
    table = Table(title="what follows", title_justify="left", show_header=False, box=None)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in report.derived.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else "unknown" if value is None else str(value))
    out.print(table)
    for note in report.notes:
        out.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    for problem in report.problems:
        err.print(f"[bold red]does not fit:[/] {escape(str(problem))}", highlight=False, soft_wrap=True)
    if not report.problems:
        out.print("[bold green]everything fits[/]")


@app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of a run spec, for editors and for people."""
    print(json.dumps(schema(), indent=2))


@app.command("explain")
def explain_key(
    key: Annotated[str, typer.Argument(metavar="[KEY]", help="A key of the spec, e.g. consumer.optimizer.")] = "",
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print all keys as a page.")] = False,
) -> None:
    """Explain a key of the run spec and those below it: type, default, meaning."""
    from deploy import explain

    if as_markdown:
        print(explain.markdown(), end="")
        return
    for found in explain.explain(key) if key else explain.keys():
        default = "required" if found.default is None else f"default {found.default}" if found.default else ""
        out.print(f"[bold]{escape(found.name)}[/]  {escape(found.kind)}  {escape(default)}".rstrip(), highlight=False)
        out.print(Padding(escape(found.text), (0, 0, 0, 4)), highlight=False)


@app.command()
def status(
    folder: Folder,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it until the run ends.")] = False,
) -> None:
    """Show a run, alive or ended: step, reward, accuracy, who waits on whom, producers and what they serve."""
    with run_folder.opened_buffer(folder) as (client, record, alive):
        if watch and alive and not as_json:
            with ExitStack() as stack:
                view = _LiveView(stack) if out.is_terminal else _PlainView()
                while run_folder.is_running(folder):
                    view.show(_status(client, record))
                    time.sleep(1.0)
            return
        found = _status(client, record)
        if as_json:
            print(json.dumps({**found.model_dump(mode="json"), "alive": alive}, indent=2))
        else:
            out.print(progress.render(found))
            if not alive:
                done = (found.step or 0) >= record.steps
                hint = "" if done else "; go on with `forebay run SPEC --resume`"
                out.print(f"the run has {'finished' if done else 'ended'}{hint}", highlight=False)


def _status(client: "redis.Redis", record: run_folder.RunRecord) -> Status:
    beat = record.buffer.heartbeat_seconds
    return read_status(client, run=record.run, steps=record.steps, heartbeat_seconds=beat)


@app.command()
def ledger(
    folder: Folder,
    verify: Annotated[bool, typer.Option("--verify", help="Count every prompt and compare with the counters.")] = False,
    prompt: Annotated[int | None, typer.Option("--prompt", metavar="N", help="One prompt's life.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show where every prompt is, of a live or an ended run; with --verify, count them and end with 7 on a mismatch."""
    with run_folder.opened_buffer(folder) as (client, record, _):
        found = Ledger(client, record.run)
        if prompt is not None:
            life = found.history(prompt)
            if life is None:
                raise SpecError(
                    f"there is no prompt {prompt}", where=f"the ledger of run {record.run}", cure="count from 0"
                )
            _print_map(life, as_json)
            return
        if not verify:
            _print_map(found.summary(), as_json)
            return
        report = found.verify()
    content = {"counts": report.counts, "dropped": report.dropped, "problems": list(report.problems)}
    if as_json:
        print(json.dumps(content, indent=2))
    else:
        _print_map({**report.counts, **{f"dropped: {why}": n for why, n in report.dropped.items()}}, False)
    if report.problems:
        raise LedgerBroken(
            f"{len(report.problems)} things do not add up:\n    " + "\n    ".join(report.problems),
            where=f"the ledger of run {record.run}",
            cure="report it with logs/ and this output; resume from the last checkpoint in a copy of the folder",
        )
    if not as_json:
        out.print("[bold green]every prompt is accounted for[/]")


def _print_map(content: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(content, indent=2))
        return
    table = Table(show_header=False, box=None)
    for name, value in content.items():
        table.add_row(str(name), escape(json.dumps(value) if isinstance(value, dict | list) else str(value)))
    out.print(table)


def _controller(folder: Path) -> "ControllerClient":
    from deploy.controller.client import ControllerClient

    record = run_folder.read_record(folder)
    if not run_folder.is_running(folder):
        raise SpecError("the run is not running", where=str(folder), cure="start it with `forebay run SPEC --resume`")
    return ControllerClient(record.controller_url, run_folder.controller_token(folder, record.token_env))


@app.command()
def stop(folder: Folder) -> None:
    """Ask a live run to drain, checkpoint and end."""
    out.print(_controller(folder).stop().effect)


@app.command()
def pause(folder: Folder) -> None:
    """Give out no prompts until `forebay resume`."""
    out.print(_controller(folder).pause().effect)


@app.command("resume")
def resume_generation(folder: Folder) -> None:
    """Go on after `forebay pause`."""
    out.print(_controller(folder).resume().effect)


@app.command()
def scale(
    folder: Folder,
    pool: Annotated[str, typer.Argument(metavar="POOL", help="A pool of producers (a name below `producers`).")],
    replicas: Annotated[int, typer.Argument(metavar="N", min=0, help="How many replicas it is to have.")],
) -> None:
    """Give a pool of producers more or fewer replicas; nobody else restarts."""
    scaled = _controller(folder).scale(pool, replicas)
    out.print(f"{scaled.pool}: {scaled.before} -> {scaled.replicas} replicas; {scaled.effect}", highlight=False)


@app.command()
def pools(folder: Folder, as_json: AsJson = False) -> None:
    """Show the pools of a live run: replicas desired and running, each one's state, version and process."""
    found = _controller(folder).pools()
    if as_json:
        print(json.dumps(found.model_dump(mode="json"), indent=2))
    else:
        out.print(progress.render_pools(found.pools))


@app.command()
def checkpoint(folder: Folder) -> None:
    """Have the next step end with a checkpoint."""
    out.print(_controller(folder).checkpoint().effect)


def main() -> None:
    """Entry point."""
    try:
        app()
    except ForebayError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
