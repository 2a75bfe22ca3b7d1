"""Where rows and files live: the table, checkpoints, the published log, run folders. Never imports torch."""
