"""A PostgreSQL server of its own for a test: made, started and ended in a temporary folder.

The server refuses to run as root: then it runs as Debian's user for it, or as nobody.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

USERS = ("postgres", "nobody")


def find_program(name: str) -> Path | None:
    """A program of the server, which Debian keeps off ``PATH``."""
    found = shutil.which(name)
    if found:
        return Path(found)
    return next(iter(sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)), None)


def user_options() -> dict[str, Any]:
    """Options of a process that does not run as root."""
    if os.geteuid() != 0:
        return {}
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = next(known[name] for name in USERS if name in known)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server() -> Iterator[str]:
    """The URL of an empty database."""
    initdb, control = find_program("initdb"), find_program("pg_ctl")
    assert initdb and control, "whoever asks for a server has looked for its programs"
    options, port = user_options(), free_port()
    with tempfile.TemporaryDirectory(prefix="lynnc-postgres-") as folder:
        if options:
            os.chown(folder, options["user"], options["group"])
        data = Path(folder) / "data"

        def run(*command: object) -> None:
            words = [str(word) for word in command]
            subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL, **options)

        run(initdb, "-D", data, "-U", "tuner", "--auth=trust", "--no-sync", "--no-instructions")
        settings = f"-c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        run(control, "-D", data, "-w", "-o", f"-p {port} {settings}", "-l", Path(folder) / "log", "start")
        try:
            yield f"postgresql://tuner@127.0.0.1:{port}/postgres"
        finally:
            run(control, "-D", data, "-m", "immediate", "stop")
