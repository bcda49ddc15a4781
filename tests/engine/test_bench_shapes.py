"""The kernels' benchmark where no GPU is: routes, weights, records, refusals, and the way to the timer."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from sparkling_sglang import bench_shapes, shapes_backends, shapes_experts, shapes_head, shapes_read
from sparkling_sglang.shapes_timing import HostTimer

CPU = torch.device("cpu")
SMALL = shapes_backends.ExpertShape(experts=16, top_k=4, hidden=64, intermediate=32)


def noise(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Plain:
    """A backend that computes each token from its experts, in float32."""

    name = "plain"

    def __init__(self, *, wrong: bool = False, scaled_weights: bool = False) -> None:
        self.wrong, self.scaled_weights = wrong, scaled_weights

    def prepare(self, layer):
        layer.dense = {
            name: shapes_backends.dequantize(
                getattr(layer, f"{name}_weight"),
                getattr(layer, f"{name}_weight_scale").view(torch.uint8),
            )
            for name in ("w13", "w2")
        }

    def run(self, layer, x, ids, weights):
        out = torch.zeros_like(x, dtype=torch.float32)
        for token, chosen in enumerate(ids.tolist()):
            for slot, expert in enumerate(chosen):
                gate, up = (layer.dense["w13"][expert] @ x[token].float()).chunk(2)
                if self.wrong:
                    gate, up = up, gate
                one = layer.dense["w2"][expert] @ (torch.nn.functional.silu(gate) * up)
                out[token] += weights[token, slot] * one
        return out if self.scaled_weights else SMALL.scaling * out


def test_independent_routes_have_the_expected_union():
    shape = shapes_backends.ExpertShape()
    routes = shapes_experts.draw(shape, 200, 4, "random", noise())
    assert routes.shape == (200, 4, 8) and routes.dtype == torch.int32
    # A token never chooses an expert twice, and the union of one token is the top k.
    assert shapes_experts.unions(routes[:, :1]) == [8] * 200
    counted = shapes_experts.unions(routes)
    # The spread of one call's union is about 1, so 200 of them are known to 0.1.
    assert sum(counted) / 200 == pytest.approx(shape.expected_union(4), abs=0.4)
    assert shape.expected_union(4) == pytest.approx(31.26, abs=0.01)
    assert len({tuple(call.flatten().tolist()) for call in routes}) == 200


def test_repeated_routes_are_the_same_within_a_call_and_differ_between_calls():
    routes = shapes_experts.draw(SMALL, 20, 3, "repeated", noise())
    assert shapes_experts.unions(routes) == [SMALL.top_k] * 20
    assert bool((routes == routes[:, :1]).all())
    assert len({tuple(call[0].tolist()) for call in routes}) > 10


def test_codes_mean_what_the_format_says():
    # Codes 1 (0.5) and 15 (-6) in one byte, the lower half first; scale exponents 127 and 128.
    codes = torch.full((1, 32), 0xF1, dtype=torch.uint8)
    values = shapes_backends.dequantize(codes, torch.tensor([[127, 128]], dtype=torch.uint8))
    assert values.shape == (1, 64)
    assert values[0, :4].tolist() == [0.5, -6.0, 0.5, -6.0]
    assert values[0, 32:34].tolist() == [1.0, -12.0]


def test_a_case_counts_the_experts_of_the_calls_that_were_timed():
    bench = shapes_experts.Bench(Plain(), SMALL, CPU, layers=2, calls=5)
    assert bench.right and bench.relative_error < 1e-5
    facts = bench.facts()
    assert facts["expert_bytes"] == facts["expert_bytes_stored"] == 3 * 64 * 32 * (0.5 + 1 / 32)
    found = list(shapes_experts.measure(HostTimer(4), bench, (1, 3)))
    assert [(c["tokens"], c["routing"]) for c in found] == [
        (1, "random"),
        (3, "random"),
        (3, "repeated"),
    ]
    assert all(len(c["us"]) == len(c["union"]) == 4 and min(c["us"]) > 0 for c in found)
    assert found[0]["union"] == found[2]["union"] == [4.0] * 4
    assert found[1]["union_expected"] == pytest.approx(16 * (1 - 0.75**3))
    assert min(found[1]["union"]) > 4 and found[1]["union_most"] <= 12


def test_where_the_backend_leaves_the_scaling_to_the_router_its_weights_carry_it():
    # As Marlin does for MXFP4; without that its output is 1 - 1 / 2.5 away, and looked wrong.
    bench = shapes_experts.Bench(Plain(scaled_weights=True), SMALL, CPU, layers=1, calls=1)
    assert bench.relative_error < 1e-5
    assert shapes_backends.Marlin.scaled_weights and not shapes_backends.Humming.scaled_weights


def test_a_backend_that_computes_something_else_is_not_right():
    assert not shapes_experts.Bench(Plain(wrong=True), SMALL, CPU, layers=1, calls=1).right


def test_what_is_no_number_is_a_failure_and_never_in_the_record(tmp_path, monkeypatch):
    class Nothing(Plain):
        def run(self, layer, x, ids, weights):
            return torch.full_like(x, math.nan, dtype=torch.float32)

    monkeypatch.setattr(shapes_backends, "ExpertShape", lambda: SMALL)
    monkeypatch.setattr(shapes_backends, "BACKENDS", {"humming": lambda _: Nothing()})
    monkeypatch.setattr(shapes_experts, "layers_that_fit", lambda *_: 1)
    kept = record(tmp_path)
    bench_shapes.measure_all(kept, ("experts",), HostTimer(), CPU)
    assert "values that are no numbers" in kept.fields["failed"][0]["reason"]
    assert "experts" not in kept.fields and "NaN" not in kept.path.read_text()

    monkeypatch.setattr(shapes_head, "_error", lambda *_: math.nan)
    shape = shapes_head.HeadShape(vocab=320, hidden=64)
    (case, *_) = shapes_head.measure(HostTimer(), CPU, shape, rows=(1,), calls=3)
    assert "values that are no numbers" in case["error"] and "relative_error" not in case


def test_a_case_that_fails_says_so_and_the_next_follows():
    class Broken(Plain):
        def run(self, layer, x, ids, weights):
            if x.shape[0] > 1:
                raise RuntimeError("no kernel for this")
            return super().run(layer, x, ids, weights)

    bench = shapes_experts.Bench(Broken(), SMALL, CPU, layers=1, calls=2)
    found = list(shapes_experts.measure(HostTimer(), bench, (1, 2)))
    assert (
        "us" in found[0]
        and [c.get("error") for c in found[1:]] == ["RuntimeError: no kernel for this"] * 2
    )


def test_the_head_is_measured_as_served_and_its_error_is_the_formats():
    shape = shapes_head.HeadShape(vocab=320, hidden=64)
    found = list(shapes_head.measure(HostTimer(), CPU, shape, rows=(1, 4), calls=3))
    assert [(c["format"], c["rows"]) for c in found] == [
        (name, m) for name in ("BF16", "FP32-out", "FP8") for m in (1, 4)
    ]
    bf16, fp8 = found[0], found[-1]
    assert bf16["bytes"] == shape.bf16_bytes and fp8["bytes"] == 320 * 64 + 4 * 320
    assert bf16["relative_error"] < 0.005 < fp8["relative_error"] < 0.05
    # PyTorch has no BF16 product with float32 output on a CPU: noted, and FP8 follows all the same.
    assert all("error" in c for c in found[2:4])


def test_the_limit_is_the_fastest_reader_that_reads_everything(monkeypatch):
    def readers(values):
        return {
            "half": lambda: values[: len(values) // 2].sum(),
            "all": lambda: values.sum(),
        }

    monkeypatch.setattr(shapes_read, "readers", readers)
    found = shapes_read.measure(HostTimer(), CPU, 4 * 32768)
    assert found["best"] == "all" and found["bytes"] == 4 * 32768
    assert "did not read every element" in found["ways"]["half"]["error"]
    middle = sorted(found["ways"]["all"]["us"])[1]
    assert found["bytes_s"] == pytest.approx(4 * 32768 / (middle * 1e-6), rel=1e-3)


def record(tmp_path) -> bench_shapes.Record:
    return bench_shapes.Record(tmp_path / "r.json", {"failed": []})


def test_the_record_is_on_disk_after_every_case(tmp_path, monkeypatch):
    seen = []

    def broken(*_):
        raise RuntimeError("no Humming here")

    def one_head(kept, *_):
        kept.add("head", {"format": "BF16"})
        seen.append(json.loads((tmp_path / "r.json").read_text()))

    monkeypatch.setattr(bench_shapes, "measure_experts", broken)
    monkeypatch.setattr(bench_shapes, "measure_head", one_head)
    bench_shapes.measure_all(record(tmp_path), ("head", "experts"), HostTimer(), CPU)
    assert seen[0]["head"] == [{"format": "BF16"}]
    last = json.loads((tmp_path / "r.json").read_text())
    assert last["failed"] == [{"part": "experts", "reason": "RuntimeError: no Humming here"}]


def test_the_limit_ends_the_process_and_the_record_says_so(tmp_path, capsys):
    left = []
    watch = bench_shapes.stop_at(0.01, record(tmp_path), left.append)
    watch.join(60)
    assert left == [1]
    assert "limit" in json.loads((tmp_path / "r.json").read_text())["stopped"]
    assert "holds what was measured" in capsys.readouterr().out


def test_the_command_in_the_record_has_no_paths():
    args = bench_shapes.parser().parse_args(["--out", "/home/me/x.json", "--only", "experts,head"])
    said = bench_shapes.command_of(args)
    assert "/home" not in said and "--out x.json --only head,experts" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys):
    assert bench_shapes.main(["--out", str(tmp_path / "x.json")]) == 1
    assert "sees no CUDA device" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "heads"],
        ["--only", ","],
        ["--limit-s", "0"],
        ["--limit-s", "inf"],
        ["--repeats", "1"],
    ],
)
def test_wrong_arguments_exit_2(tmp_path, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_shapes.main(["--out", str(tmp_path / "x.json"), *arguments])
    assert ended.value.code == 2 and capsys.readouterr().err


def test_a_folder_that_is_not_there_exits_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_shapes.main(["--out", str(tmp_path / "no" / "x.json")])
    assert ended.value.code == 2 and "does not exist" in capsys.readouterr().err


# -- what it calls in SGLang -----------------------------------------------------------------------

# Humming is not installed beside a CPU build of SGLang, so the sources are read, not imported.
CALLED = {
    "layers/moe/moe_runner/humming.py": {
        "HummingRunnerInput": ("hidden_states", "topk_weights", "topk_ids", "gemm_type"),
        "HummingMoeQuantInfo": ("layer",),
        "HummingRunnerCore.run": ("runner_input", "quant_info", "running_state"),
        "HummingRunnerCore._prepare_indexed_gemm_kwargs": ("topk_ids",),
        "get_standard_humming_moe_gemm_type": (),
    },
    "layers/quantization/humming_utils.py": {
        "prepare_humming_moe_layer": ("layer", "quant_config"),
    },
    "layers/moe/moe_runner/base.py": {
        "MoeRunnerConfig": (
            "num_experts",
            "num_local_experts",
            "hidden_size",
            "intermediate_size_per_partition",
            "top_k",
            "params_dtype",
            "activation",
            "routed_scaling_factor",
        ),
    },
    "layers/moe/fused_moe_triton/fused_marlin_moe.py": {
        "fused_marlin_moe": (
            *("hidden_states", "w1", "w2", "w1_scale", "w2_scale", "gating_output"),
            *("topk_weights", "topk_ids", "workspace", "num_bits", "is_k_full", "inplace"),
            "routed_scaling_factor",
        ),
    },
    "layers/quantization/marlin_utils.py": {
        "marlin_make_workspace": ("device", "max_blocks_per_sm"),
    },
    "layers/quantization/marlin_utils_fp4.py": {
        "prepare_moe_mxfp4_layer_for_marlin": ("layer",),
    },
}


def names_of(tree: ast.Module) -> dict[str, set[str]]:
    """Function or class (`Class.method` too) -> its parameters or annotated fields."""
    found: dict[str, set[str]] = {}

    def visit(body: list[ast.stmt], prefix: str = "") -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                found[prefix + node.name] = {one.arg for one in given}
            elif isinstance(node, ast.ClassDef):
                fields = [f.target for f in node.body if isinstance(f, ast.AnnAssign)]
                found[node.name] = {f.id for f in fields if isinstance(f, ast.Name)}
                visit(node.body, f"{node.name}.")

    visit(tree.body)
    return found


@pytest.mark.parametrize("file", CALLED)
def test_the_installed_sglang_has_what_the_benchmark_calls(file):
    spec = importlib.util.find_spec("sglang")
    source = Path(next(iter(spec.submodule_search_locations))) / "srt" / file
    found = names_of(ast.parse(source.read_text("utf-8")))
    for name, needed in CALLED[file].items():
        assert name in found, f"{file} has no {name}"
        assert set(needed) <= found[name], f"{name} lacks {set(needed) - found[name]}"


def test_the_marlin_method_still_leaves_the_scaling_to_the_router():
    spec = importlib.util.find_spec("sglang")
    folder = Path(next(iter(spec.submodule_search_locations))) / "srt/layers/quantization"
    tree = ast.parse((folder / "mxfp4_marlin_moe.py").read_text("utf-8"))
    method = next(n for n in tree.body if getattr(n, "name", "") == "Mxfp4MarlinMoEMethod")
    values = {
        target.id: node.value.value
        for node in method.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert values["fuse_routed_scaling_factor_in_topk"] is shapes_backends.Marlin.scaled_weights


def test_what_is_called_is_what_is_listed():
    """The list above names every parameter that the backends pass by name."""
    passed = {
        word.arg
        for node in ast.walk(ast.parse(inspect.getsource(shapes_backends)))
        if isinstance(node, ast.Call) and "self._" in ast.unparse(node.func)
        for word in node.keywords
    }
    listed = {name for file in CALLED.values() for names in file.values() for name in names}
    assert {"routed_scaling_factor", "topk_ids", "max_blocks_per_sm"} <= passed <= listed
