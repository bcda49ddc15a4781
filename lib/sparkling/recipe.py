"""A recipe is data: TOML in, a server's command line and environment out. Nothing here runs.

A *stage* is its parent plus a declared delta, so two arms cannot differ in anything else; the
*ladder* is the published order of stages, each turning on one *switch*; a *variant* is a named
change that can be laid over any stage. `Recipe.render` is pure: the same arguments give the same
`Launch`, to the letter, on any machine.

Schema (every key not named here is refused, anywhere)::

    schema = 1
    name, title, sglang     strings; `sglang` is the version whose flags the recipe is checked by
    regime                  one sentence; results of different regimes are not comparable
    model                   the checkpoint's place, relative to the repository root, or absolute
    served_name             --served-model-name
    texts = "general"       in whose language the workloads ask (see workloads.TEXTS)
    gpus = 1                GPUs the recipe uses: tp-size × pp-size must equal it
    ladder = [...]          stage names; each has the one before it as parent

    [shared.flags]          what every stage starts from: SGLang's flag names without dashes.
    [shared.env]            true = a switch, a table = JSON; never false (see unset_flags)
    [stages.NAME]           title, parent (absent on the ladder's first), switch (what it turns on)
                            unavailable = "reason": this lane cannot do the stage; nothing else then
    [stages.NAME.flags] [.env], unset_flags, unset_env        the delta to the parent
    [stages.NAME.expect.SWITCH]   what a proof wants of the running server, inherited from the
                            parent for switches that the stage does not name:
                            arguments (name = value as /server_info reports it), arguments_unset,
                            log, log_absent (text of log lines), status (dotted name = value in the
                            plugin's status file), probe (one sentence)
    edition                 which of [editions] is used when nobody chooses
    [editions.NAME]         title, requirements (file, relative to the root), environment (folder of
                            the venv), switches (those it has), build (the SGLang it is, when not
                            `sglang`; its variables are then not checked) and a delta like a stage's,
                            laid over every stage. Without the table: "stock", in .venv-server
    [variants.NAME]         title, why, parent (another variant, applied first), regime (when it is
                            another one), gpus, edition (the one it needs) and a delta like a stage's
    [editions.NAME.with.SWITCH] [variants.NAME.with.SWITCH] [.without.SWITCH]
                            a delta for stages with that switch on, or off: how a switch is told
    [why]                   flag or variable = why it has its value
    [noop]                  flag or variable = why it changes nothing here, kept as published
    [sizes] [timeouts]      whole numbers for the workloads (tokens) and the lane (seconds)

`{model}` in a value becomes the checkpoint's path and `{cache}` the cache folder, absolute.
Host, port, checkpoint and served name are given to `render`, never written into a recipe; neither
is anything secret.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkling import _flags, _rules
from sparkling._rules import SWITCHES, Settings
from sparkling._toml import Table, closest, read, sentence
from sparkling.errors import UsageError
from sparkling.files import absolute, expanded

SCHEMA = 1
STOCK = "stock"
MODULE = "sglang.launch_server"

SIZES = (
    "context",
    "short_output",
    "long_output",
    "repeat_output",
    "shape_input",
    "shape_output",
    "prompts",
    "repeats",
    "questions",
)
TIMEOUTS = ("ready_s", "request_s", "stop_s", "cell_s")

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_ENV_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")


# -- launches ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One server start: the words after `python`, and what is added to the environment.

    Never holds a secret: the API key is `server.start`'s business.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    recipe: str
    stage: str
    variant: str | None
    switches: dict[str, bool]
    served_name: str
    regime: str = ""
    edition: str = STOCK

    def words(self, flag: str) -> tuple[str, ...] | None:
        """Return the values of `--flag`: () for a switch that is set, None when it is not."""
        for name, values in self._flags():
            if name == f"--{flag.removeprefix('--')}":
                return values
        return None

    def value(self, flag: str) -> str | None:
        """Return the one value of `--flag`, None when it is not given."""
        values = self.words(flag)
        return None if values is None else " ".join(values)

    @property
    def host(self) -> str:
        return self.value("host") or "127.0.0.1"

    @property
    def port(self) -> int:
        return int(self.value("port") or 30000)

    @property
    def model(self) -> str:
        return self.value("model-path") or ""

    def with_port(self, port: int) -> Launch:
        """Return the same launch on another port."""
        at = self.argv.index("--port") + 1
        return dataclasses.replace(
            self, argv=(*self.argv[:at], str(_port(port)), *self.argv[at + 1 :])
        )

    def digest(self) -> str:
        """Return 16 hex digits that two launches share exactly when they differ in the port only.

        The arm's identity on disk: a row measured under another digest is another arm's. So is one
        of another build of SGLang.
        """
        same = [self.with_port(0).argv, sorted(self.env.items())]
        if self.edition != STOCK:
            same.append(self.edition)
        return hashlib.sha256(json.dumps(same).encode()).hexdigest()[:16]

    def shell(self, python: str = "python") -> str:
        """Return the launch as a command to paste into a POSIX shell, one flag a line."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        lines.append(shlex.join((python, *self.argv[:2])))
        lines += ["  " + shlex.join((name, *values)) for name, values in self._flags()]
        return " \\\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "argv": list(self.argv), "digest": self.digest()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Launch:
        """Return the launch that `to_json` wrote down."""
        known = {f.name for f in dataclasses.fields(cls)}
        kept = {key: value for key, value in data.items() if key in known}
        return cls(**{**kept, "argv": tuple(kept["argv"])})

    def _flags(self) -> list[tuple[str, tuple[str, ...]]]:
        found: list[tuple[str, tuple[str, ...]]] = []
        for word in self.argv[2:]:
            if word.startswith("--"):
                found.append((word, ()))
            else:
                name, values = found[-1]
                found[-1] = (name, (*values, word))
        return found


