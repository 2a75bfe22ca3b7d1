"""Decides whether a model may be released: what it scored before it was trained on must look like what it scored before."""

from __future__ import annotations

from typing import Any

from clickfleet import sections

Results = dict[str, Any]


class Judge:
    """Remembers the AUC of the passes whose model was released; its state is part of every checkpoint.

    >>> judge = Judge(sections.Guard(auc_drop=0.02, min_rows=1))
    >>> good = {"rows": 100, "invalid": 0, "auc": 0.75, "calibration": 1.0}
    >>> judge.reasons([good], 10, 100), judge.released([good])
    ([], None)
    >>> judge.reasons([{**good, "auc": 0.7}], 10, 100)
    ['AUC 0.7000 is 0.0500 below the mean 0.7500 of the last 1 passes released, more than publish.guard.auc_drop 0.02']
    """

    def __init__(self, guard: sections.Guard) -> None:
        self.guard = guard
        self.aucs: list[float] = []

    def reasons(self, passes: list[Results], changed: int, rows: int) -> list[str]:
        """Why an entry with these passes and `changed` of the table's rows must be held; none to release it."""
        found = [reason for results in passes for reason in self._of(results)]
        share = self.guard.delta_share
        if share is not None and changed > share * rows:
            found.append(
                f"{changed:,} of {rows:,} rows change, more than publish.guard.delta_share {share:g} of the table"
            )
        return found

    def _of(self, results: Results) -> list[str]:
        guard, found = self.guard, []
        rows, invalid = results["rows"], results["invalid"]
        if guard.nan_share is not None and invalid > guard.nan_share * (rows + invalid):
            found.append(f"{invalid:,} of {rows + invalid:,} scores are no numbers")
        if rows < guard.min_rows:
            return found
        if guard.auc_drop is not None and self.aucs:
            mean = sum(self.aucs) / len(self.aucs)
            if mean - results["auc"] > guard.auc_drop:
                found.append(
                    f"AUC {results['auc']:.4f} is {mean - results['auc']:.4f} below the mean {mean:.4f} of the last "
                    f"{len(self.aucs)} passes released, more than publish.guard.auc_drop {guard.auc_drop:g}"
                )
        copc = results["calibration"]
        if guard.copc is not None and copc is not None and not guard.copc[0] <= copc <= guard.copc[1]:
            low, high = guard.copc
            found.append(f"COPC {copc:.4f} lies outside of publish.guard.copc {low:g} to {high:g}")
        return found

    def released(self, passes: list[Results]) -> None:
        """These passes' model is out: it is what later ones are compared with."""
        self.aucs += [results["auc"] for results in passes if results["rows"] >= self.guard.min_rows]
        del self.aucs[: -self.guard.window]
