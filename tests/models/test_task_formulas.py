"""Models of several labels, against plain torch written from the papers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clickfleet.data.schema import Label
from clickfleet.errors import ConfigError
from clickfleet.models.aitm import AITM
from clickfleet.models.esmm import ESMM
from clickfleet.models.mmoe import MMoE
from clickfleet.models.ple import PLE
from clickfleet.models.share_bottom import ShareBottom
from clickfleet.training.losses import Config as LossConfig
from clickfleet.training.losses import Loss
from clickfleet.training.network import Inputs, Model, Shape

TASKS = (Label("click"), Label("buy", given="click"), Label("dwell", loss="mse"))
SHAPE = Shape(2, 3, 4, 4, tasks=TASKS)


def inputs(rows: int = 5) -> Inputs:
    torch.manual_seed(9)
    return Inputs(torch.rand(rows, 2), torch.randn(rows, 3), torch.randn(rows, 3, 4))


def shuffled(model: Model) -> Model:
    """Give every weight a value that counts."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.5)
    return model


def mlp(layers: nn.Module, x: Tensor, relu_last: bool = False) -> Tensor:
    linear = [layer for layer in layers.modules() if isinstance(layer, nn.Linear)]
    for i, layer in enumerate(linear):
        x = x @ layer.weight.t() + layer.bias
        x = torch.relu(x) if relu_last or i < len(linear) - 1 else x
    return x


def flat(x: Inputs) -> Tensor:
    return torch.cat([x.factors.flatten(1), x.dense], 1)


def close(model: Model, x: Inputs, outputs: list[Tensor]) -> None:
    torch.testing.assert_close(model(x), torch.stack([out.squeeze(1) for out in outputs], 1), rtol=1e-4, atol=1e-4)


def test_share_bottom() -> None:
    x, model = inputs(), shuffled(ShareBottom(ShareBottom.Config(bottom=(6, 5), hidden=(3,)), SHAPE))
    h = mlp(model.bottom, flat(x), relu_last=True)
    close(model, x, [mlp(tower, h) for tower in model.towers])


def test_mmoe_mixes_the_experts_for_each_label() -> None:
    x, model = inputs(), shuffled(MMoE(MMoE.Config(experts=4, expert=(6, 5), hidden=(3,)), SHAPE))
    experts = [mlp(expert, flat(x), relu_last=True) for expert in model.experts]
    outputs = []
    for t, tower in enumerate(model.towers):
        gate = (flat(x) @ model.gates.weight[4 * t : 4 * t + 4].t() + model.gates.bias[4 * t : 4 * t + 4]).softmax(1)
        outputs.append(mlp(tower, sum(gate[:, k : k + 1] * expert for k, expert in enumerate(experts))))  # type: ignore[arg-type]
    close(model, x, outputs)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_ple_mixes_own_and_shared_experts_level_by_level(levels: int) -> None:
    settings = PLE.Config(levels=levels, shared=2, own=3, expert=(6, 5), hidden=(3,))
    x, model = inputs(), shuffled(PLE(settings, SHAPE))
    own, shared = [flat(x)] * 3, flat(x)
    for n, level in enumerate(model.levels):
        results = [[mlp(e, part, True) for e in experts] for experts, part in zip(level.own, own, strict=True)]
        common = [mlp(e, shared, True) for e in level.shared]

        def mixed(gate: nn.Module, part: Tensor, experts: list[Tensor]) -> Tensor:
            weights = gate(part).softmax(1)
            return sum(weights[:, k : k + 1] * expert for k, expert in enumerate(experts))  # type: ignore[return-value]

        own = [mixed(level.gates[t], own[t], [*results[t], *common]) for t in range(3)]
        if n < levels - 1:
            shared = mixed(level.gates[3], shared, [e for each in results for e in each] + common)
        else:
            assert len(level.gates) == 3  # nothing reads a shared part behind the last level
    close(model, x, [mlp(tower, part) for tower, part in zip(model.towers, own, strict=True)])


