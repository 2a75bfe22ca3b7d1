"""The modes as pure algorithms: logical workers in one process, against local training and against a few lines of NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clickfleet.cluster.simulate import SimulatedCluster, with_mode
from clickfleet.config.load import Config, load
from clickfleet.config.plugins import module, names
from clickfleet.data.batch import concatenate
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.errors import ConfigError
from clickfleet.paddlerec.roles import from_environment
from clickfleet.training import modes, predict
from clickfleet.training.embedding import Push
from clickfleet.training.learner import Learner
from clickfleet.training.loop import Clock, Job, WorkerJob, cut
from clickfleet.training.metrics import Metrics
from clickfleet.training.sharding import Gradient, merged, summed

BATCH, STEPS = 120, 100


@pytest.fixture(scope="module")
def batches(data: Any) -> list[Any]:
    reader = Reader(str(data / "train" / "*"), batch_size=BATCH)
    return [batch for batch, _ in zip(reader, range(STEPS), strict=False)]


@pytest.fixture(scope="module")
def schema(data: Any) -> Any:
    return Reader(str(data / "train" / "*")).schema


def configured(*settings: str) -> Config:
    return load(None, ["model.name=dnn", "model.hidden=[16, 8]", "table.dim=4", f"data.batch_size={BATCH}", *settings])


def local(config: Config, schema: Any, batches: list[Any]) -> Learner:
    learner = Learner(config, schema)
    modes.load(config)(Job(learner, Feed(batches, schema, BATCH), Metrics()))
    return learner


def slices(batches: list[Any], schema: Any, workers: int) -> list[Feed]:
    size = BATCH // workers
    return [Feed([batch[i * size : (i + 1) * size] for batch in batches], schema, size) for i in range(workers)]


def apart(a: Learner, b: Learner, batches: list[Any]) -> float:
    keys = np.unique(np.concatenate([batch.keys for batch in batches]))
    dense = float((a.flat.values - b.flat.values).abs().max())
    return max(dense, float(np.abs(a.table.pull(keys) - b.table.pull(keys)).max()))


RULES = [
    "table.rule={name: adagrad, lr: 0.05}",
    "table.rule={name: adam, lr: 0.001}",
    "table.rule={name: sgd, lr: 0.05}",
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sync_is_local_with_the_whole_batches(rule: str, workers: int, batches: list[Any], schema: Any) -> None:
    config = configured(rule)
    fleet = SimulatedCluster(with_mode(config, "sync"), schema, workers, shards=2)
    difference = apart(local(config, schema, batches), fleet.train(slices(batches, schema, workers)), batches)
    assert difference == 0.0 if workers == 1 else difference <= 1e-5


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize(
    "dense",
    [
        "dense.optimizer=adagrad",
        "dense.optimizer=sgd",
        "dense.clip_norm=0.1",
        "dense.schedule={name: step, every: 5, decay: 0.9}",
    ],
)
def test_one_worker_is_local_bit_for_bit(shards: int, dense: str, batches: list[Any], schema: Any) -> None:
    config, some = configured(dense, "train.loss.shared_error=1"), batches[:20]
    expected = local(config, schema, some)
    for mode in ("sync", "half_async"):
        found = SimulatedCluster(with_mode(config, mode), schema, 1, shards).train([Feed(some, schema, BATCH)])
        assert apart(expected, found, some) == 0.0


def test_geo_with_one_worker_is_local(batches: list[Any], schema: Any) -> None:
    config = configured("train.loss.shared_error=1")
    found = SimulatedCluster(with_mode(config, "geo", k_steps=7), schema, 1, 2).train([Feed(batches, schema, BATCH)])
    assert apart(local(config, schema, batches), found, batches) <= 1e-5


def test_geo_ships_more_often_the_more_workers_there_are(batches: list[Any], schema: Any) -> None:
    """The interval is that of the workers there are. It rises to its value in the first batches, so the runs have to be this long."""
    found = [
        SimulatedCluster(with_mode(configured(), "geo", **settings), schema, 5).train(slices(batches, schema, 5))
        for settings in ({}, {"k_steps": 10}, {"k_steps": 25})
    ]
    assert apart(found[0], found[1], batches) == 0.0
    assert apart(found[0], found[2], batches) > 0.0


def test_a_seed_decides_the_order_of_workers(batches: list[Any], schema: Any) -> None:
    config = with_mode(configured(), "async", pull_every=2)
    sources = [lambda: slices(batches[:20], schema, 3)] * 3
    runs = [
        SimulatedCluster(config, schema, 3, 2, seed).train(make())
        for seed, make in zip((1, 1, 2), sources, strict=True)
    ]
    assert apart(runs[0], runs[1], batches[:20]) == 0.0
    assert apart(runs[0], runs[2], batches[:20]) > 0.0


def test_staleness_grows_with_the_workers(batches: list[Any], schema: Any) -> None:
    found = {}
    for workers in (1, 4):
        fleet = SimulatedCluster(with_mode(configured(), "async"), schema, workers)
        fleet.train(slices(batches[:20], schema, workers))
        found[workers] = fleet.staleness
    assert found[1] < 2 < 3 < found[4]


@pytest.mark.parametrize("trainers", [2, 3])
@pytest.mark.parametrize("mode", ["half_async", "sync"])
def test_threads_of_a_worker_learn_the_sum_of_their_batches(
    mode: str, trainers: int, batches: list[Any], schema: Any
) -> None:
    """Trainers with a part of a batch each, in one worker, are one trainer with the whole."""
    config = configured("train.loss.shared_error=1")
    some, size = batches[:20], BATCH // trainers
    parts = [batch[i * size : (i + 1) * size] for batch in some for i in range(trainers)]
    fleet = SimulatedCluster(with_mode(config, mode), schema, 1, 2, trainers=trainers)
    found = fleet.train([Feed(parts, schema, size)])
    assert apart(local(config, schema, some), found, some) <= 1e-5


def test_workers_with_threads_do_not_wait_for_each_other_in_half_async(batches: list[Any], schema: Any) -> None:
    """Two workers with two trainers each, one of them with less data: all batches are learned, two at a time."""
    fleet = SimulatedCluster(with_mode(configured(), "half_async"), schema, 2, 2, trainers=2)
    metrics = Metrics()
    fleet.train([Feed(batches[:12], schema, BATCH), Feed(batches[12:17], schema, BATCH)], metrics)
    assert [shard.version for shard in fleet.shards] == [6 + 3] * 2
    assert metrics.results()["rows"] == 17 * BATCH
    assert [shard.batches for shard in fleet.shards] == [17] * 2


def test_geo_spreads_what_workers_learn(batches: list[Any], schema: Any) -> None:
    """With k of one step, the shards' rows move by the mean of what two equal workers learn, and dense weights by the sum."""
    plain = "train.loss.shared_error=1"
    config = configured(plain, "table.rule={name: sgd, lr: 0.1}", "dense.optimizer=sgd", "dense.lr=0.1")
    fleet = SimulatedCluster(with_mode(config, "geo", k_steps=1), schema, 2, 2)
    one = batches[:1]
    found = fleet.train([Feed(one, schema, BATCH), Feed(one, schema, BATCH)])
    start, expected = Learner(config, schema), local(config, schema, one)
    moved, wanted = found.flat.values - start.flat.values, expected.flat.values - start.flat.values
    # Equal workers ship half each; the second one to come trains from the first one's shipment only if it starts later.
    assert torch.allclose(moved, 2 * wanted, atol=2e-3)
    keys = np.unique(one[0].keys)
    assert np.abs(found.table.pull(keys) - expected.table.pull(keys)).max() < 2e-3