@dataclass(frozen=True)
class Change:
    """One difference: None means not given, "" a switch that is set (or an empty variable)."""

    kind: str  # "flag" | "env"
    name: str  # with its dashes, or the variable's name
    before: str | None
    after: str | None

    def __str__(self) -> str:
        def side(value: str) -> str:
            if self.kind == "env":
                return f"{self.name}={shlex.quote(value)}"
            return f"{self.name} {value}".rstrip()

        if self.before is None:
            return f"+ {side(self.after or '')}"
        if self.after is None:
            return f"- {side(self.before)}"
        return f"~ {side(self.before)} -> {self.after or '(empty)'}"


def diff(a: Launch, b: Launch) -> list[Change]:
    """Return what turns launch `a` into launch `b`: flags first, in the order of appearance."""
    changes = []
    for kind, before, after in (
        ("flag", {n: " ".join(v) for n, v in a._flags()}, {n: " ".join(v) for n, v in b._flags()}),
        ("env", a.env, b.env),
    ):
        for name in dict.fromkeys((*before, *after)):
            if before.get(name) != after.get(name):
                changes.append(Change(kind, name, before.get(name), after.get(name)))
    return changes


# -- the parts of a recipe -----------------------------------------------------------------------


@dataclass(frozen=True)
class Delta:
    """A declared change. Flags are keyed by SGLang's first name for them, without dashes."""

    where: str  # the table it stands in
    flags: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    unset_flags: tuple[str, ...] = ()
    unset_env: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.flags or self.env or self.unset_flags or self.unset_env)


@dataclass(frozen=True)
class Expect:
    """What a proof wants to find for one switch in one stage (see the module's schema)."""

    arguments: dict[str, Any] = field(default_factory=dict)
    arguments_unset: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    log_absent: tuple[str, ...] = ()
    status: dict[str, Any] = field(default_factory=dict)
    probe: str | None = None


@dataclass(frozen=True)
class Stage:
    """One configuration: a parent and a delta. `expect` is complete, one entry per switch."""

    name: str
    title: str
    parent: str | None
    switch: str | None
    delta: Delta
    expect: dict[str, Expect]
    unavailable: str | None = None


@dataclass(frozen=True)
class Edition:
    """One build of SGLang: its environment, and how it is told what our plugin does elsewhere."""

    name: str = STOCK
    title: str = "SGLang with the Sparkling plugin"
    requirements: str | None = None  # the file of its pins, relative to the repository root
    environment: str = ".venv-server"  # the folder of its virtual environment, as `requirements`
    switches: tuple[str, ...] = SWITCHES
    build: str | None = None
    delta: Delta = field(default_factory=lambda: Delta("editions.stock"))
    with_: dict[str, Delta] = field(default_factory=dict)
    without: dict[str, Delta] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """A named change that can be laid over any stage."""

    name: str
    title: str
    why: str
    parent: str | None
    regime: str | None
    gpus: int | None
    edition: str | None
    delta: Delta
    with_: dict[str, Delta]
    without: dict[str, Delta]


