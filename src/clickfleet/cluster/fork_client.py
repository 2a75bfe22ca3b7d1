"""Ask a fork server for a process. The Ray of one machine runs this file instead of starting a worker process itself.

    python -I -S fork_client.py SOCKET SETUP ARGUMENTS…

The arguments are those that Ray gives to its script SETUP. If the server is gone, SETUP runs as usual. With the single argument `wait`,
the program waits until its standard input closes: it stands in for the agents of Ray that a private Ray does not need.

This file imports little, because an interpreter without `site` starts in a hundredth of a second.
"""

import json
import os
import socket
import sys


def main() -> None:
    path, *command = sys.argv[1:]
    if path == "wait":
        sys.stdin.buffer.read()
        return
    request = {"arguments": command[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            text = json.dumps(request).encode()
            socket.send_fds(connection, [len(text).to_bytes(4, "little")], [0, 1, 2])
            connection.sendall(text)
            if connection.recv(1):  # it has forked
                return
    except OSError:
        pass
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
