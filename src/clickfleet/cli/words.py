"""The commands `words synth`, `words prepare`, `words nearest`, `words analogy` and `words export`."""

from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.frame import Result, command, say

Model = Annotated[
    Path, typer.Argument(help="A word2vec run folder (its newest checkpoint), or a checkpoint.", metavar="MODEL")
]
Count = Annotated[int, typer.Option("-n", min=1, help="Number of words to show.")]
Raw = Annotated[bool, typer.Option("--raw", help="Add the vectors themselves, not their unit vectors.")]


def add(app: typer.Typer) -> None:
    words = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
    command(words)(synth)
    command(words)(prepare)
    command(words)(nearest)
    command(words)(analogy)
    command(words)(export)
    summary = "Word vectors (word2vec): prepare text for training, query and export the vectors."
    app.add_typer(words, name="words", help=summary, short_help=summary)


def synth(
    out: Annotated[Path, typer.Argument(help="Folder for text.txt and questions.txt.", metavar="OUT")],
    words: Annotated[int, typer.Option(min=1, help="Number of words of text.")] = 1_000_000,
    vocabulary: Annotated[int, typer.Option(min=1, help="Number of distinct topic words.")] = 5000,
    topics: Annotated[int, typer.Option(min=1, help="Number of topics; words of a topic occur together.")] = 40,
    entities: Annotated[int, typer.Option(min=2, help="Number of entities in the analogies.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same text.")] = 7,
) -> Result:
    """Generate text with planted topics and analogies, and a file of questions about them."""
    from clickfleet.models.word2vec.synth_text import TextOptions
    from clickfleet.models.word2vec.synth_text import synth as generate

    result = generate(out, TextOptions(words, vocabulary, topics, entities, seed))
    say(f"{result['words']:,} words in {result['rows']:,} sentences, {result['questions']:,} questions in {out}")
    return result


def prepare(
    text: Annotated[
        list[str],
        typer.Argument(help="Plain text: files, folders or globs; .gz and .zst are decompressed.", metavar="TEXT"),
    ],
    out: Annotated[Path, typer.Option(help="New folder for train/ and vocabulary.txt.")],
    min_count: Annotated[int, typer.Option(min=1, help="Drop words that occur less often.")] = 5,
    max_words: Annotated[
        int | None, typer.Option(min=1, help="Keep only the N most frequent words (default: all).", metavar="N")
    ] = None,
    lower: Annotated[
        bool, typer.Option("--lower/--as-is", help="Convert the text to lower case, or keep it as it is.")
    ] = True,
    az: Annotated[bool, typer.Option("--az", help="Treat everything but a-z as a blank, as in text8.")] = False,
    sentence_words: Annotated[int, typer.Option(min=1, help="Split lines with more words.")] = 1000,
    parts: Annotated[int, typer.Option(min=1, help="Number of part files, which the workers of a cluster share.")] = 4,
) -> Result:
    """Count the words of plain text and split it into part files of sentences."""
    from clickfleet.models.word2vec.corpus import CorpusOptions
    from clickfleet.models.word2vec.corpus import prepare as split

    result = split(text, out, CorpusOptions(min_count, max_words, lower, az, sentence_words, parts))
    say(f"{result['words_read']:,} words read, {result['words']:,} kept: {result['vocabulary']:,} distinct")
    say(f"{result['rows']:,} sentences in {result['parts']} files in {out / 'train'}")
    return result


def nearest(
    model: Model,
    words: Annotated[list[str], typer.Argument(help="Words of the vocabulary.", metavar="WORD")],
    n: Count = 10,
) -> Result:
    """Show the words with the most similar vectors."""
    from clickfleet.models.word2vec import vectors

    loaded = vectors.load(model)
    neighbours = {word: loaded.nearest(word, n) for word in words}
    for word, near in neighbours.items():
        say(f"{word}: " + ", ".join(f"{other} {score:.3f}" for other, score in near))
    return {"nearest": {word: [list(one) for one in near] for word, near in neighbours.items()}}


def analogy(
    model: Model,
    a: Annotated[str, typer.Argument(help="A is to B …", metavar="A")],
    b: Annotated[str, typer.Argument(help="… as …", metavar="B")],
    c: Annotated[str, typer.Argument(help="… C is to which word?", metavar="C")],
    n: Count = 5,
    raw: Raw = False,
) -> Result:
    """Find the word that is to C as B is to A. `evaluate MODEL FILE` answers a whole file of such questions.

    Example: `clickfleet words analogy run man king woman`
    """
    from clickfleet.models.word2vec import vectors

    answers = vectors.load(model).analogy(a, b, c, n, raw)
    for word, score in answers:
        say(f"{score:.3f}  {word}")
    return {"found": [list(answer) for answer in answers]}


def export(
    model: Model,
    out: Annotated[Path, typer.Argument(help="File to write, in the word2vec text format.", metavar="OUT")],
) -> Result:
    """Write the vectors in the word2vec text format, which gensim and other tools read."""
    from clickfleet.models.word2vec import vectors

    result = vectors.load(model).export(out)
    say(f"{result['words']:,} vectors of {result['dim']} numbers in {out}, {result['bytes']:,} bytes")
    return result
