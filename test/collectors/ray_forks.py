"""Ray's workers as forks of a process that has imported everything, which saves each its seconds.

Ray starts this file in the place of Python; it hands over what it got and ends with the fork.
"""

import json
import os
import socket
import sys


def hand_over(path):
    """Have a worker forked with the arguments, variables and outputs of this process."""
    given = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(given).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(given)
        server.recv(1)  # nothing comes; the fork has the other end


def serve(path):
    """Fork a worker for each process that hands over, while that of the tests lives.

    It is to run in a fork of the fork server.
    """
    import multiprocessing
    import signal
    from multiprocessing import connection

    # As in any process of Ray: it may start processes of its own, and waits for them.
    multiprocessing.current_process()._config["daemon"] = False
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        tests = multiprocessing.parent_process().sentinel
        while tests not in connection.wait([listener, tests]):
            asked, _ = listener.accept()
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                return _become(asked)
            asked.close()


def _become(asked):
    """Be the worker that was asked for; returns when it has ended."""
    import runpy
    import time

    size, outputs, _, _ = socket.recv_fds(asked, 4, 3)
    given = asked.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    arguments, environ, folder = json.loads(given)
    for number, output in enumerate(outputs):
        os.dup2(output, number)
        os.close(output)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    del sys.modules["ray"]  # see ray_later
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    hand_over(sys.argv[1])
