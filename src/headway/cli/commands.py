"""The commands of `headway`, one function each: options in, one call into the package, an exit code out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Exit, Option

from headway.cli import engine
from headway.cli.inspect import What
from headway.cli.streams import say

app = typer.Typer(
    name="headway",
    help="The orchestrator of asynchronous RL post-training: the configured staleness bound is the observed bound.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: a tenth of a second less, and the same in a log
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, Argument(metavar="CONFIG", help="The run's TOML file.")]
Overrides = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Give a key another value, like rollout.max_staleness=4. May be repeated."),
]
FromBatch = Annotated[
    int | None,
    Option("--from-batch", metavar="K", min=0, help="Of that run: only what was from batch K on, if its start was unlike the rest."),
]
UntilBatch = Annotated[int | None, Option("--until-batch", metavar="K", min=0, help="Of that run: only what was before batch K.")]


def _version(asked: bool) -> None:
    if asked:
        from headway import __version__

        say(f"headway {__version__}")
        raise Exit


@app.callback()
def headway(
    *,
    version: Annotated[bool, Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)] = False,
) -> None:
    """Hold the options that come before a command."""


@app.command()
def run(
    config: ConfigPath,
    *,
    set_: Overrides = None,
    name: Annotated[str | None, Option("--name", help="Name of the run; the same as --set run.name=NAME.")] = None,
    synchronous: Annotated[bool, Option("--synchronous", help="Generate and train in turn: max_staleness = steps_ahead = 0.")] = False,
    resume: Annotated[bool, Option("--resume", help="Take the run in run.directory up where it ended; start it if there is none.")] = False,
) -> None:
    """Run a job until its target is reached, and drain.

    Exit codes: 0 done, 1 failed, 2 the input cannot be run, 3 stalled, 130 / 143 interrupted (SIGINT / SIGTERM, a time limit) and saved.
    """
    from headway import config as configs
    from headway.launch.run import run as run_config

    loaded = configs.load_config(config, [*(set_ or ()), *([f"run.name={name}"] if name is not None else ())])
    if synchronous:
        loaded = configs.synchronous(loaded)
    configs.check_world(loaded, config, open_prompts=False, resume=resume)
    raise Exit(run_config(loaded, config_path=config, resume=resume))


@app.command()
def check(config: ConfigPath, *, set_: Overrides = None) -> None:
    """Say everything about a config that can be known without starting: keys, ranges, files, imports, contradictions."""
    from headway import config as configs
    from headway.launch.servers import check_servers
    from headway.settings import steps_ahead

    loaded = configs.load_config(config, set_ or ())
    configs.check_world(loaded, config)
    check_servers(loaded)
    rollout = loaded.rollout
    size = f"{rollout.batch_tokens} tokens in" if rollout.batch_tokens else f"{rollout.groups_per_batch}"
    bound = "no bound" if rollout.on_stale == "train" else f"max_staleness {rollout.max_staleness}"
    ahead = f"steps_ahead {steps_ahead(rollout):g}" + (" at first" if rollout.steps_ahead == "auto" else "")
    say(
        f"{config}: ready to run in {configs.run_path(loaded)}: at most {loaded.run.steps} batches of {size} groups x "
        f"{rollout.group_size} rollouts, {bound}, {ahead}, on_stale {rollout.on_stale}"
    )


app.add_typer(engine.app, name="engine")


@app.command()
def trainer(*, run: Annotated[Path, Option("--run", metavar="DIR", help="The run directory to train in.")]) -> None:
    """Train the batches of a run with headway's own trainer, until the run ends."""
    from headway.embedded.trainer import serve
    from headway.lifeline import guard

    guard()
    serve(run)


@app.command()
def inspect(
    run: Annotated[Path, Argument(metavar="RUN", help="The run's directory; the run may be over or going on.")],
    what: Annotated[
        What, Argument(metavar="WHAT", help="staleness, waste (of sampled tokens), bias (of what is trained on) or quarantine.")
    ],
    *,
    json: Annotated[bool, Option("--json", help="Print the report as JSON.")] = False,
    picture: Annotated[
        Path | None, Option("--picture", metavar="FILE", help="Draw the staleness (PNG, SVG, PDF). Needs matplotlib.")
    ] = None,
) -> None:
    """Tell what became of a run's tokens and prompts: how stale, where they went, whose are trained on, which are given up."""
    from headway.cli.inspect import inspect_run

    raise Exit(inspect_run(run, what, as_json=json, picture=picture))


