"""The commands `inspect` and `explain`."""

from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.frame import Result, Trust, command, say
from clickfleet.cli.training import Format, Model


def add(app: typer.Typer) -> None:
    command(app)(inspect)
    command(app)(explain)


def inspect(
    model: Model,
    key: Annotated[str | None, typer.Option(help="Show the row of this key, decimal or 0x…", metavar="KEY")] = None,
    slot: Annotated[
        str | None, typer.Option(help="With --value: show the row of a value of this slot.", metavar="NAME")
    ] = None,
    value: Annotated[str | None, typer.Option(help="With --slot: the value, as in the data.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Show the rows that changed most from this other model to MODEL.", metavar="MODEL"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Maximum number of lines of a list.")] = 20,
    trust: Trust = False,
) -> Result:
    """Show the contents of a model, one of its rows, or the changes from another model.

    Example: `clickfleet inspect run --slot C1 --value 68fd1e64`
    """
    if (slot is None) != (value is None):
        raise typer.BadParameter("--slot and --value must be given together")
    if sum([key is not None, slot is not None, against is not None]) > 1:
        raise typer.BadParameter("give only one of --key, --slot with --value, and --against")
    if key is not None or slot is not None:
        return _row(model, key, slot, value)
    if against is not None:
        return _diff(model, against, top, trust)
    return _describe(model, top, trust)


def explain(
    model: Model,
    row: Annotated[
        str | None,
        typer.Argument(help="Features as JSON, an object or a list of them, or a data file.", metavar="ROW|FILE"),
    ] = None,
    line: Annotated[int, typer.Option(min=1, help="With FILE: the number of the first row to explain, from 1.")] = 1,
    rows: Annotated[
        int | None, typer.Option(min=1, help="With FILE: the number of rows to explain (default: 1).")
    ] = None,
    importance: Annotated[
        str | None,
        typer.Option(help="Show how much AUC is lost on this labelled data when a field is shuffled.", metavar="DATA"),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(help="With --importance: shuffle fields together, such as C1+C2,C3.", metavar="A+B,C,..."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Maximum number of fields to show per row.")] = 20,
    format: Format = None,  # noqa: A002
    trust: Trust = False,
) -> Result:
    """Show what each field contributes to the score of a row, or how important each field is for the model.

    The contribution of a field is the score minus the score with that field missing.

    Example: `clickfleet explain run log/test/part-0 --line 7`
    """
    if (row is None) == (importance is None):
        raise typer.BadParameter("give either ROW|FILE or --importance DATA")
    if groups is not None and importance is None:
        raise typer.BadParameter("--groups needs --importance")
    if importance is not None:
        return _importance(model, importance, groups, format, top, trust)
    assert row is not None
    return _explain(model, row, line, rows, format, top, trust)


def _describe(model: Path, top: int, trust: bool) -> Result:
    from clickfleet.workbench.inspection import describe
    from clickfleet.workbench.tables import Column, TextTable

    facts = describe(model, trust)
    say(f"{facts['checkpoint']}: {facts['model']['name']}, step {facts['step']:,}")
    say(f"dense parameters {facts['parameters']:,}")
    several = "up to " if len(facts["widths"].keys() - {"0"}) > 1 else ""
    say(
        f"table {facts['rows']:,} rows ({facts['full_rows']:,} with factors), {several}{facts['factors']} factors, "
        f"{facts['bytes']:,} bytes, {facts['bytes_per_row']:.0f} per row"
    )
    if tiers := facts["tiers"]:
        memory, disk = tiers["memory"], tiers["disk"]
        say(
            f"in memory {memory['rows']:,} rows, {memory['bytes_per_row']:.0f} bytes per row; on disk {disk['rows']:,} rows, "
            f"{disk['bytes_per_row']:.0f} bytes per row and {disk['index_bytes_per_row']:.1f} of memory"
        )
    for width, one in facts["widths"].items():
        if len(facts["widths"]) > 1:
            on_disk = (
                f"; on disk {one['disk_rows']:,} rows, {one['disk_bytes_per_row']:.0f} bytes per row" if tiers else ""
            )
            say(f"rows with {width} factors: {one['rows']:,}, {one['bytes_per_row']:.0f} bytes per row{on_disk}")
    if found := facts["findings"]:
        first = ", ".join(f"{name} {weight:.4g}" for name, weight in list(found.items())[:top])
        say(f"found by training, {len(found)} in all: {first}")
    if facts["norms"]:
        say("norms of factors: " + ", ".join(f"{name} {x:.4g}" for name, x in facts["norms"].items()))
    for entry in facts.get("entries", [])[-top:]:
        rows = f"{entry['rows']:,} rows in {entry['row_format']}, {entry['bytes_per_row']:.1f} bytes each"
        say(f"entry {entry['sequence']} {entry['kind']}: {rows}; {entry['bytes']:,} bytes in all")
    if facts["scores"] is None:
        say("published entries hold no statistics; the run's checkpoints do")
    else:
        most = max(facts["scores"].values()) or 1
        say("rows by score:")
        for name, rows in facts["scores"].items():
            say(f"{rows:>12,}  {name:<12} {'#' * round(40 * rows / most)}")
        say(
            f"the next shrink would remove {facts['removed_at_next_shrink']:,} rows; {facts['published_rows']:,} rows are published"
        )
    ranked = sorted(facts["per_slot"].items(), key=lambda item: -item[1]["rows"])
    columns = [Column("slot"), Column("rows", "rows", "{:,}"), Column("full_rows", "with factors", "{:,}")]
    columns += [Column("mean_abs_weight", "mean |weight|", "{:.4g}"), Column("mean_norm", "mean norm", "{:.4g}")]
    say(TextTable(columns, [{"slot": name, **one} for name, one in ranked[:top]]).text())
    if facts["top_rows"]:
        by = "largest weights" if facts["scores"] is None else "most shows"
        say(f"rows with the {by}:")
        columns = [Column("slot"), Column("value"), Column("key"), Column("embed_w", "weight", "{:.4g}")]
        columns += [Column("show", "shows", "{:,.0f}"), Column("click", "clicks", "{:,.0f}")]
        say(TextTable(columns, facts["top_rows"][:top]).text())
    if len(ranked) > top:
        say(f"{len(ranked) - top} more slots with fewer rows; --top {len(ranked)} shows all")
    return facts


def _row(model: Path, key: str | None, slot: str | None, value: str | None) -> Result:
    from clickfleet.store import run_folder
    from clickfleet.workbench import inspection

    if key is not None:
        number = inspection.parse_key(key)
    else:
        assert slot is not None
        assert value is not None
        number = inspection.key_of(inspection.schema_of(run_folder.resolve(model)), slot, value)
    facts = inspection.look_up(model, number)
    for text in inspection.row_text(facts):
        say(text)
    return facts


def _diff(model: Path, against: Path, top: int, trust: bool) -> Result:
    from clickfleet.workbench.diff import diff
    from clickfleet.workbench.tables import Column, TextTable

    facts = diff(model, against, top, trust)
    say(f"{facts['rows']:,} rows: {facts['moved']:,} changed, {facts['born']:,} added, {facts['gone']:,} removed")
    columns = [Column("key"), Column("slot"), Column("value"), Column("moved", "changed by", "{:.4g}")]
    columns += [
        Column("embed_w", "weight", "{:.4g}"),
        Column("show", "shows", "{:g}"),
        Column("click", "clicks", "{:g}"),
    ]
    say(TextTable(columns, facts["movers"]).text())
    changed: dict[str, float | None] = facts["dense"]
    if changed:
        say("change of the network's tensors relative to their norm:")
    for name, share in changed.items():
        say(f"{'new' if share is None else f'{share:.2%}':>9}  {name}")
    return facts


def _explain(model: Path, row: str, line: int, rows: int | None, form: str | None, top: int, trust: bool) -> Result:
    from clickfleet.workbench import explain

    explanations = explain.explain_rows(model, row, line, rows, form, trust)
    for place, facts in enumerate(explanations):
        if place:
            say("")
        for text in explain.explanation_text(facts, top):
            say(text)
    return explanations[0] if len(explanations) == 1 else {"rows": explanations}


def _importance(model: Path, data: str, groups: str | None, form: str | None, top: int, trust: bool) -> Result:
    from clickfleet.workbench.explain import field_importance

    wanted = None if groups is None else [group.split("+") for group in groups.split(",")]
    ranking = field_importance(model, data, wanted, form, trust)
    say("   AUC lost  log loss gained")
    for one in ranking[:top]:
        say(f"{one.auc_drop:>+11.5f}  {one.logloss_rise:>+15.5f}  {one.name}")
    return {"importance": [one._asdict() for one in ranking]}
