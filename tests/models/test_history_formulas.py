"""Models that read histories, against loops over rows and events written from the papers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.errors import ConfigError
from clickfleet.models.bst import BST
from clickfleet.models.dien import DIEN, GRU
from clickfleet.models.din import DIN, START, Attention
from clickfleet.models.dmr import DMR
from clickfleet.models.sdim import SDIM
from clickfleet.store.onnx import Engine
from clickfleet.training.network import Events, HistoryShape, Inputs, Model, Shape
from clickfleet.training.onnx_graph import Graph

D, WIDTH = 3, 6
SHAPE = Shape(2, 4, D, D, histories=(HistoryShape("seen", (2, 0), 7), HistoryShape("bought", (1, 3), 5)))


def inputs() -> Inputs:
    """Five rows; rows 0 and 1 share a history, and one history is empty."""
    torch.manual_seed(4)
    histories = {}
    for name, length in (("seen", [4, 0, 2, 7]), ("bought", [1, 3, 5, 0])):
        events = torch.randn(4, max(length), 2, D)
        for u, n in enumerate(length):
            events[u, n:] = 0
        histories[name] = Events(events, torch.tensor(length), torch.tensor([0, 0, 1, 2, 3]))
    return Inputs(torch.rand(5, 2), torch.randn(5, 4), torch.randn(5, 4, D), histories)


def shuffled(model: Model) -> Model:
    """Give every weight a value that counts."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.5)
    return model


def mlp(layers: nn.Module, x: Tensor) -> Tensor:
    linear = [layer for layer in layers.modules() if isinstance(layer, nn.Linear)]
    for layer in linear[:-1]:
        x = torch.relu(layer.weight @ x + layer.bias)
    return (linear[-1].weight @ x + linear[-1].bias).squeeze()


def expected(model: Model, x: Inputs, interest: object) -> Tensor:
    """MLP([e, x, interests]) row by row; `interest(i, q, events)` is that of history i for one row."""
    outputs = []
    for b in range(5):
        parts = [x.factors[b].reshape(-1), x.dense[b]]
        for i, history in enumerate(SHAPE.histories):
            events = x.histories[history.name]
            u = int(events.row[b])  # type: ignore[index]
            q = torch.cat([x.factors[b, slot] for slot in history.slots])
            parts.append(interest(i, q, events.factors[u, : int(events.length[u])].reshape(-1, WIDTH)))  # type: ignore[operator]
        outputs.append(mlp(model.deep, torch.cat(parts)))  # type: ignore[arg-type]
    return torch.stack(outputs)


@pytest.mark.parametrize("weights", ["plain", "softmax"])
def test_din_weighs_events_by_an_mlp_of_both(weights: str) -> None:
    x, model = inputs(), shuffled(DIN(DIN.Config(attention=5, weights=weights, hidden=(8,)), SHAPE))  # type: ignore[arg-type]

    def interest(i: int, q: Tensor, events: Tensor) -> Tensor:
        net = model.attention[i]
        scores = []
        for h in events:
            z = net.of_candidate @ q + net.of_event @ h + net.of_product @ (q * h) + net.bias
            scores.append((net.out @ torch.where(z > 0, z, net.slope * z)).squeeze())
        if not scores:
            return torch.zeros(2 * WIDTH + 1)
        a = torch.stack(scores)
        a = a.softmax(0) if weights == "softmax" else a
        u = a @ events
        return torch.cat([u, a.sum().reshape(1), q * u])

    torch.testing.assert_close(model(x), expected(model, x, interest), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["plain", "softmax"])
