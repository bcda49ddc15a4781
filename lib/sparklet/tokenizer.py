"""A tokenizer of whole words, single digits (with or without a blank), a few signs and, for anything else, bytes.

The vocabulary is the 256 bytes, Ling's special tokens and the most frequent words of the training
texts (with their leading blank); a word outside it becomes its bytes. It is computed from a fixed
seed, so the same code gives the same ids.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from . import tasks
from . import words as w
from .chat import HIDDEN, SHOWN

SIZE = 1280
PATTERN = r" ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]+|\s"
ALWAYS = [
    "the",
    "a",
    "an",
    "of",
    "in",
    "on",
    "at",
    "to",
    "for",
    "and",
    "or",
    "is",
    "are",
    "was",
    "were",
    "be",
    "it",
    "this",
    "that",
    "you",
    "I",
    "we",
    "he",
    "she",
    "they",
    "not",
    "with",
    "as",
    "by",
    "from",
    "what",
    "how",
    "why",
    "when",
    "where",
    "who",
    "can",
    "do",
    "does",
    "will",
    "would",
    "have",
    "has",
    "had",
    "my",
    "your",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "yes",
    "no",
    "please",
]


def _pretokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def build(size: int = SIZE, samples: int = 12_000, seed: int = 20_26) -> Tokenizer:
    """The tokenizer of at most `size` ids. Raises ValueError when a word of the world is left out."""
    rng, split = random.Random(seed), _pretokenizer()
    special = [*HIDDEN, *SHOWN]
    count: Counter[str] = Counter()
    for _ in range(samples):
        text = tasks.sample(rng).text
        if len(text) > 2000:  # endless repetition
            text = text[:2000].rpartition(" ")[0]
        for token in special:
            text = text.replace(token, "\n")
        count.update(piece for piece, _ in split.pre_tokenize_str(text))
    world = (w.HE, w.SHE, w.THINGS, w.HOLDERS, w.HOLDER_ONE, w.PLACES, w.PETS, w.COLORS, w.ANIMALS)
    world += (w.CITIES, w.MONEY, w.SKIES, w.DAYS, w.MONTHS)
    for word in ALWAYS:
        count["\u0120" + word] += 1
    for word in (x for some in world for x in some):
        count["\u0120" + word] += 1
        count[word] += 1
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = size - len(alphabet) - len(special)
    words = [x for x, _ in sorted(count.items(), key=lambda kv: (-kv[1], kv[0])) if len(x) > 1]
    if len(words) > room:
        raise ValueError(f"{len(words)} words for {room} places")
    vocab = {x: i for i, x in enumerate([*alphabet, *words[:room]])}
    # ignore_merges: a piece that is in the vocabulary is one token, anything else its bytes
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in HIDDEN])
    tokenizer.add_tokens([AddedToken(x, special=False, normalized=False) for x in SHOWN])
    return tokenizer


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"the tokenizer has no token {token!r}")
    return found
