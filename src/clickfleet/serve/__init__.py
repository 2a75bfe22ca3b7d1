"""Serve a published entry or log over HTTP and gRPC. The only importer of the web framework and of gRPC; never imports torch.

supervisor             settings; starts, restarts and stops the processes below
server                 a worker process: HTTP and gRPC on one event loop
updater                the process that follows a published log
state_folder           the messages between these processes
http  grpc             the protocols; connection: limits of an HTTP connection; admin: routes that may be slow
json_api  open_inference  uploads   the messages of the routes; features: requests to keys and dense values
batching               admission of requests, and batches without timers
predictor              scores by one version of a model; overlays, redis_cache: its rows
context  auth  counters   what all routes share
client                 a client of all this
verification           checks files as a server does
"""