@dataclass(frozen=True)
class Recipe:
    """A model's launch data. Made by `load`, which has checked every stage and variant."""

    name: str
    title: str
    sglang: str
    regime: str
    model: Path
    served_name: str
    texts: str
    gpus: int
    ladder: tuple[str, ...]
    shared: Delta
    stages: dict[str, Stage]
    variants: dict[str, Variant]
    sizes: dict[str, int]
    timeouts: dict[str, int]
    why: dict[str, str]
    noop: dict[str, str]
    path: Path
    shown: str
    root: Path
    sha256: str
    editions: dict[str, Edition] = field(default_factory=lambda: {STOCK: Edition()})
    edition: str = STOCK

    def with_edition(self, name: str | None) -> Recipe:
        """Return the recipe for another edition (None: the same). Raises UsageError."""
        if name is None or name == self.edition:
            return self
        if name not in self.editions:
            raise self._unknown("edition", name, self.editions)
        return dataclasses.replace(self, edition=name)

    @property
    def built(self) -> Edition:
        """The edition in use."""
        return self.editions[self.edition]

    def stage(self, name: str) -> Stage:
        """Return a stage, or a combination of switches (see `combination`).

        Raises UsageError when there is none of that name.
        """
        if name in self.stages:
            return self.stages[name]
        first, plus, rest = name.partition("+")
        if not plus or first != self.ladder[0]:
            raise self._unknown("stage", name, self.stages)
        return self._combined(rest.split("+"))

    def combination(self, switches: Iterable[str]) -> str:
        """Return the name of the stage with just these switches on: the ladder's first stage, and
        each switch behind a +, in the ladder's order (`baseline+humming+nextn`)."""
        wanted = list(switches)
        return "+".join((self.ladder[0], *(s for s in SWITCHES if s in wanted)))

    def _combined(self, switches: Sequence[str]) -> Stage:
        """The ladder's first stage with the deltas of the stages that turn these switches on."""
        unknown = [s for s in switches if s not in SWITCHES]
        if unknown:
            raise self._unknown("switch", unknown[0], dict.fromkeys(SWITCHES))
        name = self.combination(switches)
        if name.split("+")[1:] != list(switches):
            raise UsageError(f"write this combination of switches as {name}.")
        base = self.stages[self.ladder[0]]
        rungs = {self.stages[s].switch: self.stages[s] for s in self.ladder}
        missing = [s for s in switches if s not in rungs]
        reasons = [self.stages[s].unavailable for s in missing if s in self.stages]
        if missing:
            reason = next(filter(None, reasons), f"No stage of the ladder turns {missing[0]} on.")
            return Stage(name, name, None, None, Delta(name), {}, reason)
        expect = {s: (rungs[s] if s in switches else base).expect[s] for s in base.expect}
        title = " + ".join(rungs[s].title for s in switches)
        return Stage(name, title, base.name, None, Delta(f"stages.{name}"), expect)

    def _chain(self, stage: str) -> list[Stage]:
        """The stages whose deltas make `stage`, the first one first."""
        if stage not in self.stages:
            turned_on = self.stage(stage).name.split("+")[1:]
            rungs = [self.stages[s] for s in self.ladder if self.stages[s].switch in turned_on]
            return [self.stages[self.ladder[0]], *rungs]
        chain = [self.stages[stage]]
        while chain[0].parent is not None:
            chain.insert(0, self.stages[chain[0].parent])
        return chain

    def variant(self, name: str) -> Variant:
        """Return a variant. Raises UsageError when there is none of that name."""
        if name not in self.variants:
            raise self._unknown("variant", name, self.variants)
        return self.variants[name]

    def available(self, stage: str) -> str | None:
        """Return why `stage` cannot run on this recipe's lane, or None when it can."""
        here: Stage | None = self.stage(stage)
        while here is not None:
            if here.unavailable:
                return here.unavailable
            here = self.stages[here.parent] if here.parent else None
        return None

    def require(self, stage: str, lane: str) -> None:
        """Raise UsageError when the lane called `lane` cannot run `stage`, or there is none."""
        reason = self.available(stage)
        if reason:
            raise UsageError(f"Stage {stage!r} cannot run on the {lane} lane: {reason}")

    def settings(self, stage: str, variant: str | None = None) -> Settings:
        """Return the flags and variables of a stage, checked. Raises UsageError."""
        reason = self.available(stage)
        if reason:
            raise UsageError(
                sentence(f"{self.shown}, table [stages.{stage}]: not available here: {reason}")
            )
        known = _flags.known(self.sglang)
        assert known is not None, "load has looked for it"
        settings = Settings(self.shown, known, gpus=self.gpus)
        settings.apply(self.shared)
        for step in self._chain(stage):
            settings.apply(step.delta, strict=True)
        switches = settings.switches()
        for switch, on in switches.items():
            if on and switch not in self.built.switches:
                raise UsageError(
                    f"{self.shown}: edition {self.edition} has no switch {switch}, which stage "
                    f"{stage} turns on; choose another edition."
                )

        overlay: list[Variant | Edition] = []
        name = variant
        while name is not None:
            layer = self.variant(name)
            if layer.edition not in (None, self.edition):
                raise UsageError(
                    f"{self.shown}: variant {name} is for edition {layer.edition}, and this is "
                    f"{self.edition}; choose it with --edition {layer.edition} or SPARKLING_EDITION."
                )
            overlay.append(layer)
            name = layer.parent
        for layer in (self.built, *reversed(overlay)):
            if isinstance(layer, Variant):
                settings.gpus = layer.gpus or settings.gpus
            settings.apply(layer.delta)
            for switch, on in switches.items():
                part = (layer.with_ if on else layer.without).get(switch)
                if part:
                    settings.apply(part)
        _rules.check(settings, self.sizes)
        return settings

    def render(
        self,
        stage: str,
        *,
        model: Path | str,
        port: int = 30000,
        host: str = "127.0.0.1",
        variant: str | None = None,
        cache: Path | str | None = None,
    ) -> Launch:
        """Return the launch of `stage`, with `variant` laid over it.

        Args:
            model: the checkpoint's directory (or a hub name); not looked at.
            port: 0 asks `server.start` to choose a free one.
            host: a loopback address; anything else is refused.
            cache: what `{cache}` stands for; the repository's `.cache` when not given.

        Raises:
            UsageError: an unknown or unavailable stage, an unknown variant, a bad argument.
        """
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise UsageError(
                f"host {host!r} would let other machines in; the server binds 127.0.0.1 only, so "
                "use an SSH tunnel to reach it from elsewhere."
            )
        if not str(model).strip():
            raise UsageError("the model path is empty; name the checkpoint's directory.")
        settings = self.settings(stage, variant)
        places = {"model": str(model), "cache": str(cache or self.root / ".cache")}

        def fill(text: str) -> str:
            return _PLACEHOLDER.sub(lambda found: places[found[1]], text)

        argv = ["-m", MODULE, "--model-path", str(model), "--served-model-name", self.served_name]
        argv += ["--host", host, "--port", str(_port(port))]
        for name, value in settings.flags.items():
            flag = settings.known.flags[name]
            argv += [f"--{name}", *(fill(word) for word in _flags.words(flag, value))]
        regime = self.regime
        layer = self.variants.get(variant or "")
        while layer is not None:
            if layer.regime:
                regime = layer.regime
                break
            layer = self.variants.get(layer.parent or "")
        return Launch(
            argv=tuple(argv),
            env={name: fill(value) for name, value in settings.env.items()},
            recipe=self.name,
            stage=stage,
            variant=variant,
            switches=settings.switches(),
            served_name=self.served_name,
            regime=regime,
            edition=self.edition,
        )

    def _unknown(self, kind: str, name: str, known: Mapping[str, Any]) -> UsageError:
        listed = ", ".join(known) or "none"
        kinds = f"{kind}es" if kind.endswith("ch") else f"{kind}s"
        return UsageError(
            sentence(
                f"{self.shown} has no {kind} {name!r} ({kinds}: {listed}){closest(name, known)}"
            )
        )


