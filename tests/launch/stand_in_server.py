"""A process with a local server's flags and manners, and nothing behind them: for the supervision's tests.

Serves a socket where every connection sends one line: `die` ends the process with code 3, `hang` makes it deaf to
SIGTERM and to its life line, `slow` lets it end a second after it was asked to, `env NAME` answers with that variable,
`start` starts a process and answers with its id.
Standard library only, so that it starts at once.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading


def watch_parent(deaf: threading.Event) -> None:
    while sys.stdin.buffer.read(1):
        pass
    if not deaf.is_set():
        os._exit(0)


def start() -> int:
    """A child that cares for nobody's end."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def bind(listener: socket.socket, port: int) -> None:
    """0: any below those that a system gives to whoever asks for one, so that nobody else gets it between a death and
    the next start."""
    while not port:
        with contextlib.suppress(OSError):
            return listener.bind(("127.0.0.1", random.randrange(15_000, 32_000)))
    listener.bind(("127.0.0.1", port))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--port_file", required=True)
    parser.add_argument("--exit_with_parent", action="store_true")
    parser.add_argument("--refuse", default="", help="print this and end with code 2")
    parser.add_argument("--never_serve", action="store_true")
    arguments = parser.parse_args()
    if arguments.refuse:
        print(f"error: {arguments.refuse}", flush=True)
        raise SystemExit(2)
    deaf = threading.Event()
    if arguments.exit_with_parent:
        threading.Thread(target=watch_parent, args=(deaf,), daemon=True).start()
    if arguments.never_serve:
        threading.Event().wait()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bind(listener, arguments.port)
    listener.listen()
    with open(arguments.port_file + ".tmp", "w", encoding="ascii") as file:
        file.write(str(listener.getsockname()[1]))
    os.replace(arguments.port_file + ".tmp", arguments.port_file)
    print("serving", flush=True)
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            words = stream.readline().split()
            if words[0] == "die":
                os._exit(3)
            if words[0] == "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                deaf.set()
            if words[0] == "slow":
                deaf.set()
                signal.signal(signal.SIGTERM, lambda *_: threading.Timer(1.0, os._exit, args=(0,)).start())
            answer = "ok"
            if words[0] == "env":
                answer = os.environ.get(words[1], "")
            elif words[0] == "start":
                answer = str(start())
            stream.write(answer + "\n")
            stream.flush()


main()