def test_geo_refuses_ftrl(batches: list[Any], schema: Any) -> None:
    config = with_mode(configured("table.rule={name: ftrl}"), "geo")
    with pytest.raises(ConfigError, match="ftrl"):
        SimulatedCluster(config, schema, 1).train([Feed(batches[:1], schema, BATCH)])


DISTRIBUTED = [name for name in names("modes") if modes.distributed(with_mode(configured(), name))]


@pytest.mark.parametrize("mode", DISTRIBUTED)
@pytest.mark.parametrize("rule", ["std_adagrad", "adagrad_v2", "shared_adam", "adam"])
def test_every_rule_learns_in_every_mode(mode: str, rule: str, batches: list[Any], schema: Any) -> None:
    config = with_mode(configured(f"table.rule={{name: {rule}}}"), mode)
    fleet = SimulatedCluster(config, schema, 2, 2)
    model = fleet.train(slices(batches[:10], schema, 2))
    assert np.isfinite(predict.evaluate(model, batches[:10])["logloss"])
    assert len(model.table) == len(np.unique(np.concatenate([batch.keys for batch in batches[:10]])))


@pytest.mark.parametrize("mode", DISTRIBUTED)
def test_a_mode_works_from_a_file_of_any_name(mode: str, batches: list[Any], schema: Any, tmp_path: Path) -> None:
    """A copy under another name learns the same, bit for bit: all that others know of a mode is what it declares."""
    copy = tmp_path / "mine.py"
    copy.write_text(Path(str(module("modes", mode).__file__)).read_text())
    found = [
        SimulatedCluster(with_mode(configured(), name), schema, 2, 2, seed=4).train(slices(batches[:10], schema, 2))
        for name in (mode, str(copy))
    ]
    assert apart(found[0], found[1], batches[:10]) == 0.0


