"""L0-SIGN."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clickfleet.errors import ConfigError
from clickfleet.training.layers import FieldVectors, by_fan_in, constant, factor_std, logits, truncated
from clickfleet.training.network import Inputs, Model, Shape, TableInit


class SIGN(Model):
    """Fields are the nodes of a graph, and a second network decides for each row of data which edges it has (arXiv:2008.00404).

    A row holds two vectors, v for the nodes and u for the edges. For i ≤ j: loc_ij = MLP_edge(u_i ∘ u_j), starting near 2;
    s_ij = clip(low + (high − low)·σ(loc_ij), 0, 1), in training with noise (hard concrete); z_ij = MLP_node(v_i ∘ v_j);
    logit = g·(1/n Σ_i Σ_j s_ij z_ij) + c over n fields, dense ones as x_i·A_i. The loss adds the mean number of edges.
    """

    rows = TableInit(embedx="normal(0.2)")
    original_rows = TableInit(embedx="normal(0.01)")
    original_epsilon = 0.0

    @dataclass(frozen=True)
    class Config(Model.Config):
        pair_hidden: int = 16
        """Width of the hidden layer of both networks."""
        temperature: float = 0.66
        """Divisor of the noisy loc during training. The smaller, the closer edges are to 0 or 1."""
        stretch: tuple[float, float] = (-0.1, 1.1)
        """low and high: the range of an edge before it is clipped to [0, 1]."""
        l0: float = 0.001
        """Weight of the expected fraction of edges in the loss."""
        l2: float = 0.0
        """Weight of the squared vectors of the nodes after their update in the loss."""
        paddlerec: bool = False
        """An edge carries its message to the later field only; a node takes the mean of its edges with s > 0. Logarithms of the
        noise to base 2. Dropout 0.5 in MLP_edge. Two outputs; the logit is their difference. L2 is the sum over the batch."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        d, original = shape.dim, config.paddlerec
        self.original, self.count, self.l0, self.l2 = original, shape.slots + shape.dense, config.l0, config.l2
        self.temperature, (self.low, self.high) = config.temperature, config.stretch
        if not (self.temperature > 0 and self.low < 0 and self.high > 1):
            raise ConfigError(
                "model.temperature must be positive, and model.stretch a range around [0, 1]",
                "for example temperature: 0.66, stretch: [-0.1, 1.1]",
            )
        self.fields = FieldVectors(shape.dense, shape.factors, truncated(factor_std(shape.dim)))
        left, right = torch.triu_indices(self.count, self.count)
        self.left: Tensor
        self.right: Tensor
        self.register_buffer("left", left, persistent=False)
        self.register_buffer("right", right, persistent=False)
        self.node_in, self.node_out = nn.Linear(d, config.pair_hidden), nn.Linear(config.pair_hidden, d)
        self.edge_in, self.edge_out = nn.Linear(d, config.pair_hidden), nn.Linear(config.pair_hidden, 1)
        self.out = nn.Linear(d, 2 if original else shape.outputs)
        for layer in (self.node_in, self.node_out, self.edge_in, self.edge_out):
            nn.init.kaiming_uniform_(layer.weight)
            constant(0.0)(layer.bias)
        constant(0.0)(self.out.bias)
        if original:
            nn.init.xavier_uniform_(self.out.weight)
            with torch.no_grad():
                self.edge_out.weight += 0.2
        else:
            by_fan_in(0.1)(self.out.weight)
            constant(2.0)(self.edge_out.bias)
        self.drop = nn.Dropout(0.5 if original else 0.0)
        self.samples = True
        self.penalty: Tensor | None = None

    @classmethod
    def row_factors(cls, config: object, dim: int, slots: int, dense: int) -> int:
        return 2 * dim

    def extra_loss(self) -> Tensor | None:
        penalty, self.penalty = self.penalty, None  # a tensor with a graph cannot be copied with the model
        return penalty

    def forward(self, x: Inputs) -> Tensor:
        v, u = self.fields(x.factors, x.dense).chunk(2, 2)  # [B, n, d] each
        if self.original:
            u = u + 0.2  # so that rows around zero are the original's around 0.2
        loc = self.edge_out(self.drop(torch.relu(self.edge_in(u[:, self.left] * u[:, self.right]))))  # [B, edges, 1]
        s = self._edges(loc)
        z = s * self.node_out(torch.relu(self.node_in(v[:, self.left] * v[:, self.right])))  # [B, edges, d]
        if self.original:
            receivers = torch.eye(self.count, dtype=z.dtype, device=z.device)[self.right].t()  # [n, edges]
            nodes = (receivers @ z) / (receivers @ (s > 0).to(z.dtype)).clamp(min=1.0)
            both = self.out(nodes.mean(1))
            logit: Tensor = both[:, 1] - both[:, 0]
        else:
            ends = torch.where(self.left == self.right, 1.0, 2.0).to(z.dtype)  # an edge reaches both of its nodes
            nodes = ends.unsqueeze(1) * z / self.count
            logit = logits(self.out(nodes.sum(1)))
        self.penalty = self._penalty(loc, nodes) if self.training else None
        return logit

    def _edges(self, loc: Tensor) -> Tensor:
        if self.training:
            noise = torch.rand_like(loc).clamp(1e-6, 1 - 1e-6)
            base = math.log(2.0) if self.original else 1.0
            s = torch.sigmoid((loc + (torch.log(noise) - torch.log1p(-noise)) / base) / self.temperature)
        else:
            s = torch.sigmoid(loc)
        return (s * (self.high - self.low) + self.low).clamp(0.0, 1.0)

    def _penalty(self, loc: Tensor, nodes: Tensor) -> Tensor:
        log = math.log2 if self.original else math.log
        penalty = torch.sigmoid(loc - self.temperature * log(-self.low / self.high)).mean() * self.l0
        if self.l2:
            squares = nodes.square().sum()
            penalty = penalty + self.l2 * (squares if self.original else squares / len(nodes))
        return penalty
