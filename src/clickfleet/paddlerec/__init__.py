"""Compatibility with PaddleRec and Fleet: configurations, readers, saved tables, roles, done files.

    translated = translation.translate(original.read("models/rank/dnn/config.yaml"))
    translated.config, translated.schema, translated.report

`original` reads the YAML as PaddleRec's tools do. `translation` maps each key and explains it in a `Report`.
`importing` turns `.pdparams` files and table dumps into a checkpoint. The other packages find `extension` by name.
"""