def test_a_served_din_scores_one_history_like_several(weights: str) -> None:
    x, model = inputs(), shuffled(DIN(DIN.Config(attention=5, weights=weights, hidden=(8,)), SHAPE))  # type: ignore[arg-type]
    session = Engine().session(Graph(model, SHAPE).bytes(model.state_dict()))
    names = [item.name for item in session.get_inputs()]
    for history in (None, 0, 1, 3):  # all of them; then one that all rows share, among them empty ones
        histories = {}
        for name, events in x.histories.items():
            shared = events if history is None else Events(events.factors[history:][:1], events.length[history:][:1])
            rows = events.row if history is None else torch.zeros(5, dtype=torch.long)
            histories[name] = shared._replace(row=rows)
        given = x._replace(histories=histories)
        tensors = given.tensors()
        logit = session.run(["logit"], {name: tensors[name].numpy() for name in names})[0]
        with torch.inference_mode():
            torch.testing.assert_close(torch.from_numpy(logit), model.eval()(given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("slots", "units"), [(2, 36), (3, 8), (5, 3)])
def test_the_attention_of_din_compares_slots_at_first(slots: int, units: int) -> None:
    net = Attention([10] * slots, units, softmax=False)
    q, h = (torch.empty(500, slots, 10).uniform_(-START, START) for _ in range(2))
    for slot in range(slots):
        same = h.clone()
        same[:, slot] = q[:, slot]
        found, usual = (((q * event).flatten(1) @ net.of_product.t()).mean(0) for event in (same, h))
        rises = found - usual > 0.5
        assert rises.sum() >= units // slots
        assert rises.any()
        assert ((found - usual)[~rises].abs() < 0.2).all()  # a unit compares its own slots
    assert (net.bias <= 0).all()
    assert (net.bias > -1).all()


def test_the_gru_is_that_of_torch() -> None:
    own, theirs = GRU(4), nn.GRU(4, 4, batch_first=True)
    nn.init.zeros_(own.input.bias)
    update, reset, proposal = own.input.weight.chunk(3)
    with torch.no_grad():  # theirs: reset, kept = 1 − update, proposal
        theirs.weight_ih_l0.copy_(torch.cat([reset, -update, proposal]))
        update, reset, proposal = own.recurrent.chunk(3)
        theirs.weight_hh_l0.copy_(torch.cat([reset, -update, proposal]))
        theirs.bias_ih_l0.zero_()
        theirs.bias_hh_l0.zero_()
    x = torch.randn(3, 6, 4)
    torch.testing.assert_close(own(own.input(x)), theirs(x)[0])


def cell(net: nn.Module, h: Tensor, x: Tensor, a: Tensor | float) -> Tensor:
    update, reset, proposal = (net.input.weight @ x + net.input.bias).chunk(3)  # type: ignore[union-attr, operator]
    of_update, of_reset, of_proposal = (part @ h for part in net.recurrent.chunk(3))  # type: ignore[union-attr, operator]
    u = a * torch.sigmoid(update + of_update)
    return (1 - u) * h + u * torch.tanh(proposal + torch.sigmoid(reset + of_reset) * of_proposal)


def test_dien_lets_interests_evolve_towards_the_candidate() -> None:
    x, model = inputs(), shuffled(DIEN(DIEN.Config(hidden=(8,)), SHAPE))

    def interest(i: int, q: Tensor, events: Tensor) -> Tensor:
        h, states = torch.zeros(WIDTH), []
        for e in events:
            h = cell(model.extractors[i], h, e, 1.0)
            states.append(h)
        g = torch.zeros(WIDTH)
        if states:
            a = torch.stack([h @ model.similarities[i] @ q for h in states]).softmax(0)
            for h, weight in zip(states, a, strict=True):
                g = cell(model.evolutions[i], g, h, weight)
        return g

    torch.testing.assert_close(model(x), expected(model, x, interest), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), expected(model, x, interest), rtol=1e-4, atol=1e-4)
    assert model.extra_loss() is None