def test_all_modes_reach_the_auc_of_one_machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With their defaults and, where workers take one step together, batches divided by their number."""
    folder, size, workers = tmp_path_factory.mktemp("auc"), 40, 2
    synth(folder, SynthOptions(rows=40_000, test_rows=10_000, parts=2, seed=3))
    batches = list(Reader(str(folder / "train" / "*"), batch_size=size))
    test = list(Reader(str(folder / "test" / "*"), batch_size=1000))
    config, schema = configured(f"data.batch_size={size}"), Reader(str(folder / "train" / "*")).schema
    alone = predict.evaluate(local(config, schema, batches), test)["auc"]
    parts = [[batch[i * size // 2 : (i + 1) * size // 2] for batch in batches] for i in range(workers)]
    whole = [batches[i::workers] for i in range(workers)]
    for mode, shares in (("sync", parts), ("geo", parts), ("half_async", whole), ("async", whole)):
        fleet = SimulatedCluster(with_mode(config, mode), schema, workers, 2)
        model = fleet.train([Feed(share, schema, len(share[0])) for share in shares])
        assert predict.evaluate(model, test)["auc"] > alone - 0.005, mode


@pytest.mark.parametrize("optimizer", ["dense.optimizer=sgd", "dense.optimizer=adam"])
def test_workers_with_own_dense_weights_move_as_far_as_one_machine(
    optimizer: str, batches: list[Any], schema: Any
) -> None:
    """In async and geo, each of N workers makes steps N times as long, and the shards take the mean of them."""
    config = configured(optimizer, "dense.lr=0.01", "train.loss.shared_error=1", "table.rule={name: sgd, lr: 0}")
    start = Learner(config, schema).flat.values
    wanted = local(config, schema, batches[:12]).flat.values - start
    for mode, settings in (("async", {"dense_every": 2}), ("geo", {"k_steps": 2})):
        fleet = SimulatedCluster(with_mode(config, mode, **settings), schema, 3, 2)
        found = fleet.train([Feed(batches[i:12:3], schema, BATCH) for i in range(3)]).flat.values - start
        along = float(found @ wanted / (wanted @ wanted))
        assert 0.6 < along < 1.4, mode


def test_the_dense_weights_of_one_async_worker_are_those_of_one_machine(batches: list[Any], schema: Any) -> None:
    """The exchange adds nothing and loses nothing, whenever it happens; the schedule has its clock from the shards."""
    schedule = "dense.schedule={name: step, every: 5, decay: 0.5}"
    config = configured("table.rule={name: sgd, lr: 0}", schedule, "train.loss.shared_error=1")
    expected = local(config, schema, batches[:20]).flat.values
    for every in (1, 3, 100):
        fleet = SimulatedCluster(with_mode(config, "async", dense_every=every), schema, 1, 2)
        found = fleet.train([Feed(batches[:20], schema, BATCH)]).flat.values
        assert torch.allclose(found, expected, atol=1e-6), every
        assert [shard.batches for shard in fleet.shards] == [20] * 2


@pytest.mark.parametrize(
    ("settings", "averages"),
    [
        ({}, True),
        ({"dense_every": 4}, True),
        ({"pull_every": 4}, False),
        ({"independent_recv": False}, False),
        ({"dense": "gradient"}, False),
    ],
)
def test_settings_of_gradients_choose_gradients(settings: dict[str, Any], averages: bool) -> None:
    assert modes.resolve(with_mode(configured(), "async", **settings)).averages is averages


@pytest.mark.parametrize(
    "settings",
    [
        {"dense": "average", "pull_every": 2},
        {"dense": "average", "independent_recv": True},
        {"dense": "gradient", "dense_every": 8},
        {"pull_every": 2, "dense_every": 8},
        {"dense": "gradient", "warm_up": 10},
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has no effect"):
        modes.resolve(with_mode(configured(), "async", **settings))


def test_stale_weights_damp_the_shared_error_by_default() -> None:
    def share(mode: str, *settings: str) -> float | None:
        return modes.with_shared_error(with_mode(configured(*settings), mode)).train.loss.shared_error

    assert [share(mode) for mode in ("sync", "half_async", "async", "geo")] == [1.0, 0.05, 0.05, 0.05]
    assert (share("local", "train.threads=2"), share("local", "train.threads=2", "train.hogwild=1")) == (0.2, 1.0)
    assert share("async", "train.loss.shared_error=0.5") == 0.5
    assert share("async", "model.name=deepfm", "model.paddlerec=true") is None  # the original's loss, as it is
    assert share("async", "train.loss.function=./mine.py") is None


def test_few_steps_of_many_workers_reach_the_auc_of_one_machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Stale weights cost most in the first steps: in async 0.017 of AUC here, without damping the shared error."""
    folder, size = tmp_path_factory.mktemp("few"), 400
    synth(folder, SynthOptions(rows=40_000, test_rows=10_000, parts=2, seed=3))
    batches = list(Reader(str(folder / "train" / "*"), batch_size=size))
    test = list(Reader(str(folder / "test" / "*"), batch_size=1000))
    schema = Reader(str(folder / "train" / "*")).schema
    config = configured("model.name=deepfm", "model.hidden=[64, 32]", f"data.batch_size={size}")
    found = {}
    for mode, workers in (("sync", 1), ("half_async", 4), ("async", 4), ("geo", 4)):
        fleet = SimulatedCluster(with_mode(config, mode), schema, workers, 2)
        model = fleet.train([Feed(batches[i::workers], schema, size) for i in range(workers)])
        found[mode] = predict.evaluate(model, test)["auc"]
    assert min(found.values()) > found["sync"] - 0.005, found


