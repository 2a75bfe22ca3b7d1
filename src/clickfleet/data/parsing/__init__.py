"""The parsers that the formats share.

lines        text files -> blocks of whole lines
delimited    fields between separators (criteo, csv)
slotted      tokens that name their slot (slots, feasign, libffm)
weighted     features that may have a value (libsvm, vw)
user_format  a user's own `parse`
columns      Arrow columns (parquet, arrow, data in memory)
layout       the native layout of a schema, and the reasons for bad lines
"""
