"""`inspect`: what a model is made of, one row of it, what changed between two, and why a row is scored so."""

from pathlib import Path
from typing import Annotated, Any

import typer

from clickfleet.cli.frame import Result, Trust, command, say
from clickfleet.cli.training import Format, Model


def add(app: typer.Typer) -> None:
    command(app)(inspect)


def inspect(
    model: Model,
    key: Annotated[str | None, typer.Option(help="Show the row of this key, decimal or 0x….")] = None,
    slot: Annotated[str | None, typer.Option(help="With --value: show the row of a value in this slot.")] = None,
    value: Annotated[str | None, typer.Option(help="With --slot: the value as the data have it.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another model: show the rows that moved most from it to this one.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="Why is this row scored so? Features as JSON, or a file of data (see --line).")
    ] = None,
    line: Annotated[int, typer.Option(min=1, help="With --explain FILE: which row of it.")] = 1,
    importance: Annotated[
        str | None, typer.Option(help="Data with labels: how much AUC is lost when each field is shuffled.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(help="With --importance: fields shuffled together, such as C1+C2,C3.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Lines shown of long lists.")] = 20,
    format: Format = None,  # noqa: A002
    trust: Trust = False,
) -> Result:
    """Show what a model is made of: rows, memory, scores, norms. Or one row, what moved, what a score is made of."""
    if (slot is None) != (value is None):
        raise typer.BadParameter("--slot and --value go together")
    asked = [key is not None, slot is not None, against is not None, explain is not None, importance is not None]
    if sum(asked) > 1:
        raise typer.BadParameter("ask for one thing: --key, --slot and --value, --against, --explain or --importance")
    if groups is not None and importance is None:
        raise typer.BadParameter("--groups goes with --importance")
    if key is not None or slot is not None:
        return _row(model, key, slot, value)
    if against is not None:
        return _movers(model, against, top, trust)
    if explain is not None:
        return _explain(model, explain, line, format, top, trust)
    if importance is not None:
        return _importance(model, importance, groups, format, top, trust)
    return _describe(model, top, trust)


def _describe(model: Path, top: int, trust: bool) -> Result:
    from clickfleet.workbench.inspection import describe
    from clickfleet.workbench.tables import Column, Table

    facts = describe(model, trust)
    say(f"{facts['checkpoint']}: {facts['model']['name']}, step {facts['step']:,}")
    say(f"dense parameters {facts['parameters']:,}")
    say(
        f"table {facts['rows']:,} rows ({facts['full_rows']:,} with factors), {facts['factors']} factors, "
        f"{facts['bytes']:,} bytes, {facts['bytes_per_row']:.0f} per row"
    )
    if facts["norms"]:
        say("norms of factors: " + ", ".join(f"{name} {x:.4g}" for name, x in facts["norms"].items()))
    for entry in facts.get("entries", [])[-top:]:
        say(f"entry {entry['sequence']} {entry['kind']}: {entry['rows']:,} rows, {entry['bytes']:,} bytes")
    if facts["scores"] is None:
        say("published entries hold no statistics: scores are in the run's checkpoints")
    else:
        most = max(facts["scores"].values()) or 1
        say("rows by score:")
        for name, rows in facts["scores"].items():
            say(f"{rows:>12,}  {name:<12} {'#' * round(40 * rows / most)}")
        say(
            f"{facts['removed_at_next_shrink']:,} rows would be removed by the next shrink, {facts['published_rows']:,} are published"
        )
    ranked = sorted(facts["per_slot"].items(), key=lambda item: -item[1]["rows"])
    columns = [Column("slot"), Column("rows", "rows", "{:,}"), Column("full_rows", "with factors", "{:,}")]
    columns += [Column("mean_abs_weight", "mean |weight|", "{:.4g}"), Column("mean_norm", "mean norm", "{:.4g}")]
    say(Table(columns, [{"slot": name, **one} for name, one in ranked[:top]]).text())
    if len(ranked) > top:
        say(f"{len(ranked) - top} more slots with fewer rows: --top {len(ranked)} shows all")
    return facts


def _row(model: Path, key: str | None, slot: str | None, value: str | None) -> Result:
    from clickfleet import saving
    from clickfleet.workbench import row

    if key is not None:
        number = row.check_key(key)
    else:
        assert slot is not None
        assert value is not None
        number = row.key_of(row.schema_of(saving.resolve(model)), slot, value)
    facts = row.look_up(model, number)
    for text in row.words(facts):
        say(text)
    return facts


def _movers(model: Path, against: Path, top: int, trust: bool) -> Result:
    from clickfleet.workbench.movers import movers
    from clickfleet.workbench.tables import Column, Table

    facts = movers(model, against, top, trust)
    say(f"{facts['rows']:,} rows: {facts['moved']:,} moved, {facts['born']:,} came, {facts['gone']:,} went")
    columns = [
        Column("key"),
        Column("slot"),
        Column("moved", "moved by", "{:.4g}"),
        Column("embed_w", "weight", "{:.4g}"),
    ]
    say(Table([*columns, Column("show", "shows", "{:g}"), Column("click", "clicks", "{:g}")], facts["movers"]).text())
    changed: dict[str, Any] = facts["dense"]
    if changed:
        say("the network's tensors, the way they went as a share of their norm:")
    for name, share in changed.items():
        say(f"{'new' if share is None else f'{share:.2%}':>9}  {name}")
    return facts


def _explain(model: Path, row: str, line: int, form: str | None, top: int, trust: bool) -> Result:
    from clickfleet.workbench import explain

    facts = explain.explain(model, row, line, form, trust)
    for text in explain.words(facts, top):
        say(text)
    return facts


def _importance(model: Path, data: str, groups: str | None, form: str | None, top: int, trust: bool) -> Result:
    from clickfleet.workbench.explain import weigh

    wanted = None if groups is None else [group.split("+") for group in groups.split(",")]
    found = weigh(model, data, wanted, form, trust)
    say("   AUC lost  log loss gained")
    for one in found[:top]:
        say(f"{one.auc_drop:>+11.5f}  {one.logloss_rise:>+15.5f}  {one.name}")
    return {"importance": [one._asdict() for one in found]}
