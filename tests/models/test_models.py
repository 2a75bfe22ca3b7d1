"""What must be true of every model: it learns, its gradients are right, it saves, it exports."""

from __future__ import annotations

import copy
import importlib
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clickfleet.models
from clickfleet.data.schema import Label
from clickfleet.errors import ConfigError
from clickfleet.training.learner import build_model
from clickfleet.training.losses import Config as LossConfig
from clickfleet.training.losses import Loss, predictions
from clickfleet.training.metrics import Buckets
from clickfleet.training.network import Events, HistoryShape, Inputs, Model, Shape, TableInit
from clickfleet.training.onnx_graph import Graph, read_weights
from clickfleet.training.optimizer import Config as Dense
from clickfleet.training.optimizer import Flat, Optimizer

SLOTS, DENSE, DIM, VALUES = 5, 3, 4, 12
SMALL = {
    "hidden": (16, 8),
    "hidden1": (16, 8),
    "hidden2": (12, 8),
    "bottom": (16,),
    "top": (16,),
    "cin": (6, 4),
    "width": 8,
    "gate_hidden": 8,
    "expert": (8,),
}


CLICK, BUY = Label("click"), Label("buy", given="click")


def find(name: str) -> type[Model]:
    module = importlib.import_module(f"clickfleet.models.{name.partition('+')[0]}")
    (model,) = (
        m
        for _, m in inspect.getmembers(module, inspect.isclass)
        if issubclass(m, Model) and m.__module__ == module.__name__
    )
    return model


NAMES = sorted(p.stem for p in Path(clickfleet.models.__path__[0]).glob("*.py") if p.stem != "__init__")
VARIANTS = [
    pytest.param(name, paddlerec, id=f"{name}-paddlerec" if paddlerec else name)
    for name in NAMES
    for paddlerec in ([False, True] if "paddlerec" in find(name).Config.__dataclass_fields__ else [False])
] + [pytest.param("gate_dnn+wide", False, id="gate_dnn-wide")]
TASKED = [pytest.param(*variant.values, (), id=variant.id) for variant in VARIANTS] + [
    pytest.param(name, False, (CLICK, BUY, Label("dwell", loss="mse")), id=f"{name}-labels")
    for name in [*NAMES, "gate_dnn+wide"]
]
"""With the fewest labels for which a model is defined, and with three."""


def tasks_of(name: str) -> tuple[Label, ...]:
    return (CLICK, BUY)[: find(name).least_labels]


def build(
    name: str,
    paddlerec: bool = False,
    sizes: tuple[int, int] = (DENSE, SLOTS),
    tasks: tuple[Label, ...] = (),
    **options: Any,
) -> tuple[Model, Shape]:
    torch.manual_seed(7)
    name, _, wide = name.partition("+")
    cls, options = find(name), options | ({"wide": True} if wide else {})
    fields = cls.Config.__dataclass_fields__
    settings = {key: value for key, value in SMALL.items() if key in fields} | options
    config = cls.Config(**settings, **({"paddlerec": True} if paddlerec else {}))
    dense, slots = sizes
    factors = cls.row_factors(config, DIM, slots, dense)
    names = tuple(f"s{i}" for i in range(slots))
    bucketed = (slots - 1,) if slots and dense else ()
    histories = (HistoryShape("past", tuple(range(min(slots, 2))), 5),) if cls.reads_histories and slots else ()
    dense_names = tuple(f"d{i}" for i in range(dense))
    shape = Shape(dense, slots, DIM, factors, names, dense_names, bucketed, histories, tasks or tasks_of(name))
    return build_model(cls, config, shape), shape


def random_inputs(shape: Shape, rows: int = 6, dtype: torch.dtype = torch.float32, seed: int = 3) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    histories = {}
    for history in shape.histories:
        length = torch.randint(0, history.max + 1, (rows,), generator=g)  # a row may have no events
        longest = max(int(length.max()), 1)
        events = torch.randn(rows, longest, len(history.slots), shape.factors, generator=g, dtype=dtype)
        events[torch.arange(longest) >= length.unsqueeze(1)] = 0
        histories[history.name] = Events(events, length)
    return Inputs(
        torch.rand(rows, shape.dense, generator=g, dtype=dtype),
        torch.randn(rows, shape.slots, generator=g, dtype=dtype),
        torch.randn(rows, shape.slots, shape.factors, generator=g, dtype=dtype),
        histories,
    )