def _port(port: int) -> int:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise UsageError(f"port {port!r} is not a whole number from 0 to 65535.")
    return port


# -- loading -------------------------------------------------------------------------------------


def locate(path_or_name: Path | str, *, root: Path | None = None) -> Path:
    """Return the file of a recipe: a path, or the name of one in the repository's `env/recipes`.

    Raises:
        UsageError: a name that no recipe has.
    """
    text = str(path_or_name)
    if isinstance(path_or_name, Path) or text.endswith(".toml") or "/" in text:
        return absolute(text)
    folder = (root or _root()) / "env" / "recipes"
    names = sorted(p.stem for p in folder.glob("*.toml"))
    if text not in names:
        raise UsageError(
            sentence(
                f"recipe {text!r} is unknown (recipes: {', '.join(names)}; or give a .toml file)"
                f"{closest(text, names)}"
            )
        )
    return folder / f"{text}.toml"


def load(path_or_name: Path | str, *, root: Path | None = None) -> Recipe:
    """Return the recipe, with every stage, alone and under every variant, checked.

    Args:
        path_or_name: a file, or the name of one in `env/recipes`.
        root: the repository root, for `model` and `{cache}`; found when not given.

    Raises:
        UsageError: one sentence naming file, table and key.
    """
    base = (root or _root()).absolute()
    path = locate(path_or_name, root=base)
    shown = str(path.relative_to(base)) if path.is_relative_to(base) else str(path)
    return _Loader(path, shown, base).load()