def test_dien_tells_the_next_event_from_that_of_another_history() -> None:
    shape = Shape(2, 4, D, D, histories=SHAPE.histories[:1])
    x, model = inputs(), shuffled(DIEN(DIEN.Config(auxiliary=0.7, hidden=(8,)), shape))
    model.train()(x)
    events, length = x.histories["seen"].flat, x.histories["seen"].length.tolist()
    positive, negative = [], []
    for u, n in enumerate(length):
        h = torch.zeros(WIDTH)
        for place in range(n - 1):
            h = cell(model.extractors[0], h, events[u, place], 1.0)
            positive.append(F.logsigmoid(h @ events[u, place + 1]))
            if place + 1 < length[u - 1]:
                negative.append(F.logsigmoid(-(h @ events[u - 1, place + 1])))
    loss = -torch.stack(positive).mean() - torch.stack(negative).mean()
    extra = model.extra_loss()
    assert extra is not None
    torch.testing.assert_close(extra, 0.7 * loss, rtol=1e-4, atol=1e-5)


def test_dien_is_the_same_in_plain_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    x, model = inputs(), shuffled(DIEN(DIEN.Config(hidden=(8,)), SHAPE)).train()

    def gradients() -> list[Tensor]:
        events = [each.factors.requires_grad_() for each in x.histories.values()]
        leaves = [x.factors.requires_grad_(), *events, *model.parameters()]
        out, extra = model(x), model.extra_loss()
        assert extra is not None
        return [out, extra, *torch.autograd.grad(out.square().sum() + extra, leaves)]

    native = gradients()
    monkeypatch.setattr("clickfleet.models.dien.runs_native", lambda x: False)  # as on other devices
    torch.testing.assert_close(native, gradients(), rtol=1e-4, atol=1e-4)


def test_dien_compares_events_with_the_candidate_at_first() -> None:
    shape = Shape(0, 3, 10, 10, histories=(HistoryShape("seen", (1, 2), 9),))
    model = DIEN(DIEN.Config(hidden=(100,)), shape)
    events = torch.empty(400, 9, 2, 10).uniform_(-START, START)
    factors = torch.empty(400, 3, 10).uniform_(-START, START)
    same = events.clone()
    same[:, 4, 1] = factors[:, 2]  # one event is equal to the candidate in its second slot

    def compared(given: Tensor) -> Tensor:
        histories = {"seen": Events(given, torch.full((400,), 9))}
        x = Inputs(torch.empty(400, 0), torch.empty(400, 3), factors, histories)
        g = model.interest(0, x.candidate(shape.histories[0]), x.events(shape.histories[0]))
        first = model.deep.layers[0]
        hidden = torch.relu(first(torch.cat([x.factors.flatten(1), g], 1)))  # type: ignore[operator]
        return hidden[:, ::2].mean(1) - hidden[:, 1::2].mean(1)

    with torch.no_grad():
        found, usual = compared(same), compared(events)
    assert found.mean() > usual.mean() + usual.std() / 2


@pytest.mark.parametrize("blocks", [1, 2])
def test_bst_attends_to_all_events_and_the_candidate(blocks: int) -> None:
    x, model = inputs(), shuffled(BST(BST.Config(blocks=blocks, heads=2, width=4, inner=5, hidden=(8,)), SHAPE))

    def normed(norm: nn.LayerNorm, s: Tensor) -> Tensor:
        centred = s - s.mean()
        return norm.weight * centred / (centred.square().mean() + norm.eps).sqrt() + norm.bias

    def after(block: nn.Module, s: Tensor, seen: list[Tensor]) -> Tensor:
        heads = []
        for head in (slice(0, 4), slice(4, 8)):
            query, keys = (block.query.weight @ s)[head], [(block.key.weight @ t)[head] for t in seen]  # type: ignore[union-attr, operator]
            weights = torch.stack([query @ key / 2 for key in keys]).softmax(0)  # √4
            heads.append(sum(w * (block.value.weight @ t)[head] for w, t in zip(weights, seen, strict=True)))  # type: ignore[union-attr, operator]
        s = normed(block.first, s + block.out(torch.cat(heads)))  # type: ignore[arg-type, operator]
        return normed(block.second, s + block.outer(F.leaky_relu(block.inner(s))))  # type: ignore[arg-type, operator]

    def interest(i: int, q: Tensor, events: Tensor) -> Tensor:
        net = model.transformers[i]
        past = [e + net.positions[len(events) - place] for place, e in enumerate(events)]
        q = q + net.positions[0]
        for block in net.blocks:
            q, past = after(block, q, [*past, q]), [after(block, s, past) for s in past]
        return q

    torch.testing.assert_close(model(x), expected(model, x, interest), rtol=1e-3, atol=1e-3)


