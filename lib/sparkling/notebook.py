"""What a notebook holds in its hand: one `Session`, so that every cell stays one short sentence.

How a notebook reads (this is `50_humming`, whole; the same source runs on every lane)::

    # parameters                                   <- the one cell tagged `parameters`
    lane = "auto"                                  # spark, gpu, cpu, or auto
    run_id = ""                                    # empty: a new run

    from sparkling import notebook
    nb = notebook.begin("50_humming", lane=lane, run_id=run_id)
    nb.opening                                     # the card: have, minutes, risks, undo

    nb.check()                                     # needs, each with a tick or a cross and a remedy
    nb.diff("humming")                             # the one change against the stage before
    nb.command("humming")                          # the whole command, as it will be run
    nb.start("humming")                            # starts SGLang; ready = a real token came back
    nb.prove()                                     # live or not; stops the notebook if not
    nb.measure()                                   # this arm, the same prompts as every other arm
    nb.stop()
    nb.closing                                     # what was proved here, and what comes next

Every call returns an object that shows itself (HTML in Jupyter and on GitHub, text in a terminal),
so a cell ends with the call and nothing is printed by hand.

Where a lane cannot run a stage, `start` starts nothing and says why in one line, `prove` shows the
evidence wanted beside a recording that is labelled as one, and `measure` says that nothing was
measured. None of them raises, so the cells need no `if`.

More, for the notebooks that want it::

    nb.lane, nb.recipe, nb.run                     # the plain objects underneath
    nb.server, nb.client                           # the running server (None before start) and a Client
    nb.launch("nextn")                             # the Launch (the Spark's where unavailable here)
    nb.unavailable("humming")                      # None, or the reason as one sentence
    nb.require("humming")                          # raises with that reason (for scripts)
    nb.wanted("nextn")                             # the evidence a stage will be asked for
    nb.diff("nextn", against="baseline")          # against any other stage
    nb.start("nextn", variant="trap")              # a variant of a stage: its arm is "nextn-trap"
    nb.prove(broken=True)                          # for a stage that is broken on purpose
    nb.ask("What is 17 x 23?", max_tokens=200)     # one streamed request, shown with its timings
    nb.measure(["long-answer"], repeats=5)         # chosen workloads, chosen repeats
    nb.evaluate(24)                                # graded questions, proved again afterwards
    nb.ladder()                                    # every arm of this run as one picture
    nb.round_cost()                                # what a round of speculation costs here
    nb.recording("h200-humming")                   # one recording, plainly labelled
    nb.endpoint()                                  # how to call the running server from elsewhere

The text of the two cards is data: `notebooks/cards.toml`, one table per notebook (see `card`).
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkling import bench, card, environments, evaluation, needs, recordings, show, store, tidy
from sparkling import lane as _lane
from sparkling import proof as _proof
from sparkling import recipe as _recipe
from sparkling import server as _server
from sparkling.client import Client
from sparkling.errors import SparklingError, UsageError
from sparkling.files import read_json
from sparkling.live import in_kernel
from sparkling.recipe import Launch
from sparkling.report import ROWS, ladder_rows, machine_of


def begin(
    name: str,
    lane: str = "auto",
    run_id: str = "",
    *,
    recipe: str = "",
    edition: str = "",
    params: Mapping[str, Any] | None = None,
) -> Session:
    """Open a notebook: its lane, recipe and run folder. Starts nothing.

    lane: "spark", "gpu", "cpu" or "auto". run_id: "" for a new run; the suite gives its own.
    recipe: a name or a file instead of the lane's. edition: the build of SGLang, one of the
    recipe's; "" for SPARKLING_EDITION's or the recipe's own. Raises UsageError.
    """
    where = _lane.detect(lane, edition=edition or None)
    chosen = _recipe.load(recipe or where.recipe_path, root=where.root)
    if where.edition in chosen.editions:  # another recipe may have others
        chosen = chosen.with_edition(where.edition)
    run = store.open_run(where.runs, run_id or None, notebook=name, params=dict(params or {}))
    made_of = {"name": chosen.name, "sha256": chosen.sha256, "edition": chosen.edition}
    run.update({"lane": where.kind, "recipe": made_of})
    environments.note(run, where.server_python)
    tidy.guard_kernel()
    session = Session(name, where, chosen, run)
    atexit.register(session.stop)
    return session


class Session:
    """One open notebook. Its methods return objects that show themselves."""

    def __init__(self, name: str, lane: _lane.Lane, recipe: _recipe.Recipe, run: store.Run) -> None:
        self.name, self.lane, self.recipe, self.run = name, lane, recipe, run
        self.server: _server.Server | None = None
        self.stage: str | None = None
        self.arm: str | None = None  # the stage, with the variant that is laid over it
        self.proofs: list[_proof.Proof] = []
        self._answered = False  # a server was started here and generated a token
        self._missing: str | None = None  # why the stage asked for last cannot run here

    def __repr__(self) -> str:
        return f"Session({self.name!r}, lane={self.lane.kind!r}, run={self.run.id!r})"

    # -- cards and checks ----------------------------------------------------------------------

    @property
    def opening(self) -> show.View:
        """The opening card."""
        return card.opening(self.name, self.lane)

    def check(self, *names: str) -> needs.Checks:
        """Check the card's needs (or these); raises with the first unmet one, table shown first."""
        found = needs.check(names or card.one(self.name, self.lane).needs, self.lane)
        if not found.ok:
            _display(found.view())
            found.require()
        return found

    @property
    def closing(self) -> show.View:
        """The closing card; a server that still runs is stopped first."""
        self.stop()
        self.run.finish("done")
        done = [_told(p) for p in self.proofs]
        return card.closing(self.name, self.lane, done, answered=self._answered)

    # -- stages --------------------------------------------------------------------------------

    def unavailable(self, stage: str) -> str | None:
        """Why this lane cannot run a stage, as one sentence; None when it can."""
        return self.recipe.available(stage)

    def require(self, stage: str) -> None:
        """Raise UsageError when this lane cannot run a stage (or there is none of that name)."""
        self.recipe.require(stage, self.lane.kind)

    def launch(self, stage: str, *, variant: str | None = None, port: int = 30000) -> Launch:
        """The stage's Launch. Where this lane cannot run it: the Spark's, to look at only."""
        recipe, model = self._book(stage)
        return recipe.render(stage, model=model, port=port, variant=variant, cache=self.lane.cache)

    def command(self, stage: str, *, variant: str | None = None) -> show.View:
        """The whole command of a stage, ready to copy."""
        return self._elsewhere(stage, show.command(self.launch(stage, variant=variant)))

    def diff(
        self, stage: str, against: str | None = None, *, variant: str | None = None
    ) -> show.View:
        """What a stage changes against the one before it on its ladder (or against another); with
        `variant`, what that changes in the stage."""
        recipe, model = self._book(stage)
        other = against or (stage if variant else recipe.stage(stage).parent)
        if other is None:
            return show.note(f"{stage} is where the ladder begins: there is nothing before it.")
        before, after = (
            recipe.render(s, model=model, variant=v, cache=self.lane.cache)
            for s, v in ((other, None), (stage, variant))
        )
        return self._elsewhere(stage, show.diff(before, after))

    def wanted(self, stage: str) -> show.View:
        """The evidence that a stage will be asked for."""
        return self._elsewhere(stage, show.proof(_proof.wanted(self.launch(stage))))

    def recording(self, name: str) -> show.View:
        """One recording, plainly labelled (`sparkling.recordings.names()` lists them)."""
        return show.recording(name)

    # -- a running server ----------------------------------------------------------------------

    def start(
        self, stage: str, *, variant: str | None = None, api_key: str | None = None
    ) -> show.View:
        """Start a stage and wait until it has generated a token; any other server ends first.

        A stage that this lane cannot run starts nothing and says so. Raises ServerError with the
        cause and the log's last lines.
        """
        self.stop()
        self.stage, self._missing = stage, self.unavailable(stage)
        self.arm = f"{stage}-{variant}" if variant else stage
        if self._missing:
            return show.note(f"Nothing is started: {self._missing}")
        launch = self.launch(stage, variant=variant, port=0)
        log = self.run.path("logs", f"{self.arm}-{time.strftime('%H%M%S')}.log")
        self.run.add_secret(api_key)
        with show.Live(f"Starting {self.arm}") as live:
            self.server = _server.start(
                launch,
                python=self.lane.server_python,
                log=log,
                api_key=api_key,
                deadline_s=self.recipe.timeouts.get("ready_s", 180),
                progress=lambda phase, _seconds: live.update(note=phase),
                runs=self.lane.runs,
            )
            self._answered = True
            live.end(f"ready after {self.server.ready_seconds:.0f} s")
        self.run.update({"launches": {self.arm: self.server.launch.to_json()}})
        where = f"{self.arm} is ready at {self.server.url} after {self.server.ready_seconds:.0f} s"
        reckoned = getattr(self.server, "need", None)
        need = f"; it {reckoned.line()}" if reckoned else ""
        return show.note(f"{where}; its log is {log.name}{need}.")

    @property
    def client(self) -> Client:
        """A Client of the running server. Raises UsageError when none runs."""
        return self._running("ask").client()

    def prove(self, *, broken: bool = False) -> _proof.Proof:
        """Is every switch of the stage what it should be? Raises NotLive, evidence shown first.

        Where the lane cannot run the stage: the recording of it, which proves nothing here.
        `broken`: the stage was broken on purpose, so the proof must find it: its evidence is
        returned, and SparklingError raised if it finds nothing.
        """
        if self._missing:
            return self._recorded_proof()
        running = self._running("prove")
        proof = _proof.prove(running, baseline=self._reference())
        proof.stage = self.arm or proof.stage
        self.run.save(f"proof-{proof.stage}", proof)
        if broken:
            if proof.ok:
                _display(show.proof(proof))
                raise SparklingError(
                    f"{proof.stage} was to be broken, and its proof found nothing."
                )
            return proof
        self.proofs.append(proof)
        if not proof.ok:
            _display(show.proof(proof))
            proof.require()
        return proof

    def measure(
        self, workloads: Sequence[str] | None = None, *, repeats: int | None = None
    ) -> show.View:
        """Measure the running stage: the recipe's workloads, the same prompts as any other arm.

        Rows go to this notebook's `rows.jsonl`; what is there already is not measured again.
        """
        chosen = bench.workloads(self.recipe.sizes, workloads, texts=self.recipe.texts)
        count = bench.repeats_of(self.recipe.sizes, repeats)
        if self._missing:
            return show.note(f"Nothing is measured: {self._missing}")
        running = self._running("measure")
        with show.Live(f"Measuring {self.arm}") as live:
            rows = bench.run(
                running,
                arm=str(self.arm),
                launch=running.launch,
                workloads=chosen,
                repeats=count,
                out=self.run.path(f"{ROWS}.jsonl"),
                progress=live.progress,
            )
        return show.measured(bench.summarise(rows))

    def evaluate(self, questions: int = 0, **options: Any) -> show.View:
        """Ask the running arm graded questions (the recipe's number; 0 is that), then prove it again.

        Rows go to `<run>/<arm>/<questions>.jsonl`; what is there already is not asked again. Options
        as `evaluation.in_notebook` takes them.
        """
        if self._missing:
            return show.note(f"Nothing is evaluated: {self._missing}")
        return evaluation.in_notebook(self, self._running("evaluate"), questions, **options)

    def ladder(self, *, workload: str | None = None, whole_run: bool = False) -> show.View:
        """Every arm that this run has measured, as one picture.

        The arms are those of the notebook that measured most of them, or with `whole_run` those of
        all notebooks of the run; over one workload, or over all.
        """
        rows = self.run.all_rows(ROWS) if whole_run else ladder_rows(self.run)
        rows = [r for r in rows if workload in (None, r.get("workload"))]
        if not rows:
            return show.note("Nothing is measured in this run yet.")
        if all(r.get("arm") != "baseline" for r in rows):
            return show.note(
                "This run has no baseline to compare with: run 40_baseline in it first."
            )
        return show.ladder(bench.ladder(rows), where=machine_of(rows))

    def round_cost(self, plain: str = "fp8-head", spec: str = "nextn") -> show.View:
        """What a round costs, for the workloads of which this run measured both stages."""
        costs = bench.round_costs(self.run.all_rows(ROWS), plain, spec)
        if not costs:
            return show.note(f"This run has no prompt that both {plain} and {spec} measured.")
        return show.round_costs(costs)

    def ask(self, question: str, *, max_tokens: int = 256, **options: Any) -> show.View:
        """One streamed chat request, shown with its times. Options as `Client.chat` takes them."""
        if self._missing:
            return show.note(f"Nobody is asked: {self._missing}")
        return show.reply(self.client.chat(question, max_tokens=max_tokens, **options))

    def endpoint(self) -> show.View:
        """How to call the running server from another program."""
        if self._missing:
            return show.note(f"There is no endpoint: {self._missing}")
        running = self._running("call")
        return show.endpoint(running.url, running.launch.served_name, key=bool(running.api_key))

    def stop(self) -> show.View:
        """Stop the server if one runs, and wait until it is gone. Harmless when none does."""
        server, self.server = self.server, None
        if server is None:
            return show.note("No server is running.")
        server.stop()
        return show.note("The server is stopped, its port free and its memory back.")

    # -- inside --------------------------------------------------------------------------------

    def _running(self, what: str) -> _server.Server:
        if self.server is None:
            raise UsageError(f"There is no running server to {what}; start a stage first.")
        return self.server

    def _book(self, stage: str) -> tuple[_recipe.Recipe, Path]:
        """The recipe that can render a stage, and the checkpoint to render it with."""
        if stage not in self.recipe.stages or not self.unavailable(stage):
            return self.recipe, self.lane.model
        spark = _recipe.load(_lane.RECIPES["spark"], root=self.lane.root)
        return spark, Path(spark.model)

    def _elsewhere(self, stage: str, view: show.View) -> show.View:
        reason = self.unavailable(stage)
        if not reason:
            return view
        return show.note(f"Not on this lane: {reason} Below is the Spark's recipe.") + view

    def _recorded_proof(self) -> _proof.Proof:
        stage = str(self.stage)
        launch = self.launch(stage)
        name = recordings.for_stage(stage, launch.switches)
        return _proof.prove_recorded(name) if name else _proof.wanted(launch)

    def _reference(self) -> Path | None:
        """The newest proof of this run whose stage had no FP8 head and whose server had the same
        recipe: what the FP8 head's log-probabilities are compared with."""
        found = [p for p in self.run.dir.glob("*/proof-*.json") if _without_head(p)]
        return max(found, key=lambda p: p.stat().st_mtime, default=None)


def _without_head(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError):
        proof = _proof.Proof.from_json(read_json(path))
        states = {v.switch: v.state for v in proof.verdicts}
        return states.get("fp8-head") == "off" and states.get("nextn") == "off"
    return False


def _told(proof: _proof.Proof) -> str:
    """A proof as one line of the closing card."""
    parts = [f"{v.switch} {v.state}" for v in proof.verdicts]
    return f"{proof.stage}: {', '.join(parts)}"


def _display(view: show.View) -> None:
    """Show something before an error is raised, in a kernel or a terminal."""
    if in_kernel():
        from IPython.display import display

        display(view)
    else:
        print(view)
