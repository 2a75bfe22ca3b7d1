"""GateNet on an MLP."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.training.layers import by_fan_in, logits, side_by_side
from clickfleet.training.network import NARROW, Inputs, Model, Shape, TableInit


class GateDNN(Model):
    """An MLP with gates on its slots and hidden layers (arXiv:2007.03519).

    e_j ← e_j·σ(g_j Σ_k e_jk); h ← ReLU(W h + b), h ← h ∘ tanh(G h + a); logit = v·h + c.
    a starts at 1, so that gates start open. The original has no a: after two of its gates little of the signal is left.
    """

    rows = TableInit(embedx="normal(0.01)")  # a row of zeros would keep its gate closed
    original_rows = TableInit(embedx="uniform(-1,1)")
    small = NARROW

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        embedding_gate: bool = True
        """Scale the vector of each slot."""
        hidden_gate: bool = True
        """Scale the values of each hidden layer."""
        paddlerec: bool = False
        """The original's initial values; rows start uniform in ±1; hidden gates have no offset a."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.gates = nn.Parameter(torch.ones(shape.slots)) if config.embedding_gate else None
        if self.gates is not None and config.paddlerec:
            nn.init.normal_(self.gates)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((shape.width, *config.hidden)))
        squares = config.hidden if config.hidden_gate else ()
        self.hidden_gates = nn.ParameterList(torch.empty(size, size) for size in squares)
        opened = () if config.paddlerec else squares
        self.open = nn.ParameterList(torch.ones(size) for size in opened)
        self.out = nn.Linear(config.hidden[-1], shape.outputs)
        for gate in self.hidden_gates:
            by_fan_in(1.0)(gate)
        for linear in (*self.layers, self.out):
            assert isinstance(linear, nn.Linear)
            if config.paddlerec:
                by_fan_in(1.0)(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Inputs) -> Tensor:
        e = x.factors
        if self.gates is not None and len(self.gates):
            e = e * torch.sigmoid(self.gates * e.sum(2)).unsqueeze(2)
        h = side_by_side(e, x.dense)
        for layer, linear in enumerate(self.layers):
            h = F.relu(linear(h))
            if len(self.hidden_gates):
                gate = h @ self.hidden_gates[layer]
                h = h * torch.tanh(gate + self.open[layer] if len(self.open) else gate)
        return logits(F.linear(h, self.out.weight, self.out.bias))
