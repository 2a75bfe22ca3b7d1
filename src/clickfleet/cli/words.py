"""Commands about words, `clickfleet words …`: `synth`, `prepare`, `nearest`, `analogy`, `export`."""

from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.frame import Result, command, say

Model = Annotated[Path, typer.Argument(help="A run folder of word2vec (its newest checkpoint), or a checkpoint.")]
Count = Annotated[int, typer.Option("-n", min=1, help="How many words to show.")]
Raw = Annotated[bool, typer.Option("--raw", help="Add the vectors as they are, not their directions.")]


def add(app: typer.Typer) -> None:
    words = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
    command(words)(synth)
    command(words)(prepare)
    command(words)(nearest)
    command(words)(analogy)
    command(words)(export)
    summary = "Vectors of words (word2vec): text for train, and what to do with the vectors."
    app.add_typer(words, name="words", help=summary, short_help=summary)


def synth(
    out: Annotated[Path, typer.Argument(help="Folder for text.txt and questions.txt.", metavar="OUT")],
    words: Annotated[int, typer.Option(min=1, help="Words of text.")] = 1_000_000,
    vocabulary: Annotated[int, typer.Option(min=1, help="Different words of topics.")] = 5000,
    topics: Annotated[int, typer.Option(min=1, help="Topics whose words keep company.")] = 40,
    entities: Annotated[int, typer.Option(min=2, help="Entities that the analogies are about.")] = 20,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 7,
) -> Result:
    """Make text with planted topics and analogies, and the questions about them."""
    from clickfleet.words.synth import Options
    from clickfleet.words.synth import synth as make

    made = make(out, Options(words, vocabulary, topics, entities, seed))
    say(f"{made['words']:,} words in {made['rows']:,} sentences, {made['questions']:,} questions in {out}")
    return made


def prepare(
    text: Annotated[list[str], typer.Argument(help="Plain text: files, folders, globs; .gz and .zst are unpacked.")],
    out: Annotated[Path, typer.Option(help="New folder for train/ and vocabulary.txt.")],
    min_count: Annotated[int, typer.Option(min=1, help="Words that occur less often are left out.")] = 5,
    max_words: Annotated[int | None, typer.Option(min=1, help="Keep only so many, the most frequent ones.")] = None,
    lower: Annotated[bool, typer.Option("--lower/--as-is", help="Lower all letters, or leave them.")] = True,
    az: Annotated[bool, typer.Option("--az", help="Everything but a-z is a blank, as in text8.")] = False,
    sentence_words: Annotated[int, typer.Option(min=1, help="Lines with more words are cut.")] = 1000,
    parts: Annotated[int, typer.Option(min=1, help="Files of sentences; workers of a cluster share them.")] = 4,
) -> Result:
    """Count the words of plain text and cut it into part files of sentences."""
    from clickfleet.words.prepare import Options
    from clickfleet.words.prepare import prepare as make

    made = make(text, out, Options(min_count, max_words, lower, az, sentence_words, parts))
    say(f"{made['words_read']:,} words read, {made['words']:,} kept: {made['vocabulary']:,} different ones")
    say(f"{made['rows']:,} sentences in {made['parts']} files in {out / 'train'}")
    return made


def nearest(
    model: Model, words: Annotated[list[str], typer.Argument(help="Words of the vocabulary.")], n: Count = 10
) -> Result:
    """Show the words with the most similar vectors."""
    from clickfleet.words import vectors

    of = vectors.load(model)
    found = {word: of.nearest(word, n) for word in words}
    for word, near in found.items():
        say(f"{word}: " + ", ".join(f"{other} {score:.3f}" for other, score in near))
    return {"nearest": {word: [list(one) for one in near] for word, near in found.items()}}


def analogy(
    model: Model,
    a: Annotated[str, typer.Argument(help="a is to b …")],
    b: Annotated[str, typer.Argument(help="… as …")],
    c: Annotated[str, typer.Argument(help="… c is to what?")],
    n: Count = 5,
    raw: Raw = False,
) -> Result:
    """Show what is to c as b is to a; `evaluate MODEL FILE` answers whole files of such questions."""
    from clickfleet.words import vectors

    found = vectors.load(model).analogy(a, b, c, n, raw)
    for word, score in found:
        say(f"{score:.3f}  {word}")
    return {"found": [list(one) for one in found]}


def export(
    model: Model, out: Annotated[Path, typer.Argument(help="A file in the word2vec text format.", metavar="OUT")]
) -> Result:
    """Write the vectors as text that gensim and other tools read."""
    from clickfleet.words import vectors

    made = vectors.load(model).export(out)
    say(f"{made['words']:,} vectors of {made['dim']} numbers in {out}, {made['bytes']:,} bytes")
    return made
