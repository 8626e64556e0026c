"""Python programs that tests start, forked from one process that imported TensorFlow.

    programs.fork_from_now_on()
    subprocess.run([sys.executable, "script.py", "--flag"], env=..., cwd=...)

An import of TensorFlow takes about 2 CPU seconds, and the suite starts hundreds of
programs. pytest's process therefore starts one server: a fresh interpreter that imports
TensorFlow, runs nothing of it, and forks. `subprocess.Popen` asks it for every command of
the forms `python script.py`, `python -m module` and `python -c code`; any other command
is really started, and so is every command within `real_starts()`. Programs that a forked
program starts are forked too, by that program's own copy of the server; so are those of
xdist's processes, which pytest's own process lets the server fork.

A forked program is like a started one: it is a child of the process that asked for it
(the kernel gives orphans to the nearest "subreaper" above them), with its own
arguments, environment, folder, descriptors, session and process group, signal handlers,
`sys.path`, `__main__`, exit code and atexit callbacks. The differences: the command
line that `ps` shows, `sys.flags`, the seed of `hash()`, one more open descriptor,
modules that are loaded before they are imported, no graph.pbtxt beside a run's
checkpoints, no graph optimizer, and only fatal errors in TensorFlow's C++ log.

The fork server of `multiprocessing` makes none of this shorter. Its programs are its own
children: `Popen.wait` gets no exit code, a task does not die with its launcher, and no
CPU seconds are counted. They have the environment of the server's start, import the
`__main__` of the process that asks, and skip atexit callbacks.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import inspect
import operator
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings

# Imports of programs, but not the project's: it may change between two starts.
_PRELOADED = ("tensorflow", "tf_keras", "pandas", "tqdm")
_LAZY_OF_TENSORFLOW_2_15 = ("keras.layers", "compat.v1.estimator")  # later: Keras 3
# An interpreter or a library reads these variables once, when it starts. A program
# whose values differ from the server's is really started.
_READ_AT_START = ("PYTHON", "LD_", "TF_", "OMP_", "OPENBLAS_", "MALLOC_", "KERAS_")
_READ_LATER = ("PYTHONPATH", "TF_CONFIG", "TF_USE_LEGACY_KERAS", "TF_CPP_MIN_LOG_LEVEL")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_MESSAGE = 1 << 17  # bytes

_start_really = subprocess.Popen._execute_child
_socket_pair = functools.partial(
    socket.socketpair, socket.AF_UNIX, socket.SOCK_SEQPACKET
)
_parameters = inspect.signature(_start_really)
_environment_at_start = dict(os.environ)
_handlers_at_start = {number: signal.getsignal(number) for number in _SIGNALS}
_modules_at_start: set[str] | None = None  # None: not a forked program
_server: "_Server | None" = None
_is_forking = False
_forks_unbuffered = False
_is_optimizing = False


def fork_from_now_on(*, unbuffered: bool = False) -> None:
    """Lets `subprocess` fork the Python programs that this process starts.

    Args:
        unbuffered: Whether also those with -u, which must flush their output themselves,
            as xdist's processes do.
    """
    global _is_forking, _forks_unbuffered
    _is_forking, _forks_unbuffered = True, unbuffered
    subprocess.Popen._execute_child = _execute_child
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def real_starts():
    """Context in which programs start as a user starts them."""
    global _is_forking
    before, _is_forking = _is_forking, False
    try:
        yield
    finally:
        _is_forking = before


def server_pid() -> int | None:
    """Returns the process id of this process's server, if it has one yet."""
    return _server and _server.pid


## The process that asks


class _Server:
    """Forks programs that become children of this process; ends when this one ends."""

    def __init__(self, connection: socket.socket, pid: int):
        self.pid = pid
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def start(cls) -> "_Server":
        ours, theirs = _socket_pair()
        environment = dict(_environment_at_start, TF_CPP_MIN_LOG_LEVEL="3")
        for name in ("TF_USE_LEGACY_KERAS", "PYTHONPATH"):  # each program has its own
            environment.pop(name, None)
        with theirs, real_starts():
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd="/",
            )
        return cls(ours, process.pid)

    def fork(self, request: dict, descriptors: list[int]) -> int:
        """Forks a program; returns its process id."""
        with self._lock:
            socket.send_fds(self._connection, [pickle.dumps(request)], descriptors)
            answer = self._connection.recv(_LONGEST_MESSAGE)
        if not answer:
            raise RuntimeError("The server that forks programs has ended: see stderr.")
        return int(answer)

    def end(self) -> None:
        self._connection.close()
        os.waitpid(self.pid, 0)


