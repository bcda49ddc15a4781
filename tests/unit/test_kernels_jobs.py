"""Case 7: how many compilers may run, and the values of MAX_JOBS that do harm."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sparkling import kernels_jobs as kj
from sparkling.errors import SparklingError, UsageError

GIB = 2**30


@pytest.mark.parametrize(
    ("gib", "cores", "count"),
    [
        (8, 1, 1),
        (8, 20, 1),
        (23.9, 20, 1),
        (24, 20, 1),
        (32, 20, 2),
        (115, 20, 12),
        (200, 20, 20),
        (200, 1, 1),
    ],
)
def test_the_rule(gib: float, cores: int, count: int) -> None:
    assert kj.jobs(int(gib * GIB), cores, {}).count == count


@pytest.mark.parametrize("gib", [0, 3, 7.9])
def test_less_than_one_job_is_a_refusal_never_a_zero(gib: float) -> None:
    with pytest.raises(SparklingError, match=r"Nothing is compiled: .* one compiler may take 8\.0"):
        kj.jobs(int(gib * GIB), 20, {})


@pytest.mark.parametrize("bad", ["0", " 4", "4 ", "4.0", "auto", "-1", "٤", "00"])
@pytest.mark.parametrize("name", [kj.MAX_JOBS, kj.THREADS])
def test_values_that_do_harm_are_refused_aloud(bad: str, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        kj.jobs(200 * GIB, 20, {name: bad})
    with pytest.raises(UsageError, match=name):
        kj.beside(200 * GIB, 0, 20, {name: bad})


def test_a_lower_wish_wins_and_a_higher_one_is_capped_with_a_notice() -> None:
    lower = kj.jobs(115 * GIB, 20, {"MAX_JOBS": "4"})
    assert (lower.count, lower.notices) == (4, ())
    higher = kj.jobs(115 * GIB, 20, {"MAX_JOBS": "999"})
    assert higher.count == 12 and "MAX_JOBS=999 is more than fits: 12" in higher.notices[0]
    assert kj.jobs(115 * GIB, 20, {"MAX_JOBS": ""}).count == 12  # as FlashInfer takes it


@pytest.mark.parametrize("cores", [1, 2, 20])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("gib", [32, 64, 115, 200])
def test_threads_multiply_what_a_job_takes(cores: int, threads: int, gib: int) -> None:
    found = kj.jobs(gib * GIB, cores, {kj.THREADS: str(threads)})
    assert found.count >= 1
    if found.count > 1:
        assert found.count * threads * kj.PER_JOB <= gib * GIB - kj.KEEP
        assert found.count * threads <= cores


def test_a_server_gets_what_fits_beside_its_model_and_never_zero() -> None:
    assert kj.beside(115 * GIB, 85 * GIB, 20, {}) == "1"
    assert kj.beside(115 * GIB, 0, 20, {}) == "12"
    assert kj.beside(3 * GIB, 85 * GIB, 20, {}) == "1"
    assert kj.beside(115 * GIB, 0, 20, {"MAX_JOBS": "2"}) == "2"


def test_the_value_is_visible_in_the_childs_environment() -> None:
    env = kj.jobs(115 * GIB, 20, {}).environment()
    code = "import os; print(os.environ['MAX_JOBS'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "12"


def test_a_number_beyond_all_reason_is_capped_and_other_digits_are_refused() -> None:
    assert kj.jobs(200 << 30, 4, {"MAX_JOBS": "9" * 5000}).count == 4
    with pytest.raises(UsageError, match="FlashInfer would drop it silently"):
        kj.jobs(200 << 30, 4, {"MAX_JOBS": "\u0664"})