def _root() -> Path:
    from sparkling.lane import find_root

    return find_root()


class _Loader:
    """Turns one parsed file into a checked `Recipe`."""

    def __init__(self, path: Path, shown: str, root: Path) -> None:
        self.path, self.shown, self.root = path, shown, root
        self.top = Table(shown, "", read(path, shown))

    def load(self) -> Recipe:
        top = self.top
        schema = top.take("schema", int)
        if schema != SCHEMA:
            raise top.refuse("schema", f"is {schema}; this library reads schema {SCHEMA}")
        self.sglang = top.take("sglang", str)
        known = _flags.known(self.sglang)
        if known is None:
            raise top.refuse(
                "sglang",
                f"there is no flag list of SGLang {self.sglang} (lists: "
                f"{', '.join(_flags.versions())}); write one with scripts/dump_flags.py",
            )
        self.known = known
        shared_table = top.table("shared")
        shared = self._delta(shared_table, unsets=False)
        shared_table.close()
        stages = self._stages()
        editions = self._editions()
        default = top.take("edition", str, next(iter(editions)))
        if default not in editions:
            raise top.refuse("edition", f"there is none called {default!r} in [editions]")
        recipe = Recipe(
            name=self._name(top, top.take("name", str), "name"),
            title=top.take("title", str),
            sglang=self.sglang,
            regime=top.take("regime", str),
            model=self._model(),
            served_name=self._served_name(),
            texts=self._texts(),
            gpus=self._count(top, "gpus", 1),
            ladder=top.strings("ladder"),
            shared=shared,
            stages=stages,
            variants=self._variants(editions),
            sizes=self._numbers("sizes", SIZES),
            timeouts=self._numbers("timeouts", TIMEOUTS),
            why=self._remarks("why"),
            noop=self._remarks("noop"),
            path=self.path,
            shown=self.shown,
            root=self.root,
            sha256=hashlib.sha256(self.path.read_bytes()).hexdigest(),
            editions=editions,
            edition=default,
        )
        top.close()
        self._check(recipe)
        return recipe

    # The pieces.

    def _name(self, table: Table, name: str, key: str | None = None) -> str:
        if not _NAME.fullmatch(name):
            raise table.refuse(key, f"the name {name!r} must be lower-case words joined by dashes")
        return name

    def _count(self, table: Table, key: str, default: int | None) -> int | None:
        value = table.take(key, int, default)
        if value is not None and value < 1:
            raise table.refuse(key, f"must be at least 1, not {value}")
        return value

    def _model(self) -> Path:
        place = expanded(self.top.take("model", str))
        return place if place.is_absolute() else self.root / place

    def _texts(self) -> str:
        from sparkling.workloads import TEXTS

        name = self.top.take("texts", str, "general")
        if name not in TEXTS:
            raise self.top.refuse(
                "texts",
                f"there are none called {name!r}{closest(name, TEXTS)} ({', '.join(TEXTS)})",
            )
        return name

    def _served_name(self) -> str:
        name = self.top.take("served_name", str)
        if ":" in name or name.startswith("-"):
            raise self.top.refuse("served_name", f"SGLang refuses the name {name!r}")
        return name

    def _numbers(self, key: str, allowed: tuple[str, ...]) -> dict[str, int]:
        table = self.top.table(key)
        found = {}
        for name in allowed:
            value = self._count(table, name, None)
            if value is not None:
                found[name] = value
        table.close()
        return found

    def _remarks(self, key: str) -> dict[str, str]:
        table = self.top.table(key)
        remarks = {}
        for name in table.data:
            flag = self.known.find(name)
            if flag is not None and flag.name != name:
                raise table.refuse(name, f"use the flag's first name, {flag.name}")
            if flag is None and not _ENV_NAME.fullmatch(name):
                raise table.refuse(
                    name,
                    f"SGLang {self.sglang} has no such flag{self.known.help_for(name)}",
                )
            remarks[name] = table.take(name, str)
        return remarks

    def _delta(self, table: Table, *, unsets: bool = True, build: str | None = None) -> Delta:
        flags_table, env_table = table.table("flags"), table.table("env")
        flags: dict[str, Any] = {}
        for key, value in flags_table.data.items():
            flag = self._flag(flags_table, key, value)
            if flag.name in flags:
                raise flags_table.refuse(key, f"is the same flag as {flag.name}, given twice")
            flags[flag.name] = value
        env: dict[str, str] = {}
        for key, value in env_table.data.items():
            env[key] = self._variable(env_table, key, value, build)
        unset_flags, unset_env = (), ()
        if unsets:
            unset_flags, unset_env = table.strings("unset_flags"), table.strings("unset_env")
            for name in unset_flags:
                flag = self.known.find(name)
                if flag is None or flag.name != name:
                    raise table.refuse(
                        "unset_flags",
                        f"SGLang {self.sglang} has no flag {name}{self.known.help_for(name)}",
                    )
                if name in flags:
                    raise table.refuse("unset_flags", f"both sets and unsets {name}")
            for name in unset_env:
                if name in env:
                    raise table.refuse("unset_env", f"both sets and unsets {name}")
        return Delta(table.name, flags, env, unset_flags, unset_env)

    def _flag(self, table: Table, key: str, value: Any) -> _flags.Flag:
        flag = self.known.find(key)
        if flag is None:
            raise table.refuse(
                key, f"SGLang {self.sglang} has no such flag{self.known.help_for(key)}"
            )
        reason = _rules.forbidden_flag(flag.name, value)
        if reason:
            raise table.refuse(key, reason)
        try:
            for word in _flags.words(flag, value):
                self._placeholders(table, key, word)
        except ValueError as error:
            raise table.refuse(key, str(error)) from None
        return flag

    def _variable(self, table: Table, key: str, value: Any, build: str | None) -> str:
        if not _ENV_NAME.fullmatch(key):
            raise table.refuse(key, "a variable's name is upper-case letters, digits and _")
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise table.refuse(key, f"must be a string or a whole number, not {value!r}")
        text = str(value)
        reason = _rules.forbidden_variable(key, text)
        if reason:
            raise table.refuse(key, reason)
        if key.startswith("SGLANG_") and key not in self.known.env and build is None:
            raise table.refuse(
                key,
                f"SGLang {self.sglang} does not know this variable and would ignore it silently"
                f"{closest(key, self.known.env)}",
            )
        if key.startswith("SPARKLING_") and key not in _rules.PLUGIN_VARIABLES:
            raise table.refuse(
                key,
                f"the plugin has no such switch{closest(key, _rules.PLUGIN_VARIABLES)}",
            )
        self._placeholders(table, key, text)
        return text

    def _placeholders(self, table: Table, key: str, text: str) -> None:
        for name in _PLACEHOLDER.findall(text):
            if name not in ("model", "cache"):
                raise table.refuse(
                    key, f"{{{name}}} is no placeholder; there are {{model}} and {{cache}}"
                )
        if text.startswith("~"):
            raise table.refuse(key, "~ is not expanded by a program; use {cache} or a full path")

    def _expect(self, table: Table) -> Expect:
        probe = table.take("probe", str, None)
        expect = Expect(
            arguments=dict(table.table("arguments").data),
            arguments_unset=table.strings("arguments_unset"),
            log=table.strings("log"),
            log_absent=table.strings("log_absent"),
            status=dict(table.table("status").data),
            probe=probe,
        )
        for key in ("arguments", "status"):
            for name, value in getattr(expect, key).items():
                if not isinstance(value, (str, int, float, bool)):
                    raise table.refuse(key, f"{name} must be one value, not {value!r}")
        table.close()
        return expect

    def _stages(self) -> dict[str, Stage]:
        table = self.top.table("stages")
        stages: dict[str, Stage] = {}
        for name, entry in table.tables():
            self._name(entry, name)
            unavailable = entry.take("unavailable", str, None)
            title = entry.take("title", str, name)
            if unavailable:
                entry.close()
                stages[name] = Stage(name, title, None, None, Delta(entry.name), {}, unavailable)
                continue
            switch = entry.take("switch", str, None)
            if switch is not None and switch not in SWITCHES:
                raise entry.refuse(
                    "switch",
                    f"{switch!r} is no switch (switches: {', '.join(SWITCHES)})"
                    f"{closest(switch, SWITCHES)}",
                )
            expects = entry.table("expect")
            expect = {}
            for key, sub in expects.tables():
                if key not in SWITCHES:
                    raise expects.refuse(
                        key,
                        f"no such switch (switches: {', '.join(SWITCHES)}){closest(key, SWITCHES)}",
                    )
                expect[key] = self._expect(sub)
            stages[name] = Stage(
                name,
                title,
                entry.take("parent", str, None),
                switch,
                self._delta(entry),
                expect,
            )
            entry.close()
        self._parents(table, stages)
        # Parents first, so that what is inherited is complete.
        for name in sorted(stages, key=lambda n: len(self._line(stages, n))):
            parent = stages[name].parent
            if parent is not None:
                inherited = {**stages[parent].expect, **stages[name].expect}
                stages[name] = dataclasses.replace(stages[name], expect=inherited)
        return stages

    def _parents(self, table: Table, items: Mapping[str, Stage | Variant]) -> None:
        """Refuse a parent that does not exist and a circle of parents."""
        for name, item in items.items():
            sub = Table(self.shown, table.path(name), {})
            if item.parent is not None and item.parent not in items:
                raise sub.refuse(
                    "parent",
                    f"there is no {item.parent!r} in [{table.name}]{closest(item.parent, items)}",
                )
            line = self._line(items, name)
            if line[-1] == name and len(line) > 1:
                raise sub.refuse("parent", f"goes in a circle: {' -> '.join(line)}")

    @staticmethod
    def _line(items: Mapping[str, Stage | Variant], name: str) -> list[str]:
        line = [name]
        while (parent := items[line[-1]].parent) in items:
            assert parent is not None
            line.append(parent)
            if parent in line[:-1]:
                break
        return line

    def _layer(
        self, entry: Table, build: str | None = None
    ) -> tuple[Delta, dict[str, Delta], dict[str, Delta]]:
        """The delta of a variant or an edition, and those for stages with a switch on, or off."""
        parts: list[dict[str, Delta]] = []
        for key in ("with", "without"):
            switches = entry.table(key)
            parts.append({})
            for switch, sub in switches.tables():
                self._switch(switches, switch, switch)
                parts[-1][switch] = self._delta(sub, build=build)
                sub.close()
        return self._delta(entry, build=build), *parts

    @staticmethod
    def _switch(table: Table, key: str, switch: str) -> None:
        if switch not in SWITCHES:
            raise table.refuse(
                key,
                f"no such switch (switches: {', '.join(SWITCHES)}){closest(switch, SWITCHES)}",
            )

    def _editions(self) -> dict[str, Edition]:
        editions: dict[str, Edition] = {}
        for name, entry in self.top.table("editions").tables():
            self._name(entry, name)
            build = entry.take("build", str, None)
            places = {key: entry.take(key, str) for key in ("requirements", "environment")}
            for key, place in places.items():
                if place.startswith(("/", "~")) or ".." in place.split("/"):
                    raise entry.refuse(key, f"{place!r} is not inside the repository")
            switches = entry.strings("switches")
            for switch in switches:
                self._switch(entry, "switches", switch)
            delta, with_, without = self._layer(entry, build)
            editions[name] = Edition(
                name=name,
                title=entry.take("title", str),
                switches=switches,
                build=build,
                delta=delta,
                with_=with_,
                without=without,
                **places,
            )
            entry.close()
        return editions or {STOCK: Edition()}

    def _variants(self, editions: Mapping[str, Edition]) -> dict[str, Variant]:
        table = self.top.table("variants")
        variants: dict[str, Variant] = {}
        for name, entry in table.tables():
            self._name(entry, name)
            edition = entry.take("edition", str, None)
            if edition is not None and edition not in editions:
                raise entry.refuse("edition", f"there is none called {edition!r} in [editions]")
            build = editions[edition].build if edition else None
            delta, with_, without = self._layer(entry, build)
            variants[name] = Variant(
                name=name,
                title=entry.take("title", str),
                why=entry.take("why", str),
                parent=entry.take("parent", str, None),
                regime=entry.take("regime", str, None),
                gpus=self._count(entry, "gpus", None),
                edition=edition,
                delta=delta,
                with_=with_,
                without=without,
            )
            entry.close()
        self._parents(table, variants)
        return variants

    # What only shows in the whole.

    def _check(self, recipe: Recipe) -> None:
        self._check_ladder(recipe)
        used: set[str] = set()
        for stage in recipe.stages.values():
            if recipe.available(stage.name):
                continue
            self._check_switch(recipe, stage)
            for edition in recipe.editions:
                for variant in (None, *recipe.variants):
                    if self._fits(recipe, stage.name, edition, variant):
                        settings = recipe.with_edition(edition).settings(stage.name, variant)
                        used.update(settings.flags, settings.env)
            missing = [name for name in SWITCHES if name not in stage.expect]
            if missing:
                raise self.top.table("stages").refuse(
                    f"{stage.name}.expect",
                    f"says nothing of {', '.join(missing)}, and every switch is proved on or off",
                )
        for key in ("why", "noop"):
            for name in getattr(recipe, key):
                if name not in used:
                    raise self.top.table(key).refuse(name, "no stage or variant uses it")

    def _fits(self, recipe: Recipe, stage: str, edition: str, variant: str | None) -> bool:
        """Whether an edition has the stage's switches and a variant is for it."""
        layer = recipe.variants[variant] if variant else None
        while layer is not None:
            if layer.edition not in (None, edition):
                return False
            layer = recipe.variants.get(layer.parent or "")
        has = recipe.editions[edition].switches
        on = recipe.settings(stage).switches()
        return all(switch in has for switch, state in on.items() if state)

    def _check_ladder(self, recipe: Recipe) -> None:
        if not recipe.ladder:
            raise self.top.refuse("ladder", "must name at least one stage")
        before: str | None = None
        for name in recipe.ladder:
            if name not in recipe.stages:
                raise self.top.refuse(
                    "ladder", f"there is no stage {name!r}{closest(name, recipe.stages)}"
                )
            reason = recipe.available(name)
            if reason:
                raise self.top.refuse("ladder", f"stage {name} is unavailable: {reason}")
            parent = recipe.stages[name].parent
            if parent != before:
                raise self.top.refuse(
                    "ladder",
                    f"stage {name} follows {before or 'nothing'}, but its parent is "
                    f"{parent or 'none'}; a rung is the one before it plus one switch",
                )
            before = name

    def _check_switch(self, recipe: Recipe, stage: Stage) -> None:
        """A stage turns on the one switch it declares and touches no other."""
        after = recipe.settings(stage.name).switches()
        before = (
            recipe.settings(stage.parent).switches()
            if stage.parent
            else dict.fromkeys(SWITCHES, False)
        )
        changed = {name for name in SWITCHES if before[name] != after[name]}
        declared = {stage.switch} if stage.switch else set()
        turned_off = sorted(name for name in changed if before[name])
        if changed != declared or turned_off:
            did = ", ".join(f"{n} {'off' if before[n] else 'on'}" for n in sorted(changed))
            raise Table(self.shown, f"stages.{stage.name}", {}).refuse(
                "switch",
                f"declares {stage.switch or 'none'}, but its flags turn {did or 'nothing on'}",
            )