def _execute_child(self, *args, **kwargs) -> None:
    """Replaces `subprocess.Popen._execute_child`."""
    global _server
    asked = _parameters.bind(self, *args, **kwargs).arguments
    if not (_is_forking and _can_fork(asked)):
        return _start_really(self, *args, **kwargs)
    request = {
        "arguments": _arguments(asked),
        "environment": dict(os.environ if asked["env"] is None else asked["env"]),
        "folder": os.path.abspath(os.fspath(asked["cwd"] or os.curdir)),
        "has_session": asked["start_new_session"],
        "group": asked.get("process_group", -1),
    }
    passed = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    descriptors = [
        descriptor if descriptor != -1 else at for at, descriptor in enumerate(passed)
    ]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if asked["preexec_fn"]:
            self.pid = _fork_with(asked["preexec_fn"], request, descriptors)
        else:
            _server = _server or _Server.start()
            self.pid = _server.fork(request, descriptors)
        self._child_created = True
    finally:
        self._close_pipe_fds(*(asked[name] for name in _PIPES))
    return None


def _can_fork(asked: dict) -> bool:
    """Returns whether a forked program would behave like a started one."""
    command, folder = asked["args"], asked["cwd"]
    if isinstance(command, (str, bytes, os.PathLike)) or len(command) < 2:
        return False
    if asked["shell"] or asked["pass_fds"] or asked["executable"]:
        return False
    first, *rest = _arguments(asked)
    if first.startswith("-") and not (first in ("-m", "-c") and rest):
        return False
    if asked["preexec_fn"] and not _is_still_as_forked():
        return False
    environment = os.environ if asked["env"] is None else asked["env"]
    return (
        command[0] == sys.executable
        and (folder is None or os.path.isdir(folder))
        and _read_at_start(environment) == _read_at_start(_environment_at_start)
    )


def _arguments(asked: dict) -> list[str]:
    """Returns a command's arguments, without -u if it is forked all the same."""
    arguments = [os.fspath(argument) for argument in asked["args"][1:]]
    is_left_out = _forks_unbuffered and arguments[0] == "-u" and arguments[1:]
    return arguments[1:] if is_left_out else arguments


def _read_at_start(environment) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name not in _READ_LATER
    }


def _is_still_as_forked() -> bool:
    """Returns whether this is a forked program that has started no threads."""
    return _modules_at_start is not None and len(os.listdir("/proc/self/task")) == 1


def _fork_with(prepare, request: dict, descriptors: list[int]) -> int:
    """Forks this process itself, because `prepare` is a function in its memory."""
    pid = os.fork()
    if pid == 0:
        atexit._clear()
        if _server:
            _server._connection.detach()  # its number will be reused
        for name in sys.modules.keys() - _modules_at_start:
            del sys.modules[name]
        _become(request, descriptors, prepare)
    return pid


## The process that forks


