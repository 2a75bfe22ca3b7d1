"""Raw logs -> batches.

schema       the columns of a dataset: label, dense columns, slots, and the rule for keys
files        paths, folders and URLs -> files; their decompressed bytes
formats/     one plug-in per file format
parsing/     the parsers that the formats share
block_queue  reads and parses the blocks of files in parallel, in a fixed order
reader       files -> batches, shuffled if asked for; can resume at any batch
memory       arrays, frames and rows in memory -> batches
feed_files   rows in memory -> files, for the processes of a cluster
dataset      opens the data that a configuration names
batch        the Batch: labels, dense values and keys of some rows
bad_lines    what to do with lines that do not fit
arrow_ipc    validated Arrow IPC files and streams
progress     progress bars
logs/        tools for logs: synth, fetch, prepare, stats, convert
"""