def numbers(x: Inputs) -> list[Tensor]:
    """The inputs that have gradients."""
    return [x.dense, x.first, x.factors, *(events.factors for events in x.histories.values())]


def refilled(x: Inputs, tensors: list[Tensor]) -> Inputs:
    """The inputs with other values of `numbers`."""
    histories = zip(x.histories.items(), tensors[3:], strict=True)
    return Inputs(*tensors[:3], {name: events._replace(factors=tensor) for (name, events), tensor in histories})


class Clicks(NamedTuple):
    values: Tensor  # [N, S] one value per slot
    dense: Tensor
    labels: Tensor


def planted_clicks(rows: int = 4000) -> Clicks:
    """One slot alone decides: even values of slot 2 are clicked nine times out of ten."""
    g = torch.Generator().manual_seed(11)
    values = torch.randint(VALUES, (rows, SLOTS), generator=g)
    chance = torch.where(values[:, 2] % 2 == 0, 0.95, 0.05)
    return Clicks(values, torch.rand(rows, DENSE, generator=g), (torch.rand(rows, generator=g) < chance).float())


class Rows(nn.Module):
    """A table in miniature: one row per value of each slot."""

    def __init__(self, factors: int, init: TableInit, histories: bool) -> None:
        super().__init__()
        self.histories = histories
        self.first = nn.Parameter(filled(torch.empty(SLOTS * VALUES), init.embed))
        self.factors = nn.Parameter(filled(torch.empty(SLOTS * VALUES, factors), init.embedx))

    def forward(self, clicks: Clicks) -> Inputs:
        where = clicks.values + torch.arange(SLOTS) * VALUES
        histories = {}
        if self.histories:  # the row itself, twice
            events = self.factors[where[:, :2]].unsqueeze(1).expand(-1, 2, -1, -1)
            histories = {"past": Events(events, torch.full((len(where),), 2))}
        return Inputs(clicks.dense, self.first[where], self.factors[where], histories)


def filled(tensor: Tensor, init: str) -> Tensor:
    kind, _, rest = init.rstrip(")").partition("(")
    numbers = [float(n) for n in rest.split(",") if n]
    match kind:
        case "zero":
            return tensor.zero_()
        case "uniform":
            return tensor.uniform_(*numbers)
        case "normal":
            return tensor.normal_(0.0, *numbers)
        case "truncated":
            (std,) = numbers
            if tensor.numel():
                nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std)
            return tensor
    raise AssertionError(init)


@pytest.mark.parametrize(("name", "paddlerec"), VARIANTS)
def test_finds_the_planted_signal(name: str, paddlerec: bool) -> None:
    model, shape = build(name, paddlerec)
    config = find(name).Config(**({"paddlerec": True} if paddlerec else {}))
    rows = Rows(shape.factors, model.table_init(config, DIM), bool(shape.histories))
    clicks = planted_clicks()
    tasks = tasks_of(name)
    loss = Loss(LossConfig(), model.loss_epsilon(config), tasks, model.entire_space)
    flat = Flat(model)
    optimizer = Optimizer(Dense("adam", lr=0.01), flat.values)
    rule = torch.optim.Adam(rows.parameters(), lr=0.01)
    model.train()
    for _ in range(6):
        for i in range(0, 3000, 100):
            batch = Clicks(*(t[i : i + 100] for t in clicks))
            rule.zero_grad()
            flat.zero_grads()
            logits = model(rows(batch))
            labels = batch.labels if len(tasks) == 1 else batch.labels.unsqueeze(1).expand(-1, len(tasks))
            loss.total(logits, labels, extra=model.extra_loss()).backward()
            optimizer.step(flat.grads, loss.dense_scale(batch.labels))
            for p in rows.parameters():
                if p.grad is not None:
                    p.grad /= len(batch.labels)
            rule.step()
    model.eval()
    test = Clicks(*(t[3000:] for t in clicks))
    buckets = Buckets()
    with torch.no_grad():
        buckets.update(torch.sigmoid(model(rows(test)).reshape(1000, -1)[:, 0]).numpy(), test.labels.numpy())
    assert buckets.auc > 0.9  # 0.95 is the best possible