def _serve(connection: socket.socket) -> None:
    """Forks a program for each request until the process that asks has ended."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _put_in_place([os.open(os.devnull, os.O_RDWR)] * 3, keep=connection.fileno())
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, _LONGEST_MESSAGE, 3)
        if not message:
            os._exit(0)
        gate, own_gate = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)  # so the nearest subreaper adopts the program
            os.close(own_gate)
            os.read(gate, 1)  # waits until it has its final parent
            with connection:
                connection.send(str(os.getpid()).encode())
            _become(pickle.loads(message), descriptors)
        _, status = os.waitpid(between, 0)
        if status:  # the fork failed
            os._exit(1)
        for descriptor in (*descriptors, gate, own_gate):
            os.close(descriptor)


def _become(request: dict, descriptors: list[int], prepare=None):
    """Turns this process into the program; never returns."""
    code = 1
    try:
        _put_in_place(descriptors)
        _take_over(request)
        if prepare:
            prepare()
        code = _run(request["arguments"])
    except BaseException:  # noqa: BLE001, a fault of this module, shown only here
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _put_in_place(descriptors: list[int], keep: int = -1) -> None:
    """Makes the descriptors 0, 1 and 2, and closes all others."""
    copies = [os.dup(descriptor) for descriptor in descriptors]  # none is 0, 1 or 2
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            with contextlib.suppress(OSError):  # the descriptor of the listing
                os.close(int(name))


def _take_over(request: dict) -> None:
    """Sets up the state that a program has when it starts."""
    global _server, _environment_at_start, _modules_at_start
    if request["has_session"]:
        os.setsid()
    elif request["group"] not in (None, -1):
        os.setpgid(0, request["group"])
    ours, theirs = _socket_pair()
    copy = os.fork()
    if copy == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    _server = _Server(ours, copy)
    for number, handler in _handlers_at_start.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    _environment_at_start = dict(os.environ)
    _modules_at_start = set(sys.modules)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    random.seed()
    sys.modules["numpy"].random.seed()
    fork_from_now_on()


def _run(arguments: list[str]) -> int:
    """Runs the program as `python` does; returns the exit code."""
    code, is_interrupted = 0, False
    try:
        _run_main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, (int, type(None))):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001, what python does
        trace = _trace_of_program(error)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
    with contextlib.suppress(AttributeError):
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120  # Python's own code if stdout cannot be flushed
    _server.end()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def _run_main(arguments: list[str]) -> None:
    first, *rest = arguments
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    search = os.environ.get("PYTHONPATH", "")
    sys.path[1:1] = [os.path.abspath(path) for path in search.split(os.pathsep) if path]
    if first == "-m":
        sys.argv[:], sys.path[0] = ["-m", *rest[1:]], os.getcwd()
        runpy._run_module_as_main(rest[0])
        return
    if first == "-c":
        sys.argv[:], sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), vars(main))  # noqa: S102
        return
    sys.argv[:], sys.path[0] = arguments, os.path.dirname(os.path.realpath(first))
    main.__file__ = os.path.abspath(first)
    with open(first, "rb") as file:
        code = compile(file.read(), main.__file__, "exec")
    exec(code, vars(main))  # noqa: S102


def write_no_graph_files() -> None:
    """Disables graph.pbtxt, which takes a tenth to a quarter of a short training."""
    util = importlib.import_module("tensorflow.python.training.training_util")
    util.write_graph = lambda *args, **kwargs: None


def optimize_few_graphs() -> None:
    """Turns TensorFlow's graph optimizer off, but within `graph_optimizer()`.

    It takes long for small graphs.
    """
    session = importlib.import_module("tensorflow.python.client.session").BaseSession
    if session.__init__.__module__ != session.__module__:  # in a forked program
        return
    protos = importlib.import_module("tensorflow.core.protobuf.config_pb2")
    begin = session.__init__

    def begin_unoptimized(self, target="", graph=None, config=None):
        if not _is_optimizing:
            config = protos.ConfigProto.FromString(
                config.SerializeToString() if config else b""
            )
            config.graph_options.rewrite_options.disable_meta_optimizer = True
        begin(self, target, graph, config)

    session.__init__ = begin_unoptimized


def optimize_functions(is_on: bool) -> None:
    """Turns the optimizer of functions on or off, after which eager execution stays on."""
    config = importlib.import_module("tensorflow").config
    config.optimizer.set_experimental_options({"disable_meta_optimizer": not is_on})


@contextlib.contextmanager
def graph_optimizer():
    """Context in which TensorFlow optimizes the graphs of sessions and functions."""
    global _is_optimizing
    before, _is_optimizing = _is_optimizing, True
    optimize_functions(True)
    try:
        yield
    finally:
        _is_optimizing = before
        optimize_functions(before)


def _trace_of_program(error: BaseException):
    """Returns the traceback without the lines of this module."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next
    return trace


def _preload() -> None:
    search = list(sys.path)
    for name in _PRELOADED:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    sys.path[:] = search  # setuptools adds a folder of its own
    tensorflow = sys.modules["tensorflow"]
    if tensorflow.__version__.startswith("2.15."):
        for name in _LAZY_OF_TENSORFLOW_2_15:
            dir(operator.attrgetter(name)(tensorflow))
    write_no_graph_files()
    optimize_few_graphs()
    gc.freeze()  # what is imported is no garbage, and its pages stay shared


if __name__ == "__main__":
    sys.path[0] = ""
    warnings.filterwarnings("ignore", "This process .* is multi-threaded")
    _preload()
    # Under its own name too, so that forked programs find the module again.
    sys.modules["tests.helpers.processes.programs"] = sys.modules["__main__"]
    _serve(socket.socket(fileno=int(sys.argv[1])))
