"""Compare word2vec with gensim: words per second with the same threads, dimension and noise, and the quality of both.

python benchmarks/word2vec.py [--words 1000000] [--rounds 3] [--threads 2] [--dim 100] [--text FILE] [--batches]

--batches only compares the default batch (about 10,000 words) with 1000 sentences, in alternation, on planted text in sentences of
1000 words.

Two texts: one with planted analogies, and English (the documentation in installed Python packages, or a file). Both tools train on the
same sentences, in alternation; gensim from its file reader and from an iterable, and the faster one counts. The number of words is that
of the text times epochs. Neither time includes counting the words. CPU seconds are printed too, because other load affects them less.

Quality: planted analogies found, neighbours of the same topic, and whether two models rank words alike (Spearman's rank correlation of
similarities), beside the agreement of two seeds of one tool. The reference for gensim is its iterable. Its file reader compares, in each
thread, the sentences of that thread with those of all threads. With two threads the learning rate therefore falls only half way, and the
vectors differ from those of gensim with one thread. That pair is printed last; the difference lies within gensim.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from gensim.models import Word2Vec
from gensim.models.word2vec import LineSentence
from scipy.stats import spearmanr

import clickfleet
from clickfleet.models.word2vec import vectors
from clickfleet.models.word2vec.corpus import CorpusOptions as Prepare
from clickfleet.models.word2vec.corpus import prepare
from clickfleet.models.word2vec.synth_text import Corpus, TextOptions
from clickfleet.models.word2vec.vectors import Vectors

Measured = tuple[float, float, Vectors]  # seconds, CPU seconds, the learned vectors
PACKAGES = ("numpy", "scipy", "torch", "gensim")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--words", type=int, default=1_000_000, help="words of the planted text; 0: skip it")
    parser.add_argument("--vocabulary", type=int, default=20_000)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="rounds on the planted text; English has two")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--negatives", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2, help="epochs on the planted text; English has one")
    parser.add_argument("--text", type=Path, help="English text, instead of the documentation of Python packages")
    parser.add_argument("--batches", action="store_true", help="only compare the default batch with 1000 sentences")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.batches:
            made = Corpus(TextOptions(args.words, args.vocabulary, args.topics, entities=60))
            batches(args, Path(folder, "long"), made.text())
            return
        if args.words:
            made = Corpus(TextOptions(args.words, args.vocabulary, args.topics, entities=60))
            at = Path(folder, "planted")
            found = run(args, at, made.text(), args.epochs, args.rounds)
            planted(found, made, at)
            agreements(found)
        text = english() if args.text is None else args.text.read_text(errors="replace")
        agreements(run(args, Path(folder, "english"), text, epochs=1, rounds=2))


def english() -> str:
    """Return distinct paragraphs of documentation, in the order of files."""
    root, seen = Path(sysconfig.get_path("purelib")), dict[str, None]()
    for path in (path for name in PACKAGES for path in sorted((root / name).rglob("*.py"))):
        for text in re.findall(r'"""(.*?)"""', path.read_text(errors="replace"), re.DOTALL):
            for paragraph in re.split(r"\n\s*\n", text):
                words = re.findall("[a-z]+", paragraph.lower())
                if len(words) >= 5:
                    seen[" ".join(words)] = None
    return "\n".join(seen) + "\n"


def run(args: argparse.Namespace, folder: Path, text: str, epochs: int, rounds: int) -> dict[str, list[Measured]]:
    """Train in alternation and print the speeds."""
    folder.mkdir()
    (folder / "text.txt").write_text(text)
    made = prepare(folder / "text.txt", folder / "p", Prepare())
    joined = folder / "joined.txt"
    joined.write_bytes(b"".join(path.read_bytes() for path in sorted((folder / "p/train").iterdir())))
    total = made["words"] * epochs
    print(f"{folder.name}: {made['words']:,} words, {made['vocabulary']:,} different, epochs {epochs}, "
          f"threads {args.threads}, dim {args.dim}, {args.negatives} negatives")  # fmt: skip
    cases: dict[str, Callable[[int], Measured]] = {
        "clickfleet": lambda n: ours(args, folder, n, epochs),
        "gensim, file": lambda n: theirs(args, joined, n, epochs, file=True),
        "gensim, iterable": lambda n: theirs(args, joined, n, epochs, file=False),
    }
    found: dict[str, list[Measured]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, train in cases.items():
            found[name].append(train(number))
            seconds, cpu, _ = found[name][-1]
            print(f"  {name:17} {total / seconds:10,.0f} words/s, {total / cpu:10,.0f} per CPU second", flush=True)
    rates = {
        name: [statistics.median(total / each[i] for each in runs) for i in (0, 1)] for name, runs in found.items()
    }
    for name, (speed, cpu) in rates.items():
        print(f"{name:17} {speed:10,.0f} words/s, {cpu:10,.0f} per CPU second (medians)")
    best = [max(rates[name][i] for name in rates if name != "clickfleet") for i in (0, 1)]
    print(f"clickfleet / the faster gensim: {rates['clickfleet'][0] / best[0]:.2f} by wall-clock time, "
          f"{rates['clickfleet'][1] / best[1]:.2f} by CPU time", flush=True)  # fmt: skip
    return found


def ours(args: argparse.Namespace, folder: Path, seed: int, epochs: int, batch: int | None = None) -> Measured:
    config: dict[str, Any] = {
        "data": {
            "format": "sentences",
            "train": str(folder / "p/train"),
            "vocabulary": str(folder / "p/vocabulary.txt"),
            "batch_size": batch,
        },
        "model": {"name": "word2vec", "negatives": args.negatives, "bias": False},  # gensim has no bias
        "table": {"dim": args.dim},
        "train": {"epochs": epochs, "threads": args.threads, "seed": seed},
        "run": {"dir": str(folder / f"run-{seed}"), "report": False, "keep_epochs": False},
    }
    begin = time.process_time()
    done = clickfleet.train(config, quiet=True)
    cpu = time.process_time() - begin
    return done.rows / done.rows_per_s, cpu, vectors.load(folder / f"run-{seed}")


def batches(args: argparse.Namespace, folder: Path, text: str) -> None:
    """Print the speed and the agreement with gensim per batch size."""
    folder.mkdir()
    (folder / "text.txt").write_text(text.replace("\n", " ") + "\n")
    made = prepare(folder / "text.txt", folder / "p", Prepare(parts=1))
    _, _, beside = theirs(args, folder / "p/train/part-00000.txt", 0, args.epochs, file=False)
    found: dict[int | None, list[Measured]] = {None: [], 1000: []}
    for number in range(args.rounds):
        for batch, runs in found.items():
            runs.append(ours(args, folder, 2 * number + (batch is None), args.epochs, batch))
    speeds = {
        batch: statistics.median(made["words"] * args.epochs / each[1] for each in runs)
        for batch, runs in found.items()
    }
    for batch, runs in found.items():
        like = statistics.mean(agreement(of, beside) for _, _, of in runs)
        print(
            f"batch {batch or 'default'}: {speeds[batch]:,.0f} words per CPU second, agreement with gensim {like:.3f}"
        )
    print(f"default / 1000 sentences: {speeds[None] / speeds[1000]:.2f} by CPU time")


def theirs(args: argparse.Namespace, text: Path, seed: int, epochs: int, file: bool) -> Measured:
    model = Word2Vec(
        vector_size=args.dim, window=5, min_count=1, sg=1, negative=args.negatives, sample=1e-3, alpha=0.025,
        min_alpha=1e-4, workers=args.threads, epochs=epochs, seed=seed + 1,
    )  # fmt: skip
    given: dict[str, Any] = {"corpus_file": str(text)} if file else {"corpus_iterable": LineSentence(str(text))}
    model.build_vocab(**given)
    begin, cpu = time.perf_counter(), time.process_time()
    model.train(**given, total_examples=model.corpus_count, total_words=model.corpus_total_words, epochs=epochs)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return seconds, cpu, Vectors(model.wv.index_to_key, np.array(model.wv.vectors))


def planted(found: dict[str, list[Measured]], corpus: Corpus, folder: Path) -> None:
    questions = folder / "questions.txt"
    questions.write_text("".join(" ".join(each) + "\n" for each in corpus.questions()))
    for name, runs in found.items():
        right = statistics.median(of.evaluate(questions)["accuracy"] for _, _, of in runs)
        same = statistics.median(topical(of, corpus) for _, _, of in runs)
        print(f"{name:17} analogies {right:.3f}, neighbours of the same topic {same:.3f}", flush=True)


def topical(of: Vectors, corpus: Corpus) -> float:
    """Return the fraction of the ten nearest words that share the topic of a word."""
    topic = dict(zip(corpus.names.tolist(), corpus.topic.tolist(), strict=False))
    words = [word for word in of.words if word in topic][:2000]
    rows = of.unit[[of.place[word] for word in words]]
    order = np.argsort(-(rows @ rows.T), axis=1)[:, 1:11]
    own = np.array([topic[word] for word in words])
    return float((own[order] == own[:, None]).mean())


def agreements(found: dict[str, list[Measured]]) -> None:
    """Print how alike tools, and seeds of one tool, rank words: means over pairs of models."""
    mine, file, gensim = ([of for _, _, of in runs[:2]] for runs in found.values())
    print("rank correlation of similarities:")
    for what, pairs in (
        ("clickfleet and gensim", product(mine, gensim)),
        ("gensim and gensim with another seed", combinations(gensim, 2)),
        ("clickfleet and clickfleet with another seed", combinations(mine, 2)),
        ("gensim and gensim's file reader", product(gensim, file)),
    ):
        each = [agreement(a, b) for a, b in pairs]
        print(f"  {what:45} {statistics.mean(each):.3f}" if each else f"  {what}: needs two rounds", flush=True)


def agreement(a: Vectors, b: Vectors, words: int = 500) -> float:
    """Return how alike two models rank all other words by similarity, over frequent words."""
    common = [word for word in a.words if word in b.place][:words]
    first, second = (of.unit[[of.place[word] for word in common]] for of in (a, b))
    x, y = first @ first.T, second @ second.T
    others = ~np.eye(len(common), dtype=bool)
    ranks = [spearmanr(x[i][others[i]], y[i][others[i]]).statistic for i in range(len(common))]
    return float(np.mean(ranks))


if __name__ == "__main__":
    main()