@pytest.mark.parametrize(("name", "paddlerec", "tasks"), TASKED)
def test_gradients_are_those_of_numerical_differences(name: str, paddlerec: bool, tasks: tuple[Label, ...]) -> None:
    model, shape = build(name, paddlerec, tasks=tasks)
    model.double().train()
    x = random_inputs(shape, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in numbers(x)]
    params = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in params:
            p.add_(torch.randn_like(p), alpha=0.01)  # away from kinks, such as the largest of equal numbers

    def objective(*tensors: Tensor) -> Tensor:
        torch.manual_seed(1)  # the same dropout each time
        extra = None
        logits = model(refilled(x, list(tensors)))
        extra = model.extra_loss()
        return logits.sum() + logits.square().sum() / 3 + (0 if extra is None else extra)

    objective(*inputs).backward()
    for tensor in (*inputs, *params):
        if tensor.grad is None:
            continue  # a model need not use every input
        flat, grad = tensor.data.view(-1), tensor.grad.reshape(-1)
        for i in np.random.default_rng(0).choice(len(flat), min(4, len(flat)), replace=False):
            old, h = flat[i].item(), 1e-6
            flat[i] = old + h
            high = objective(*inputs).item()
            flat[i] = old - h
            low = objective(*inputs).item()
            flat[i] = old
            assert (high - low) / (2 * h) == pytest.approx(grad[i].item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("name", "paddlerec", "tasks"), TASKED)
def test_saved_and_loaded_it_scores_the_same(name: str, paddlerec: bool, tasks: tuple[Label, ...]) -> None:
    model, shape = build(name, paddlerec, tasks=tasks)
    model.eval()
    x = random_inputs(shape)
    scores = model(x)
    assert scores.shape == ((6, shape.outputs) if shape.outputs > 1 else (6,))
    other, _ = build(name, paddlerec, tasks=tasks)
    for p in other.parameters():
        nn.init.ones_(p)
    other.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    assert torch.equal(other.eval()(x), scores)


@pytest.mark.parametrize(("name", "paddlerec"), VARIANTS)
def test_missing_slots_are_zeros_and_have_finite_gradients(name: str, paddlerec: bool) -> None:
    model, shape = build(name, paddlerec)
    x = random_inputs(shape)
    x.first[:, 1], x.factors[:, 1] = 0, 0  # no key in one slot
    x.first[0], x.factors[0], x.dense[0] = 0, 0, 0  # nothing at all in one row
    for t in numbers(x):
        t.requires_grad_()
    model.train()
    logits = model(x)
    F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits)).backward()
    assert all(torch.isfinite(t.grad).all() for t in (*numbers(x), *model.parameters()) if t.grad is not None)


@pytest.mark.parametrize(("name", "paddlerec"), VARIANTS)
def test_computes_wherever_its_weights_are(name: str, paddlerec: bool) -> None:
    """On torch's device without memory, whose tensors refuse to meet those of the CPU."""
    model, shape = build(name, paddlerec)
    model.to("meta").train()
    x = random_inputs(shape)
    x = refilled(x, [tensor.to("meta").requires_grad_() for tensor in numbers(x)])
    x = x._replace(histories={name: each._replace(length=each.length.to("meta")) for name, each in x.histories.items()})
    logits = model(x)
    extra = model.extra_loss()
    (logits.sum() if extra is None else logits.sum() + extra).backward()
    assert logits.device.type == "meta"
    assert all(p.grad is None or p.grad.device.type == "meta" for p in (*numbers(x), *model.parameters()))