def test_dmr_matches_user_and_candidate() -> None:
    x, model = inputs(), shuffled(DMR(DMR.Config(attention=5, position=2, hidden=(8,)), SHAPE))

    def user(net: nn.Module, events: Tensor) -> Tensor:
        pooled = torch.zeros(WIDTH)
        if len(events):
            c = [
                net.user_out(torch.tanh(net.user_position(net.positions[len(events) - 1 - i]) + net.user_event(e)))  # type: ignore[operator, index]
                for i, e in enumerate(events)
            ]
            pooled = torch.cat(c).softmax(0) @ events
        return F.prelu(net.user(pooled), net.slope)  # type: ignore[operator, arg-type]

    def interest(i: int, q: Tensor, events: Tensor) -> Tensor:
        net = model.matches[i]
        r = (user(net, events) @ net.target(q)).reshape(1)
        if not len(events):
            return torch.cat([torch.zeros(WIDTH), r, torch.zeros(1)])
        c = torch.cat(
            [
                net.item_out(
                    torch.tanh(
                        net.item_candidate(q)
                        + net.item_position(net.positions[len(events) - 1 - place])
                        + net.item_event(e)
                    )
                )
                for place, e in enumerate(events)
            ]
        )
        return torch.cat([c.softmax(0) @ events, r, c.sum().reshape(1)])

    torch.testing.assert_close(model(x), expected(model, x, interest), rtol=1e-4, atol=1e-4)
    model.train()(x)
    total = 0.0
    for i, history in enumerate(SHAPE.histories):
        events = x.histories[history.name]
        usable = [(u, n) for u, n in enumerate(events.length.tolist()) if n > 1]
        net = model.matches[i]
        targets = torch.stack([net.target(events.flat[u, n - 1]) for u, n in usable])
        scores = torch.stack([targets @ user(net, events.flat[u, : n - 1]) for u, n in usable])
        total = total + F.cross_entropy(scores, torch.arange(len(usable)))
    extra = model.extra_loss()
    assert extra is not None
    torch.testing.assert_close(extra, 0.1 * total, rtol=1e-4, atol=1e-5)


def test_sdim_sums_events_with_the_signature_of_the_candidate() -> None:
    x, model = inputs(), shuffled(SDIM(SDIM.Config(groups=5, bits=2, hidden=(8,)), SHAPE))
    found = 0

    def interest(i: int, q: Tensor, events: Tensor) -> Tensor:
        nonlocal found
        u = torch.zeros(WIDTH)
        for signs in model.hashed[i].projections.t().reshape(5, 2, WIDTH):
            same = [e for e in events if torch.equal(signs @ e > 0, signs @ q > 0)]
            found += len(same)
            if same:
                u += F.normalize(torch.stack(same).sum(0), dim=0) / 5
        return torch.cat([q * u, u])

    torch.testing.assert_close(model(x), expected(model, x, interest), rtol=1e-3, atol=1e-3)
    assert 0 < found < 5 * 30


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SDIM, {"bits": 0}),
        (SDIM, {"bits": 11}),
        (SDIM, {"groups": 0}),
        (DIEN, {"auxiliary": -1.0}),
        (DMR, {"position": 0}),
        (BST, {"heads": 0}),
    ],
)
def test_settings_without_a_meaning_are_refused(kind: type[Model], settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"model\."):
        kind(kind.Config(**settings), SHAPE)  # type: ignore[arg-type]