@pytest.fixture(scope="module")
def large(batches: list[Any]) -> list[Any]:
    """Batches large enough to be cut into halves."""
    return [concatenate(batches[i : i + 2]) for i in range(0, 34, 2)]


@pytest.mark.parametrize("mode", ["async", "geo"])
def test_the_first_batches_are_learned_in_parts(mode: str, large: list[Any], schema: Any) -> None:
    """Two workers cut their first six batches into halves. Rows and batches count once all the same."""
    fleet, metrics = SimulatedCluster(with_mode(configured(), mode, warm_up=6), schema, 2, 2), Metrics()
    model = fleet.train([Feed(large[:11], schema, 2 * BATCH), Feed(large[11:], schema, 2 * BATCH)], metrics)
    assert metrics.results()["rows"] == 34 * BATCH
    assert [shard.batches for shard in fleet.shards] == [17] * 2
    if mode == "async":  # each worker also sends its last average
        assert [shard.version for shard in fleet.shards] == [2 * 12 + 5 + 2] * 2
    with model.table.snapshot() as snapshot:
        assert sum(int(part["show"].sum()) for part in snapshot) == sum(len(batch.keys) for batch in large)


def test_parts_move_the_dense_weights_as_far_as_the_batch(large: list[Any], schema: Any) -> None:
    """One worker of two, sgd: halves of a batch make half a step each."""
    config = configured("dense.optimizer=sgd", "dense.lr=0.001", "table.rule={name: sgd, lr: 0}")
    moved = []
    for warm_up in (0, 1):
        fleet = SimulatedCluster(with_mode(config, "async", warm_up=warm_up), schema, 2)
        model = fleet.train([Feed(large[:1], schema, 2 * BATCH), Feed([], schema, 2 * BATCH)])
        moved.append(model.flat.values - Learner(config, schema).flat.values)
    assert torch.linalg.vector_norm(moved[1] - moved[0]) < 0.05 * torch.linalg.vector_norm(moved[0])


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [(240, 2, [120, 120]), (260, 8, [130, 130]), (340, 3, [114, 114, 112]), (199, 4, [199]), (0, 2, [0])],
)
def test_parts_are_the_batch(rows: int, parts: int, sizes: list[int], large: list[Any]) -> None:
    whole = concatenate(large[:2])[:rows]
    whole.row = 7
    found = cut(whole, parts)
    assert [len(part) for part in found] == sizes
    assert [part.counted for part in found] == [True] + [False] * (len(sizes) - 1)
    assert [part.parts for part in found] == [len(sizes)] * len(sizes)
    assert [part.row for part in found] == [7 + sum(sizes[:i]) for i in range(len(sizes))]
    assert np.array_equal(np.concatenate([part.keys for part in found]), whole.keys)