def test_a_first_order_part_is_added_where_there_is_none() -> None:
    plain, shape = build("dnn")
    wide, _ = build("dnn+wide")
    x = random_inputs(shape)
    assert torch.allclose(wide(x), plain(x) + x.first.sum(1))
    assert type(build("deepfm", wide=True)[0]) is find("deepfm")  # has one
    with pytest.raises(ConfigError, match=r"model\.wide"):
        build("deepfm", wide=False)


class NothingEmpty(TorchDispatchMode):
    """Refuses operators on empty tensors, of which ONNX Runtime leaves some undefined."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                assert tensor.numel(), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dense", "slots"), [(0, SLOTS), (0, 1), (DENSE, 0), (DENSE, 1)])
@pytest.mark.parametrize(("name", "paddlerec"), VARIANTS)
def test_leaves_out_what_the_schema_does_not_have(name: str, paddlerec: bool, dense: int, slots: int) -> None:
    if name == "dlrm" and not dense:
        with pytest.raises(ConfigError, match="dlrm needs dense columns"):
            build(name, paddlerec, sizes=(dense, slots))
        return
    if find(name).needs_history and not slots:
        return  # the events of a history are values of slots
    model, shape = build(name, paddlerec, sizes=(dense, slots))
    x = random_inputs(shape)
    for tensor in numbers(x):
        tensor.requires_grad_()
    logits = model.train()(x)
    extra = model.extra_loss()
    (logits.sum() if extra is None else logits.sum() + extra).backward()
    copy.deepcopy(model)  # as an export in the middle of training does
    assert logits.shape == ((6, shape.outputs) if shape.outputs > 1 else (6,))
    assert all(torch.isfinite(p.grad).all() for p in (*numbers(x), *model.parameters()) if p.grad is not None)
    with NothingEmpty():  # as the exporter sees it: no fused tower, which works in place
        logits = model.eval()(x)
    assert torch.isfinite(logits).all()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), logits)


@pytest.mark.parametrize(
    ("name", "paddlerec", "tasks"),
    [variant for variant in TASKED if not variant.values[2] or variant.values[0] in ("deepfm", "din")],
)
def test_exports_to_onnx_with_equal_scores_for_any_batch_and_any_weights(
    name: str, paddlerec: bool, tasks: tuple[Label, ...]
) -> None:
    import onnxruntime

    model, shape = build(name, paddlerec, tasks=tasks)
    graph = Graph(model, shape)  # with the first weights
    model.train()
    for seed in range(3):  # batch norm then has statistics of its own
        model(random_inputs(shape, 32, seed=seed))
    model.eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.01)
    file = graph.bytes(model.state_dict())
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == list(random_inputs(shape).tensors())
    for rows in (1, 7):
        x = random_inputs(shape, rows, seed=rows)
        score, logit = session.run(["score", "logit"], {key: t.numpy() for key, t in x.tensors().items()})
        expected = model(x).detach()
        np.testing.assert_allclose(logit, expected.numpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(score, predictions(expected, shape.tasks).numpy(), rtol=1e-5, atol=1e-6)
    saved = read_weights(file)
    for weight, tensor in model.state_dict().items():
        assert weight.endswith("num_batches_tracked") or torch.equal(saved[weight], tensor)


@pytest.mark.parametrize("name", [name for name in NAMES if find(name).reads_histories])
def test_rows_that_share_a_history_score_as_with_their_own(name: str) -> None:
    model, shape = build(name)
    model.eval()
    x = random_inputs(shape, 4)
    row = torch.tensor([0, 0, 0, 2])
    shared = {name: events._replace(row=row) for name, events in x.histories.items()}
    own = {name: Events(events.factors[row], events.length[row]) for name, events in x.histories.items()}
    torch.testing.assert_close(model(x._replace(histories=shared)), model(x._replace(histories=own)))


@pytest.mark.parametrize("name", [name for name in NAMES if find(name).reads_histories])
def test_padding_of_a_history_changes_nothing(name: str) -> None:
    model, shape = build(name)
    model.eval()
    x = random_inputs(shape, 4)
    padded = {
        name: events._replace(factors=F.pad(events.factors, (0, 0, 0, 0, 0, 3))) for name, events in x.histories.items()
    }
    torch.testing.assert_close(model(x._replace(histories=padded)), model(x))
