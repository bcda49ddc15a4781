"""The operator namespace and the torchvision schemas as SGLang meets them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import sgl_kernel  # noqa: F401
import sparkling_torchvision_ops as stand_in
import torch


def test_no_operator_claims_that_amx_kernels_exist():
    """SGLang takes this one's presence, on a CPU with AMX, as a sign that it has them all."""
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
    from sglang.srt.utils import cpu_has_amx_support

    assert not cpu_has_amx_support()


def test_the_two_calls_that_sglang_makes_on_arm():
    assert isinstance(torch.ops.sgl_kernel.init_cpu_threads_env("0,1"), str)
    torch.ops.sgl_kernel.initialize(1, 0)
    with pytest.raises(NotImplementedError, match="tensor parallelism 2"):
        torch.ops.sgl_kernel.initialize(2, 0)


@pytest.mark.parametrize(
    "name", ["fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"]
)
def test_operators_of_other_models_exist_and_say_what_they_are(name):
    with pytest.raises(NotImplementedError, match=name):
        getattr(torch.ops.sgl_kernel, name)(torch.zeros(1))


def test_a_python_start_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print(len(sys.modules), 'torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    count, torch_there = done.stdout.split()
    assert torch_there == "False" and int(count) < 120


def test_torchvision_can_be_imported():
    code = "import torchvision.transforms.v2.functional, torch; print(torch.ops.torchvision.nms)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def fresh():
    """The module anew, without its finder on sys.meta_path."""
    spec = importlib.util.spec_from_file_location("fresh_stand_in", stand_in.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.meta_path.remove(module._Finder)
    return module


def test_nothing_is_defined_where_torchvisions_operators_load(fresh, monkeypatch):
    extension = SimpleNamespace(_has_ops=lambda: True)
    monkeypatch.setitem(sys.modules, "torchvision.extension", extension)
    assert fresh.define_missing_operators() is False


def test_nothing_is_defined_without_torchvision(fresh, monkeypatch):
    monkeypatch.delitem(sys.modules, "torchvision.extension", raising=False)
    assert fresh.define_missing_operators() is False


def test_the_schemas_are_defined_once_where_they_are_missing(fresh, monkeypatch):
    defined = []

    class Library:
        def __init__(self, namespace, kind):
            assert (namespace, kind) == ("torchvision", "DEF")

        def define(self, schema):
            defined.append(schema.split("(")[0])

    monkeypatch.setattr(torch.library, "Library", Library)
    extension = SimpleNamespace(_has_ops=lambda: False)
    monkeypatch.setitem(sys.modules, "torchvision.extension", extension)
    assert fresh.define_missing_operators() is True
    assert fresh.define_missing_operators() is False
    assert defined == ["nms", "qnms"]


def test_the_finder_waits_for_one_module_and_leaves(fresh, monkeypatch):
    calls = []
    monkeypatch.setattr(fresh, "define_missing_operators", lambda: calls.append(1))
    sys.meta_path.insert(0, fresh._Finder)
    assert fresh._Finder.find_spec("torchvision") is None and not calls
    assert fresh._Finder.find_spec("torchvision._meta_registrations") is None
    assert calls == [1] and fresh._Finder not in sys.meta_path
