"""One file per network. They are plug-ins and are found by name."""