def test_esmm_learns_the_product_over_all_rows() -> None:
    x, model = inputs(), shuffled(ESMM(ESMM.Config(hidden=(6,)), Shape(2, 3, 4, 4, tasks=TASKS[:2])))
    outputs = [mlp(tower, flat(x)) for tower in model.towers]
    close(model, x, outputs)
    click, buy = (torch.sigmoid(out.squeeze(1)) for out in outputs)
    labels = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, torch.nan], [0.0, 0.0], [1.0, torch.nan]])
    clicked, bought = torch.tensor([1.0, 1, 0, 0, 1]), torch.tensor([1.0, 0, 0, 0])  # of the last row, buy is unknown
    both = (click * buy)[:4]
    loss = -(clicked * click.log() + (1 - clicked) * (1 - click).log()).sum()
    loss = loss - (bought * both.log() + (1 - bought) * (1 - both).log()).sum()
    computed = Loss(LossConfig(), 0.0, TASKS[:2], model.entire_space).total(model(x), labels)
    torch.testing.assert_close(computed, loss, rtol=1e-4, atol=1e-4)
    loss = loss - 0.7 * (buy[0].log() + (1 - buy[1]).log())  # the two rows with a click and a known purchase
    weight = ESMM.conditional(ESMM.Config(conditional=0.7))
    computed = Loss(LossConfig(), 0.0, TASKS[:2], model.entire_space, weight).total(model(x), labels)
    torch.testing.assert_close(computed, loss, rtol=1e-4, atol=1e-4)


def test_esmm_needs_a_label_behind_another() -> None:
    with pytest.raises(ConfigError, match="only after another"):
        ESMM(ESMM.Config(), Shape(2, 3, 4, 4, tasks=(Label("click"), Label("buy"))))
    with pytest.raises(ConfigError, match="must not be negative"):
        ESMM(ESMM.Config(conditional=-1.0), SHAPE)


def test_aitm_passes_on_from_label_to_label() -> None:
    x, model = inputs(), shuffled(AITM(AITM.Config(hidden=(6, 4)), SHAPE))
    outputs: list[Tensor] = []
    z = torch.empty(0)
    for t in range(3):
        q = mlp(model.towers[t], flat(x), relu_last=True)
        if t:
            net = model.transfers[t - 1]
            parts = [torch.relu(net.passed(z)), q]
            weights = torch.stack([(net.key(u) * net.query(u)).sum(1) / 2 for u in parts], 1).softmax(1)  # √4
            q = sum(weights[:, i : i + 1] * net.value(u) for i, u in enumerate(parts))  # type: ignore[assignment]
        z = q
        outputs.append(model.heads[t](z))
    close(model, x, outputs)
    model.train()(x)
    assert model.extra_loss() is None  # buy comes after click by its definition, and dwell is a number


def test_aitm_punishes_a_later_label_that_is_likelier() -> None:
    tasks = (Label("click"), Label("cart"), Label("buy", given="cart"), Label("share"))
    x, model = inputs(40), shuffled(AITM(AITM.Config(hidden=(6, 4), order=0.7), Shape(2, 3, 4, 4, tasks=tasks)))
    click, cart, buy, share = torch.sigmoid(model.train()(x)).unbind(1)
    extra = model.extra_loss()
    assert extra is not None
    torch.testing.assert_close(extra, 0.7 * ((cart - click).clamp_min(0) + (share - buy).clamp_min(0)).mean())
    assert extra > 0
    model.eval()(x)
    assert model.extra_loss() is None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (ShareBottom, {"bottom": ()}),
        (MMoE, {"experts": 0}),
        (MMoE, {"expert": ()}),
        (PLE, {"levels": 0}),
        (AITM, {"order": -1.0}),
        (AITM, {"hidden": ()}),
    ],
)
def test_settings_without_a_meaning_are_refused(kind: type[Model], settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"model\.|needs at least one"):
        kind(kind.Config(**settings), SHAPE)  # type: ignore[arg-type]
