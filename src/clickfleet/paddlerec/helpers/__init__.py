"""Modules that readers import by bare names (`import common`). Their folder is the second argument of a `pipe_command`."""