@app.command()
def retrace(
    run: Annotated[Path, Argument(metavar="RUN", help="The run's directory; the run may be over or going on.")],
    *,
    until_event: Annotated[int | None, Option("--until-event", metavar="N", min=0, help="Stop after the first N events.")] = None,
    until_batch: Annotated[int | None, Option("--until-batch", metavar="K", min=0, help="Stop before batch K is formed.")] = None,
    until_version: Annotated[int | None, Option("--until-version", metavar="V", min=0, help="Stop before version V is published.")] = None,
    json: Annotated[bool, Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Play a run's journal again through the rules, and show the state in which it decided. Exit code 1: journal and rules diverge."""
    from headway.cli.retrace import retrace_run

    raise Exit(retrace_run(run, events=until_event, batch=until_batch, version=until_version, as_json=json))


@app.command()
def chaos(
    config: ConfigPath,
    *,
    plan: Annotated[Path, Option("--plan", metavar="PLAN", help="TOML file with the faults: what, when, for how long.")],
    set_: Overrides = None,
    name: Annotated[str | None, Option("--name", help="Name of the run; unset: the config's, with -chaos behind it.")] = None,
) -> None:
    """Run a job under faults, and tell whether anything broke that must not: nothing lost, nothing trained twice, the bound kept."""
    from headway.cli.chaos import play_chaos

    raise Exit(play_chaos(config, plan, overrides=set_ or (), name=name))


@app.command()
def simulate(
    scenario: Annotated[
        Path | None, Argument(metavar="SCENARIO", help="TOML file: the world and the knobs of the run. Keys: headway scenario-reference.")
    ] = None,
    more: Annotated[list[str] | None, Argument(metavar="KEY=VALUE,VALUE", hidden=True)] = None,
    *,
    from_run: Annotated[Path | None, Option("--from-run", metavar="RUN", help="The world as this run's directory measured it.")] = None,
    from_batch: FromBatch = None,
    until_batch: UntilBatch = None,
    set_: Overrides = None,
    out: Annotated[
        Path | None, Option("--out", metavar="DIR", help="Save figures, timeline, scenario, pictures and a page for browsers there.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print the figures as JSON.")] = False,
    sweep: Annotated[
        list[str] | None,
        Option(
            "--sweep",
            metavar="KEY=VALUE,VALUE ...",
            help="Simulate a grid, like max_staleness=1,2,4 (a key of [rollout]); other keys may follow, each with its values.",
        ),
    ] = None,
    jobs: Annotated[int, Option("--jobs", metavar="N", min=1, help="Of a sweep: simulate so many points at once, each in a process.")] = 1,
    cohorts: Annotated[bool, Option("--cohorts", help="By the cohort stepper: for large fleets in which nothing fails.")] = False,
) -> None:
    """Play a run on virtual time, with headway's own components, and tell what it came to: rates, staleness, waste, waits."""
    from headway.cli.measuring import FromRun
    from headway.cli.simulate import scenario_and_grid, simulate_scenario

    measured = FromRun(from_run, from_batch, until_batch)
    path, grid = scenario_and_grid([*([] if scenario is None else [str(scenario)]), *(more or ())], sweep or ())
    raise Exit(
        simulate_scenario(path, overrides=set_ or (), out=out, as_json=json, from_run=measured, sweep=grid, cohorts=cohorts, jobs=jobs)
    )


@app.command()
def plan(
    scenario: Annotated[
        Path | None, Argument(metavar="SCENARIO", help="TOML file: the world and the budget. Keys: headway scenario-reference.")
    ] = None,
    *,
    for_: Annotated[Path | None, Option("--for", metavar="CONFIG", help="Judge this run's TOML file instead of choosing.")] = None,
    from_run: Annotated[Path | None, Option("--from-run", metavar="RUN", help="The world as this run's directory measured it.")] = None,
    from_batch: FromBatch = None,
    until_batch: UntilBatch = None,
    set_: Overrides = None,
    json: Annotated[bool, Option("--json", help="Print the plan as JSON.")] = False,
    simulate: Annotated[bool, Option("--simulate/--no-simulate", help="Confirm by simulation what closed forms say.")] = True,
) -> None:
    """Say what to set (bound, steps ahead, batch size, rollouts in flight, engines), what comes of it, and what each knob is worth."""
    from headway.cli.measuring import FromRun
    from headway.cli.plan import plan_scenario

    measured = FromRun(from_run, from_batch, until_batch)
    raise Exit(plan_scenario(scenario, config=for_, from_run=measured, overrides=set_ or (), as_json=json, simulates=simulate))


@app.command("config-reference")
def config_reference() -> None:
    """Print the reference of all config keys, in Markdown."""
    from headway.cli.reference import reference

    say(reference().rstrip("\n"))


@app.command("scenario-reference")
def scenario_reference() -> None:
    """Print the reference of all scenario keys, in Markdown."""
    from headway.cli.reference import scenario_reference as page

    say(page().rstrip("\n"))
