"""For each switch of a stage: live, off, not live or cannot tell, with the evidence beside it.

`judge` is pure; `prove` asks a running server, `prove_recorded` applies the same rules to a
recording. The rules themselves are in `evidence`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sparkling import limits as _limits
from sparkling import recipe as _recipe
from sparkling import recordings as _recordings
from sparkling.errors import NotLive, ServerError, SparklingError
from sparkling.evidence import Evidence, Probe, Reading, read_log
from sparkling.probing import (
    PROBE_PROMPT,
    PROBE_TOKENS,
    applied_of,
    process_environment,
    read_status,
    reference_of,
    run_probe,
    status_after,
)
from sparkling.wanted import RULES, asked, declared
from sparkling.wanted_draft import MIN_ROUNDS, accept_readings

GOOD = ("live", "off")


@dataclass(frozen=True)
class Verdict:
    """What is so about one switch.

    state: "live" (declared on, proved), "off" (declared off, proved), "not live" (declared on,
    contradicted), "not off" (declared off, contradicted) or "cannot tell" (too little is known).
    """

    switch: str
    expected_on: bool
    state: str
    evidence: list[Evidence]
    cause: str | None = None
    remedy: str | None = None
    readings: list[Reading] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the switch is proved to be as the stage declares it."""
        return self.state in GOOD

    @property
    def sentence(self) -> str:
        """One sentence: what is so, why, and what to do."""
        text = f"switch {self.switch!r} is {self.state}"
        if self.state == "cannot tell":
            want = "on" if self.expected_on else "off"
            text = f"switch {self.switch!r} cannot be proved {want}"
        if self.cause:
            text += f": {self.cause}"
        return text + (f"; {self.remedy}" if self.remedy else "") + "."


@dataclass
class Proof:
    """The verdicts of one stage on one server (or of one recording)."""

    stage: str
    verdicts: list[Verdict]
    probe: Probe | None = None
    label: Mapping[str, str] | None = (
        None  # set for a recording: what, where, when, versions, caveat
    )
    made: str = ""
    only_wanted: bool = False  # nothing was looked at: this is the list of what would be asked
    limits: list[_limits.Limit] | None = (
        None  # of every expert layer; None: the server says nothing
    )
    clamp: bool = False  # whether the launch asks the plugin to see to them

    @property
    def ok(self) -> bool:
        """True when every switch is proved to be as declared."""
        return bool(self.verdicts) and all(v.ok for v in self.verdicts) and not self.unlimited

    @property
    def unlimited(self) -> str | None:
        """Why the SwiGLU limits that the launch asks for are not proved, in one clause, or None."""
        if not self.clamp:
            return None
        if self.limits is None:
            return "the plugin says nothing about the SwiGLU limits of the experts"
        return _limits.problem(self.limits)

    def require(self) -> None:
        """Raise `NotLive` with cause and remedy unless every switch is proved.

        A recording proves nothing about this machine, so it never raises.
        """
        if self.label is not None or self.only_wanted or self.ok:
            return
        bad = [v for v in self.verdicts if not v.ok]
        if not bad and self.verdicts and self.unlimited:
            raise NotLive(
                f"{_limits.SWITCH}=1 is not at work: {self.unlimited}; read the server's log for "
                "what the plugin says."
            )
        bad = bad or self.verdicts
        if not bad:
            raise NotLive(f"stage {self.stage!r} declares no switch, so nothing was proved.")
        first = sorted(bad, key=lambda v: v.state == "cannot tell")[0]
        more = [f"{v.switch} ({v.state})" for v in bad if v is not first]
        tail = f" Also: {', '.join(more)}." if more else ""
        raise NotLive(first.sentence[0].upper() + first.sentence[1:] + tail)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the run folder; `from_json` reads it back."""
        data = asdict(self)
        data["ok"] = self.ok
        if self.probe is not None and self.probe.reference:
            # What it was compared with is a proof of its own; here its stage is enough.
            data["probe"]["reference"] = {"stage": self.probe.reference.get("stage")}
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Proof:
        """The proof that `to_json` wrote."""
        verdicts = [
            Verdict(
                v["switch"],
                v["expected_on"],
                v["state"],
                [Evidence(**e) for e in v["evidence"]],
                v.get("cause"),
                v.get("remedy"),
                [Reading(**r) for r in v.get("readings", ())],
            )
            for v in data["verdicts"]
        ]
        probe = data.get("probe")
        if probe:
            probe = Probe(**{**probe, "applied": tuple(probe.get("applied") or (None, None))})
        return Proof(
            data["stage"],
            verdicts,
            probe or None,
            data.get("label"),
            data.get("made", ""),
            data.get("only_wanted", False),
            [_limits.Limit(**one) for one in data.get("limits") or ()] or None,
            data.get("clamp", False),
        )

    def _repr_html_(self) -> str:
        from sparkling import show

        return show.proof(self)._repr_html_()

    def __str__(self) -> str:
        from sparkling import show

        return str(show.proof(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("…" if cycle else str(self))


def judge(
    switch: str,
    expected: bool,
    arguments: Mapping[str, Any] | None,
    log_events: Iterable[Any] | None,
    status: Mapping[str, Any] | None,
    probe: Probe | None,
    expect: Any = None,
) -> Verdict:
    """The verdict on one switch, from what the server said, wrote and answered. Pure.

    arguments: the /server_info answer (plus `process_env`, see `evidence.environment_of`), or None.
    log_events: typed events of this start, or None when no log could be read.
    status: the plugin's status file; None when nothing is known of it, {} when the server was told
    where to write it and nothing came. expect: the stage's `recipe.Expect` for this switch: the
    exact arguments that the recipe declares.

    Proved (live or off): at least two of the three independent places confirm, none contradicts,
    and for a switch that does work (NEXTN, the FP8 head) one of them saw the work, not the setting.
    """
    facts = read_log(log_events)
    evidence = RULES[switch](expected, arguments, facts, status, probe)
    if expect is not None:
        evidence += declared(switch, expect, arguments, evidence)
    readings = []
    if switch == "nextn" and expected:
        readings = accept_readings(arguments, facts, probe)
    against = [e for e in evidence if e.ok is False]
    places = {e.place for e in evidence if e.ok is True}
    if against:
        # What the server did says more than how it was set up: the work that was missed comes first.
        first = next((e for e in against if e.place == "probe"), against[0])
        return Verdict(
            switch,
            expected,
            "not live" if expected else "not off",
            evidence,
            first.cause,
            first.remedy,
            readings,
        )
    if len(places) >= 2 and (not expected or _worked(switch, evidence)):
        return Verdict(switch, expected, "live" if expected else "off", evidence, readings=readings)
    silent = [e for e in evidence if e.ok is None]
    cause = (
        "too little is known (" + "; ".join(f"{e.source}: {e.found}" for e in silent) + ")"
        if silent
        else "too little is known"
    )
    return Verdict(
        switch,
        expected,
        "cannot tell",
        evidence,
        cause,
        "prove it again on a running server started by this recipe",
        readings,
    )


def _worked(switch: str, evidence: list[Evidence]) -> bool:
    """Whether something beyond the settings confirms that the switch is at work."""
    if switch == "nextn":
        return any(e.ok and "accept length" in e.wanted for e in evidence)
    return any(e.ok and e.place != "arguments" for e in evidence)


def judge_all(
    switches: Mapping[str, bool],
    arguments: Mapping[str, Any] | None,
    log_events: Iterable[Any] | None,
    status: Mapping[str, Any] | None,
    probe: Probe | None,
    expect: Mapping[str, Any] | None = None,
) -> list[Verdict]:
    """`judge` for every switch of a stage."""
    events = None if log_events is None else list(log_events)
    return [
        judge(s, on, arguments, events, status, probe, (expect or {}).get(s))
        for s, on in switches.items()
        if s in RULES
    ]


def prove(server: Any, *, baseline: Path | None = None, tokens: int = PROBE_TOKENS) -> Proof:
    """Prove every switch of the running server's launch, on or off.

    Sends one greedy request of `tokens` tokens. `baseline`: a proof file of the stage without the
    FP8 head (`Proof.to_json`), to compare log-probabilities with. Raises ServerError when
    the server is gone or does not answer.
    """
    launch = server.launch
    if not server.alive():
        raise ServerError(
            f"The server on port {server.port} is not running, so nothing can be proved; start "
            "the stage again."
        )
    client = server.client()
    info = dict(client.server_info())
    info["process_env"] = process_environment(server.pid, launch.env)
    status_file = getattr(server, "status_file", None)
    before = read_status(status_file, server.started)
    reference = reference_of(baseline)
    probe = run_probe(client, tokens, reference)
    after = status_after(status_file, server.started, before, launch.switches.get("fp8-head"))
    info_after = client.server_info()
    if info_after.get("internal_states"):
        info["internal_states"] = info_after["internal_states"]
    probe = replace(probe, applied=(applied_of(before), applied_of(after)))
    verdicts = judge_all(launch.switches, info, server.events(), after, probe, expectations(launch))
    return Proof(
        launch.stage,
        verdicts,
        probe,
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        limits=_limits.read(after),
        clamp=launch.env.get(_limits.SWITCH) == "1",
    )


def expectations(launch: Any) -> Mapping[str, Any]:
    """What the launch's recipe declares for each switch; nothing where there is no such recipe."""
    if launch.variant:
        return {}  # a variant changes arguments on purpose
    try:
        return _recipe.load(launch.recipe).stage(launch.stage).expect
    except SparklingError:
        return {}


