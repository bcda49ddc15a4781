"""Does SGLang still have the shape that the plugin's hooks expect? A new one fails here, by name."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import sglang
from sparkling_sglang import drift, needs, plugin, switches
from sparkling_sglang.needs import Need
from sparkling_sglang.patches import Patches

INSTALLED = Path(sglang.__path__[0])
ROOT = Path(__file__).resolve().parents[2]
BASE = {"SPARKLING_STATUS_FILE": "status.json", "SPARKLING_KEEP_ALIVE_S": "15"}
CPU = {"SGLANG_USE_CPU_ENGINE": "1", "SPARKLING_FP8_LM_HEAD": "1", "SPARKLING_SWIGLU_CLAMP": "1"}
GPU = {
    "SPARKLING_FP8_LM_HEAD": "1",
    "SPARKLING_TRAP": "tensor-only",
    "SPARKLING_SHARE_HEAD": "1",
    "SPARKLING_SWIGLU_CLAMP": "1",
}


class Recorded(Patches):
    """Keeps what would be hooked: (name, target, hook, kind)."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[tuple[str, str, object, str]] = []

    def hook(self, name, target, fn, kind="replace") -> None:
        self.hooks.append((name, target, fn, kind))

    def assign(self, name, target, value) -> None:
        self.hooks.append((name, target, value, "assign"))


@pytest.fixture(scope="module")
def hooks(engine_context):
    """Every hook of every part, in both of SGLang's processes that have any, on both engines."""
    from sparkling_sglang import status

    found = Recorded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(status, "current", None)
        patch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "x")  # set by the part that is registered
        for env in (BASE | CPU, BASE | GPU):
            wanted = switches.read(env)
            plugin._register_main(found, wanted)
            plugin._register_scheduler(found, wanted)
    return found.hooks


def part_of(name: str) -> tuple[str, ...]:
    """The parts that a hook of this name belongs to; what has no part of its own is the CPU's."""
    return {"limits": ("status", "clamp"), "humming-kernels": ("status",)}.get(
        name, (name,) if name in needs.NEEDS else ("cpu-engine",)
    )


def test_every_hook_of_the_plugin_has_its_needs_written_down(hooks):
    assert {part for name, *_ in hooks for part in part_of(name)} == set(needs.NEEDS)
    assert set(needs.NEEDS) == set(plugin.KNOWN_SGLANG)
    for name, target, fn, kind in hooks:
        for part in part_of(name):
            written = [need for need in needs.NEEDS[part] if need.target == target]
            assert written, f"{target} is hooked by {name} and missing from needs.NEEDS[{part!r}]"
            if kind != "assign" and not isinstance(fn, type) and "causal_conv1d" not in target:
                assert any(need.parameters is not None for need in written), target


@pytest.fixture(scope="module")
def problems():
    return drift.check(INSTALLED)


@pytest.mark.parametrize("part", needs.NEEDS)
def test_the_installed_sglang_has_the_shape_that_the_plugin_expects(part, problems):
    assert not problems[part], "\n".join(map(str, problems[part]))


def test_every_hook_takes_what_sglang_will_pass_it(hooks):
    """The live signatures, names bound elsewhere and decorators included."""
    for name, target, fn, kind in hooks:
        if kind == "assign":
            pkgutil.resolve_name(target.rpartition(".")[0])
            continue
        theirs = inspect.unwrap(pkgutil.resolve_name(target))
        if isinstance(fn, type):
            assert inspect.isclass(theirs), target
            continue
        # What must be passed goes by position, the rest by name: as SGLang's own calls do.
        values = inspect.signature(theirs).parameters.values()
        named = [p for p in values if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        must = [p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD for p in named]
        args = [p.name for p, first in zip(named, must, strict=True) if first]
        only = {p.name: p.name for p, first in zip(named, must, strict=True) if not first}
        first = {"after": ["result"], "around": ["original"]}.get(kind, [])
        ours = inspect.signature(fn)
        try:
            ours.bind(*first, *args, **only)
        except TypeError as error:
            pytest.fail(f"{name}: {fn} cannot take what {target} takes: {error}")


def test_fields_that_are_read_are_those_that_are_asserted(engine_context):
    """The arguments that forbid the FP8 head are fields of the installed ServerArgs."""
    from sparkling_sglang import head_refusals

    (fields,) = (
        need.mentions
        for need in needs.NEEDS["fp8-head"]
        if need.target.endswith("arg_groups.field_order")
    )
    assert set(fields) == {name for name, *_ in head_refusals.ARGUMENTS}
    assert all(hasattr(engine_context, name) for name in fields)
    assert head_refusals.refusal(engine_context) is None


# --------------------------------------------------------------------- does the reader see a drift?

SOURCE = '''
import os
try:
    from fast import product
except ImportError:
    product = None

class Base:
    shared: int = 0
    def inherited(self, x): return x

class Worker(Base):
    """docstring with name_in_text"""
    field: int = 1
    if os.name == "posix":
        def run(self, batch, *, flag=False): return helper(batch.size)
    def __init__(self): self.made = self.read_only.x

async def handle(request, *rest, **more): ...
'''


@pytest.fixture
def sources(tmp_path):
    package = tmp_path / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "srt" / "__init__.py").write_text("")
    (package / "srt" / "work.py").write_text(SOURCE)
    (package / "_version.py").write_text("__version__ = version = '9.9'\n")
    return drift.Sources(tmp_path)


