"""For readers that ask for `YamlHelper` here."""

from clickfleet.migrate.original import YamlHelper

__all__ = ["YamlHelper"]
