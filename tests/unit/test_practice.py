"""The practice texts are in the practice model's own language."""

from __future__ import annotations

import pytest
from sparkling import recipe
from sparkling.errors import UsageError
from sparkling.workloads import TEXTS, workloads
from tokenizers import Tokenizer


def test_every_word_of_the_practice_texts_is_one_that_sparklet_knows(root):
    tokenizer = Tokenizer.from_file(str(root / "models" / "sparklet" / "tokenizer.json"))

    def tokens_a_word(kind):
        texts = [
            p.render()
            for w in workloads({"prompts": 12}, ["short-turn", "long-answer", "repeated-text"],
                               texts=kind)
            for p in w.prompts
        ]  # fmt: skip
        count = sum(len(tokenizer.encode(t, add_special_tokens=False).ids) for t in texts)
        return count / sum(len(t.split()) for t in texts)

    # Digits and full stops are tokens of their own; a word spelt out in bytes costs several.
    assert tokens_a_word("practice") < 1.6 < 3 < tokens_a_word("general")


def test_the_recipes_choose_their_texts(root):
    assert recipe.load("sparklet", root=root).texts == "practice"
    assert recipe.load("ling-3.0-flash", root=root).texts == "general"
    names = ["short-turn", "long-answer", "repeated-text"]
    prompts = {kind: workloads({"prompts": 12}, names, texts=kind) for kind in TEXTS}
    for a, b in zip(*prompts.values(), strict=True):
        assert a.settings() == b.settings()
        assert not {p.text for p in a.prompts} & {p.text for p in b.prompts}
        assert len({p.text for p in b.prompts}) == 12


def test_unknown_texts_are_refused(root, tmp_path):
    with pytest.raises(UsageError, match="There are no texts 'practise'; did you mean practice"):
        workloads({}, texts="practise")
    text = (root / "env" / "recipes" / "sparklet.toml").read_text()
    (tmp_path / "r.toml").write_text(text.replace('"practice"', '"practise"'))
    with pytest.raises(UsageError, match="key texts: there are none called 'practise'"):
        recipe.load(tmp_path / "r.toml", root=root)
