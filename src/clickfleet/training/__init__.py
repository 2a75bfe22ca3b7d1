"""Training on one machine: network, learner, loop, modes, metrics, saving, export, report."""
