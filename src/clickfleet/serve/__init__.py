"""Serving: a published entry or log -> scores over HTTP and gRPC. The only importer of the web framework and of gRPC; never of torch.

launch       starts the worker processes and the updater, watches them
worker       one process: HTTP and gRPC on one event loop
http  grpc   the protocols, thin; oip: the messages of the first; slow: the routes that may take their time
batching     requests -> batches without timers
predictor    a version of a model -> scores; no protocol in it
fields       the features of requests -> keys and dense values
layers       row files, mapped or in memory; merges
versions     what the updater tells the workers
follow       the updater: watches a published log (tail) and applies it (stack)
people  ranking  uploads   plain JSON, ranked lists, whole files
"""
