"""Read and write `serving_client_conf.prototxt`, which names the inputs and outputs of a model for clients of Paddle Serving.

>>> text = 'feed_var { name: "1" alias_name: "C1" feed_type: 0 shape: 1 } fetch_var { name: "score" fetch_type: 1 }'
>>> config = parse(text, "serving_client_conf.prototxt")
>>> config.feeds[0].alias, config.feeds[0].shape, config.fetches[0].alias
('C1', (1,), 'score')
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError
from clickfleet.serve.aliases import SCORE, Aliases
from clickfleet.serve.features import Fields, inputs_of
from clickfleet.store.atomic import write_file

FILE = "serving_client_conf.prototxt"
INTEGER, FLOAT, INT32, TEXT = 0, 1, 2, 20
TYPES = {0: INTEGER, 1: FLOAT, 2: INT32, 3: TEXT, 20: TEXT}
"""Types of Paddle Serving. Its releases number texts differently."""
DENSE_INPUT = "dense_input"
_TOKEN = re.compile(r'#[^\n]*|"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'|([-+.\w]+)|([{}\[\]:,;<>])|(\S)')


@dataclass(frozen=True)
class Variable:
    """An input or output. Clients call it `alias`."""

    name: str
    alias: str
    type: int
    shape: tuple[int, ...] = ()
    """Of one row. It may be empty."""
    lod: bool = False
    """Whether rows may have different numbers of values."""


@dataclass(frozen=True)
class ClientConfig:
    feeds: tuple[Variable, ...]
    fetches: tuple[Variable, ...]


def read(paths: str | Sequence[str]) -> ClientConfig:
    """Read a file, or the one in a folder. Of several files, the first names the inputs and the last the outputs."""
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise ConfigError("no client configuration is given", f"give the path of a {FILE}")
    configs = []
    for path in map(Path, given):
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                f"{file} does not exist", "write one for a model of clickfleet: clickfleet migrate client-config"
            )
        try:
            configs.append(parse(file.read_text("utf-8"), str(file)))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {file}: {error}", f"give the path of a {FILE}") from None
    return ClientConfig(configs[0].feeds, configs[-1].fetches)


def parse(text: str, where: str) -> ClientConfig:
    """Return the variables of a prototxt."""
    found: dict[str, list[Variable]] = {"feed_var": [], "fetch_var": []}
    tokens = _tokens(text, where)
    for token in tokens:
        if token == ":":
            continue
        if token not in found:
            raise ConfigError(f"{where}: expected feed_var or fetch_var, not {token!r}", f"is it a {FILE}?")
        found[token].append(_variable(tokens, where))
    if not found["feed_var"] or not found["fetch_var"]:
        raise ConfigError(f"{where} names no inputs or no outputs", f"is it a {FILE}?")
    return ClientConfig(tuple(found["feed_var"]), tuple(found["fetch_var"]))


def _tokens(text: str, where: str) -> Iterator[str]:
    for match in _TOKEN.finditer(text):
        double, single, word, mark, other = match.groups()
        if other is not None:
            line = text.count("\n", 0, match.start()) + 1
            raise ConfigError(f"{where}:{line}: unexpected character {other!r}", f"is it a {FILE}?")
        quoted = double if double is not None else single
        if quoted is not None:
            yield re.sub(r"\\(.)", r"\1", quoted)
        elif word or mark:
            yield word or mark


def _variable(tokens: Iterator[str], where: str) -> Variable:
    """Return the variable whose braces come next."""
    opening = next(tokens, "")
    closing = {"{": "}", "<": ">"}.get(next(tokens, "") if opening == ":" else opening)
    values: dict[str, list[str]] = {}
    for key in tokens:
        if key == closing:
            break
        if key in (",", ";"):
            continue
        if next(tokens, "") != ":":
            raise ConfigError(f"{where}: expected ':' after {key!r}", f"is it a {FILE}?")
        value = next(tokens, "")
        listed = iter(lambda: next(tokens, "]"), "]") if value == "[" else iter([value])
        values.setdefault(key, []).extend(item for item in listed if item != ",")
    else:
        raise ConfigError(f"{where}: a variable has no end", f"is it a complete {FILE}?")
    first = {key: items[0] for key, items in values.items() if items}
    name = first.get("name")
    if not name:
        raise ConfigError(f"{where}: a variable has no name", f"is it a {FILE}?")
    try:
        kind = TYPES[int(first.get("feed_type") or first.get("fetch_type") or "0")]
        shape = tuple(int(size) for size in values.get("shape", ()))
    except (KeyError, ValueError):
        raise ConfigError(
            f"{where}: {name} has a type or shape that clickfleet does not know", "types: 0, 1, 2, 3, 20"
        ) from None
    lod = first.get("is_lod_tensor", "false").lower() in ("true", "1", "t")
    return Variable(name, first.get("alias_name") or name, kind, shape, lod)


def describe(schema: Schema, outputs: Sequence[str]) -> ClientConfig:
    """Return the variables of a model under the names that clients of Paddle use: slots, then dense values."""
    fields = Fields(schema)
    tasks = [label.name for label in schema.tasks]
    aliases = Aliases(fields, outputs, tasks)
    others = {ours: name for name, ours in aliases.to_dict().items() if re.fullmatch(r"C\d+", name)}
    integers = schema.keys.name == "raw"
    feeds = []
    for item in inputs_of(schema):
        if item["kind"] == "number":
            continue
        kind, one = INTEGER if integers and item["kind"] == "key" else TEXT, item["values"] == 1
        feeds.append(Variable(item["name"], others.get(item["name"], item["name"]), kind, (1,), not one))
    numbers = [item for item in inputs_of(schema) if item["kind"] == "number"]
    if len(numbers) == len(fields.dense) and DENSE_INPUT in aliases.to_dict():
        name = numbers[0]["name"] if len(numbers) == 1 else DENSE_INPUT
        feeds.append(Variable(name, DENSE_INPUT, FLOAT, (len(schema.dense),)))
    else:
        feeds += [Variable(item["name"], item["name"], FLOAT, (int(item["values"]),)) for item in numbers]
    several = len(tasks) > 1 and "score" in outputs
    fetches = [
        Variable(ours, name, FLOAT, (1,)) for name, ours in aliases.to_dict().items() if ours in tasks and several
    ]
    fetches += [
        Variable(
            name,
            SCORE if name == "score" and not several else name,
            FLOAT,
            (len(tasks),) if name in ("score", "logit") else (),
        )
        for name in outputs
        if name != "score" or len(fetches) < len(tasks)
    ]
    return ClientConfig(tuple(feeds), tuple(fetches))


def write(config: ClientConfig, folder: Path) -> Path:
    """Write the file into a folder and return its path."""
    parts = [_text("feed", one) for one in config.feeds] + [_text("fetch", one) for one in config.fetches]
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / FILE, "".join(parts).encode())
    return folder / FILE


def _text(kind: str, one: Variable) -> str:
    def quote(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    lines = [f"name: {quote(one.name)}", f"alias_name: {quote(one.alias)}", f"is_lod_tensor: {str(one.lod).lower()}"]
    lines += [f"{kind}_type: {one.type}", *(f"shape: {size}" for size in one.shape)]
    return f"{kind}_var {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"
