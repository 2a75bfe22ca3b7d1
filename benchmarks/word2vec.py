"""word2vec beside gensim: words per second by the same threads, dimension and noise, and how well both know the same things.

python benchmarks/word2vec.py [--words 1500000] [--rounds 3] [--threads 2] [--dim 100] [--text FILE]

Both train on the same sentences, by turns; gensim both from its own file reader and from an iterable, and the better one counts. Words
are those of the text times epochs; neither time holds the counting of words. Seconds of CPU stand beside the clock's, as neighbours
disturb them less. Quality: planted analogies found, neighbours of one topic, and whether the two order words alike (Spearman's rank
correlation of similarities, beside that of gensim with another seed).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gensim.models import Word2Vec
from gensim.models.word2vec import LineSentence
from scipy.stats import spearmanr

import clickfleet
from clickfleet.words import vectors
from clickfleet.words.prepare import Options as Prepare
from clickfleet.words.prepare import prepare
from clickfleet.words.synth import Corpus, Options
from clickfleet.words.vectors import Vectors

Measured = tuple[float, float, Vectors]  # seconds, seconds of CPU, what was learned


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--words", type=int, default=1_500_000)
    parser.add_argument("--vocabulary", type=int, default=20_000)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--negatives", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--text", type=Path, help="plain text instead of the planted one: speed and agreement only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))


def run(args: argparse.Namespace, folder: Path) -> None:
    text, corpus = args.text, None
    if text is None:
        corpus, text = Corpus(Options(args.words, args.vocabulary, args.topics, entities=60)), folder / "text.txt"
        text.write_text(corpus.text())
    made = prepare(text, folder / "p", Prepare())
    joined = folder / "joined.txt"
    joined.write_bytes(b"".join(path.read_bytes() for path in sorted((folder / "p/train").iterdir())))
    total = made["words"] * args.epochs
    print(f"{made['words']:,} words, {made['vocabulary']:,} different, {args.epochs} epochs, {args.threads} threads, "
          f"dim {args.dim}, {args.negatives} negatives")  # fmt: skip
    cases: dict[str, Callable[[int], Measured]] = {
        "clickfleet": lambda n: ours(args, folder, n),
        "gensim, file": lambda n: theirs(args, joined, n, True),
        "gensim, iterable": lambda n: theirs(args, joined, n, False),
    }
    found: dict[str, list[Measured]] = {name: [] for name in cases}
    for number in range(args.rounds):
        for name, train in cases.items():
            found[name].append(train(number))
            seconds, cpu, _ = found[name][-1]
            print(f"  {name:17} {total / seconds:10,.0f} words/s, {total / cpu:10,.0f} per second of CPU", flush=True)
    rates = {
        name: [statistics.median(total / each[i] for each in runs) for i in (0, 1)] for name, runs in found.items()
    }
    for name, (speed, cpu) in rates.items():
        print(f"{name:17} {speed:10,.0f} words/s, {cpu:10,.0f} per second of CPU (medians)")
    best = [max(rates[name][i] for name in rates if name != "clickfleet") for i in (0, 1)]
    print(f"clickfleet / the better gensim: {rates['clickfleet'][0] / best[0]:.2f} by the clock, "
          f"{rates['clickfleet'][1] / best[1]:.2f} by CPU")  # fmt: skip
    quality(found, corpus, folder)


def ours(args: argparse.Namespace, folder: Path, seed: int) -> Measured:
    config: dict[str, Any] = {
        "data": {
            "format": "sentences",
            "train": str(folder / "p/train"),
            "vocabulary": str(folder / "p/vocabulary.txt"),
            "batch_size": 500 if args.text is None else 10,
        },
        "model": {"name": "word2vec", "negatives": args.negatives, "bias": False},  # as gensim has none
        "table": {"dim": args.dim},
        "train": {"epochs": args.epochs, "threads": args.threads, "seed": seed},
        "run": {"dir": str(folder / f"run-{seed}"), "report": False, "keep_epochs": False},
    }
    begin = time.process_time()
    done = clickfleet.train(config, quiet=True)
    cpu = time.process_time() - begin
    return done.rows / done.rows_per_s, cpu, vectors.load(folder / f"run-{seed}")


def theirs(args: argparse.Namespace, text: Path, seed: int, file: bool) -> Measured:
    model = Word2Vec(
        vector_size=args.dim, window=5, min_count=1, sg=1, negative=args.negatives, sample=1e-3, alpha=0.025,
        min_alpha=1e-4, workers=args.threads, epochs=args.epochs, seed=seed + 1,
    )  # fmt: skip
    given: dict[str, Any] = {"corpus_file": str(text)} if file else {"corpus_iterable": LineSentence(str(text))}
    model.build_vocab(**given)
    begin, cpu = time.perf_counter(), time.process_time()
    model.train(**given, total_examples=model.corpus_count, total_words=model.corpus_total_words, epochs=args.epochs)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return seconds, cpu, Vectors(model.wv.index_to_key, np.array(model.wv.vectors))


def quality(found: dict[str, list[Measured]], corpus: Corpus | None, folder: Path) -> None:
    models = {name: [of for _, _, of in runs] for name, runs in found.items()}
    if corpus is not None:
        questions = folder / "questions.txt"
        questions.write_text("".join(" ".join(each) + "\n" for each in corpus.questions()))
        for name, runs in models.items():
            right = [of.evaluate(questions)["accuracy"] for of in runs]
            same = [topical(of, corpus) for of in runs]
            print(
                f"{name:17} analogies {statistics.median(right):.3f}, neighbours of one topic {statistics.median(same):.3f}"
            )
    gensim = models["gensim, file"]
    print(f"order of similarities: clickfleet and gensim {agreement(models['clickfleet'][0], gensim[0]):.3f}", end="")
    print(f", gensim and gensim {agreement(gensim[0], gensim[1]):.3f}" if len(gensim) > 1 else "")


def topical(of: Vectors, corpus: Corpus) -> float:
    """The share of the ten nearest words of topics that are of the same topic."""
    topic = dict(zip(corpus.names.tolist(), corpus.topic.tolist(), strict=False))
    words = [word for word in of.words if word in topic][:2000]
    rows = of.unit[[of.place[word] for word in words]]
    order = np.argsort(-(rows @ rows.T), axis=1)[:, 1:11]
    own = np.array([topic[word] for word in words])
    return float((own[order] == own[:, None]).mean())


def agreement(a: Vectors, b: Vectors, words: int = 500) -> float:
    """Over frequent words: how alike both order all the others by similarity."""
    common = [word for word in a.words if word in b.place][:words]
    first, second = (of.unit[[of.place[word] for word in common]] for of in (a, b))
    x, y = first @ first.T, second @ second.T
    others = ~np.eye(len(common), dtype=bool)
    ranks = [spearmanr(x[i][others[i]], y[i][others[i]]).statistic for i in range(len(common))]
    return float(np.mean(ranks))


if __name__ == "__main__":
    main()
