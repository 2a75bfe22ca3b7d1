"""What people made for PaddleRec -> ours: configurations, readers, saved tables.

    translated = translate(read("models/rank/dnn/config.yaml"))
    translated.config, translated.schema, translated.report

`original` reads the YAML as the old tools did, `translate` finds what each key means here and says so in a `Report`,
`importing` turns `.pdparams` files and table dumps into a checkpoint.
"""

from clickfleet.migrate.original import Original, is_paddlerec, read
from clickfleet.migrate.report import Report
from clickfleet.migrate.translate import Translated, translate
from clickfleet.migrate.written import write

__all__ = ["Original", "Report", "Translated", "is_paddlerec", "read", "translate", "write"]
