"""`YamlHelper`, for readers that import it from this module."""

from clickfleet.paddlerec.original import YamlHelper

__all__ = ["YamlHelper"]