def test_a_stretch_does_not_end_within_a_batch(large: list[Any], schema: Any) -> None:
    """A checkpoint asked for after the first part waits for the others: a position lies between batches."""
    size = 2 * BATCH
    job = WorkerJob(Learner(configured(), schema), Feed(large[:9], schema, size), Metrics(), links=[], workers=2)
    job.warm_up, job.trained_before = 4, 3  # the workers are at their second batches
    asked, clock = False, Clock()
    job.stop_when = lambda: asked
    clock.start()
    lengths = []
    for part in job.batches(clock):
        lengths.append(len(part))
        asked = True
    assert lengths == [BATCH] * 2
    assert job.position()["skip"] == size
    asked = False
    assert [len(batch) for batch in job.batches(clock)] == [BATCH] * 4 + [size] * 6


def test_merging_adds_and_means() -> None:
    def push(key: int, g: float, n: float) -> Push:
        return Push(
            np.array([key], np.uint64),
            np.full((1, 2), g, np.float32),
            *np.ones((2, 1), np.float32),
            np.zeros(1, np.uint16),
            n,
        )

    total = merged([push(1, 2.0, 3), push(2, 1.0, 4), push(1, 4.0, 5)])
    assert total.keys.tolist() == [1, 2]
    assert total.grads.tolist() == [[6.0, 6.0], [1.0, 1.0]]
    assert (total.show.tolist(), total.n) == ([2.0, 1.0], 12.0)
    mean = merged([push(1, 2.0, 3), push(2, 1.0, 5)], mean=True)
    assert mean.grads.tolist() == [[1.0, 1.0], [0.5, 0.5]]  # over the pushes, not over those with the key
    assert (mean.show.tolist(), mean.n) == ([1.0, 1.0], 4.0)
    a, b = Gradient(np.array([2.0], np.float32), 2.0, 0.5), Gradient(np.array([4.0], np.float32), 6.0, 1 / 6)
    assert summed([a, b], clipped=False, mean=True)[:3] == (np.array([6.0]), 8.0, 1 / 8)
    clipped = summed([a._replace(scale=1.0), b._replace(scale=1.0)], clipped=True, mean=True)
    assert clipped.vector * clipped.scale == (2.0 * 2 + 4.0 * 6) / 8


def test_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGS_communicator_max_merge_var_num", "6")
    monkeypatch.setenv("FLAGS_communicator_send_queue_size", "7")
    monkeypatch.setenv("FLAGS_communicator_is_sgd_optimizer", "0")
    found = modes.resolve(with_mode(configured(), "async", queue_size=3))
    assert (found.merge, found.queue_size, found.reduce) == (6, 3, "mean")
    monkeypatch.setenv("FLAGS_communicator_nonsense", "1")
    with pytest.raises(ConfigError, match="FLAGS_communicator_nonsense"):
        from_environment({"merge"})


@pytest.mark.parametrize("mode", ["sync", "half_async"])
@pytest.mark.parametrize("key", ["merge", "queue_size"])
def test_modes_with_rounds_refuse_settings_of_the_queue(mode: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key mode\.{key}"):
        modes.resolve(with_mode(configured(), mode, **{key: 2}))


def test_flags_without_effect_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launch scripts export all of them: a run names those that change nothing, and starts."""
    for name in ("fake_rpc", "thread_pool_size", "max_merge_var_num"):
        monkeypatch.setenv(f"FLAGS_communicator_{name}", "1")
    for _ in range(2):
        modes.resolve(with_mode(configured(), "half_async"))
    line = "no effect in this mode: FLAGS_communicator_fake_rpc, FLAGS_communicator_max_merge_var_num, "
    assert capsys.readouterr().err.count(line + "FLAGS_communicator_thread_pool_size\n") == 1
