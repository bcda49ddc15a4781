"""BF16 against FP8 head on real servers: the same tokens read by a baseline and by an FP8 head."""

from __future__ import annotations

import pytest
from sparkling import head_live, recipe, server, tiny
from sparkling.client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def judged(root, server_python, tmp_path_factory):
    """stage -> (judged twice, greedy answers), one server after the other on the same tokens."""
    folder = tmp_path_factory.mktemp("head")
    model = tiny.build(folder / "tiny-ling")
    book = recipe.load("tiny-ling", root=root)
    prompts, ids, out = head_live.PROMPTS[:3], None, {}
    for stage in ("baseline", "fp8-head"):
        launch = book.render(stage, model=model, port=0)
        with (
            server.start(
                launch,
                python=server_python,
                log=folder / f"{stage}.log",
                deadline_s=600,
                runs=folder,
            ) as running,
            Client(running.url, running.api_key, timeout_s=300) as client,
        ):
            ids = ids or head_live.texts(client, prompts, max_tokens=32)
            twice = head_live.force(client, ids), head_live.force(client, ids)
            answers = [
                client.generate(p, max_tokens=32, stream=False).require().output_ids
                for p in prompts
            ]
            out[stage] = (*twice, answers)
    return out


def test_a_server_judges_the_same_tokens_alike_twice(judged):
    for first, again, _ in judged.values():
        noise = head_live.compare_forced(first, again)[0]
        assert noise.first.value == 1.0 and noise.shift_max < 1e-3


def test_the_fp8_head_moves_log_probabilities_a_little(judged):
    found = head_live.compare_forced(judged["baseline"][0], judged["fp8-head"][0])[0]
    assert found.n > 60
    assert 0 < found.shift_size < 0.2  # it does something, and not much
    assert found.first.value > 0.9 and found.overlap > 0.6
    assert found.kl < 0.05


def test_free_running_answers_are_paired(judged):
    found = head_live.compare_answers(judged["baseline"][2], judged["fp8-head"][2], max_tokens=32)
    assert found.n == 3 and 0 <= found.identical.value <= 1