W = "sglang.srt.work"


@pytest.mark.parametrize(
    "need",
    [
        Need(f"{W}.Worker.run", ("self", "batch", "*", "flag"), ("helper", "size")),
        Need(f"{W}.Worker.inherited", ("self", "x")),
        Need(f"{W}.Worker", binds=("field", "shared", "made", "run"), lacks=("read_only", "x")),
        Need(f"{W}.handle", ("request", "*rest", "**more")),
        Need(f"{W}.product"),
        Need(W, mentions=("product", "posix")),
    ],
)
def test_what_is_there_is_found(sources, need):
    assert drift.problem(sources, need) is None


@pytest.mark.parametrize(
    ("need", "said"),
    [
        (Need(f"{W}.Worker.gone"), "is not there"),
        (Need("sglang.srt.gone.Worker"), "is not there"),
        (Need(f"{W}.helper"), "is not there"),  # called, never defined
        (Need(f"{W}.Worker.run", ("self", "batch")), "takes (self, batch, *, flag), not (self, ba"),
        (Need(f"{W}.Worker.run", ("self", "batch", "flag")), "takes (self, batch, *, flag), not"),
        (Need(f"{W}.Worker", ("self",)), "is no function but ClassDef"),
        (Need(f"{W}.Worker.run", mentions=("helper", "other")), "does not mention other"),
        (Need(f"{W}.Worker", binds=("made", "read_only")), "has no read_only"),
        (Need(f"{W}.Worker", lacks=("inherited",)), "has inherited by now"),
    ],
)
def test_what_has_changed_is_named(sources, need, said):
    found = drift.problem(sources, need)
    assert found.target == need.target and found.wrong.startswith(said)


def test_the_version_is_read_without_importing(sources, tmp_path):
    assert sources.version() == "9.9"
    assert drift.Sources(tmp_path / "sglang").version() == "9.9"
    (tmp_path / "sglang" / "_version.py").unlink()
    assert sources.version() is None
    (tmp_path / "sglang-9.8.dist-info").mkdir()
    assert sources.version() == "9.8"
    with pytest.raises(FileNotFoundError, match="holds no SGLang"):
        drift.Sources(tmp_path / "nowhere")


def test_the_script_says_part_by_part_what_fits(sources, tmp_path):
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        script = ROOT / "scripts" / "check_sglang.py"
        return subprocess.run(
            [sys.executable, str(script), *words], capture_output=True, text=True, timeout=240
        )

    good = run(str(INSTALLED))
    assert good.returncode == 0, good.stderr
    assert good.stdout.splitlines()[0] == "SGLang 0.5.23, known for every part of the plugin"
    assert len([line for line in good.stdout.splitlines() if line.endswith(": fits")]) == len(
        needs.NEEDS
    )
    bad = run(str(tmp_path))
    assert bad.returncode == 1 and bad.stdout.startswith("SGLang 9.9, known for no part")
    assert f"fp8-head: {needs.RUNNER}.load_model: is not there" in bad.stdout
    lost = run(str(tmp_path / "nowhere"))
    assert lost.returncode == 2 and "holds no SGLang" in lost.stderr and not lost.stdout
    assert "Traceback" not in lost.stderr