def prove_recorded(name: str) -> Proof:
    """The same rules applied to a recording (`sparkling.recordings`); labelled as one, never raises.

    Raises UsageError for a name that does not exist.
    """
    data = _recordings.load(name)
    probe = _probe_of_recording(data.get("meta_info"))
    events = _recordings.events(data)
    verdicts = judge_all(data["switches"], data.get("arguments"), events, data.get("status"), probe)
    limits = _limits.read(data.get("status"))
    return Proof(
        data["stage"], verdicts, probe, data["label"], data["label"]["when"], limits=limits
    )


def _probe_of_recording(meta: Mapping[str, Any] | None) -> Probe | None:
    if not meta:
        return None
    return Probe(
        answered=bool(meta.get("completion_tokens")),
        tokens=meta.get("completion_tokens"),
        rounds=meta.get("spec_verify_ct"),
        correct=meta.get("spec_num_correct_drafts"),
        proposed=meta.get("spec_num_proposed_drafts"),
        reported_length=meta.get("spec_accept_length"),
        reported_rate=meta.get("spec_accept_rate"),
        applied=tuple(meta.get("applied") or (None, None)),
    )


def wanted(launch: Any) -> Proof:
    """What a stage will be asked for, before anything is started."""
    expect = expectations(launch)
    verdicts = [
        Verdict(switch, on, "cannot tell", asked(switch, on, expect.get(switch)))
        for switch, on in launch.switches.items()
        if switch in RULES
    ]
    return Proof(launch.stage, verdicts, only_wanted=True)


__all__ = [
    "MIN_ROUNDS",
    "PROBE_PROMPT",
    "PROBE_TOKENS",
    "Evidence",
    "Probe",
    "Proof",
    "Reading",
    "Verdict",
    "judge",
    "judge_all",
    "prove",
    "prove_recorded",
    "wanted",
]
