"""The only interface to Ray: checks, time limits on every wait, and this package's errors.

All other files import ``ray`` through :func:`require_ray`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, Self

from torchrl_llm._checked import Ge, Gt, check, checked
from torchrl_llm._imports import require
from torchrl_llm.errors import ConfigError, ResourceError, WorkerError

CALL_TIMEOUT_S = 300.0
"""Default time limit in seconds of a call of an actor."""

START_TIMEOUT_S = 300.0
"""Default time limit in seconds of the creation of an actor."""

Lane = Literal["control", "change"]
# Threads. While an update and a sleep wait for requests, two threads stay free for the calls that
# end their wait.
_LANES: dict[Lane, int] = {"control": 2, "change": 4}


def require_ray(feature: str, *, running: bool = True) -> ModuleType:
    """Import Ray, or raise an error that explains how to install or start it.

    Args:
        feature: the feature that needs it; begins the error message.
        running: also require that ``ray.init`` was called.

    Raises:
        MissingExtraError: it is not installed.
        ResourceError: it is not running.
    """
    ray = require("ray", extra="ray", feature=feature)
    if running and not ray.is_initialized():
        raise ResourceError(
            f"{feature} needs a running Ray: call ray.init() first (ray.init(address='auto') joins "
            "the cluster of this machine)"
        )
    return ray


class RayService:
    """Base of classes with TorchRL's ``use_ray_service=True``, which creates a different class."""

    in_ray: ClassVar[str]
    """Path of the class that works in an actor; a subclass of this one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create an instance of the other class, if requested."""
        if kwargs.get("use_ray_service") or kwargs.get("service_backend") == "ray":
            module, _, name = cls.in_ray.rpartition(".")
            cls = getattr(import_module(module), name)
        return super().__new__(cls)


def check_service(options: Mapping[str, Any] | None) -> None:
    """Raise for TorchRL's service options, which are arguments here.

    Args:
        options: must be ``None`` or empty.

    Raises:
        ConfigError: options were given.
    """
    if options:
        raise ConfigError(
            "service_backend_options must be empty: pass num_cpus, num_gpus and actor_name by "
            f"their names, got {dict(options)}"
        )


def get(refs: Any, *, timeout_s: float, what: str) -> Any:
    """``ray.get`` with a time limit and this package's errors.

    Args:
        refs: one object reference or a list of them.
        timeout_s: most seconds to wait.
        what: name of the awaited operation; begins the error message.

    Raises:
        WorkerError: the actor died, is not reachable, or did not answer in time.
        Exception: the error that the actor's code raised.
    """
    ray = require_ray(what)
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise WorkerError(f"{what}: no answer within {timeout_s:g} s") from None
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, Exception) else error from None
    except ray.exceptions.RayError as error:
        raise WorkerError(f"{what}: {type(error).__name__}: {error}") from None


def check_resources(what: str, bundles: list[dict[str, float]], *, settle_s: float = 10.0) -> None:
    """Compare the required resources with those of the cluster, so that the start cannot hang.

    Args:
        what: name of the operation that needs them.
        bundles: resources of each actor, as ``{"CPU": 1, "GPU": 0.5}``.
        settle_s: seconds to wait for resources that are in use: resources of actors that just ended
            become free with a delay.

    Raises:
        ResourceError: there are too few; the error says how many are needed and how many are free.
    """
    ray = require_ray(what)
    needed: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            needed[name] = needed.get(name, 0.0) + amount
    deadline = time.monotonic() + settle_s
    while True:
        free, whole = ray.available_resources(), ray.cluster_resources()
        short = _short(needed, free)
        if not short or _short(needed, whole) or time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    if short:
        wanted = ", ".join(
            f"{needed[name]:g} {name} ({free.get(name, 0.0):g} of {whole.get(name, 0.0):g} free)"
            for name in short
        )
        raise ResourceError(
            f"{what} needs {wanted} for {len(bundles)} actors; start Ray with more, or ask for less"
        )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for bundle in bundles:
        if all(_short(bundle, node) for node in nodes):
            raise ResourceError(
                f"{what} needs {_spell(bundle)} on one machine for one of its actors; the largest "
                f"machines have {'; '.join(sorted({_spell(bundle, node) for node in nodes}))}"
            )


def _short(needed: Mapping[str, float], there: Mapping[str, float]) -> list[str]:
    return sorted(name for name, n in needed.items() if n > there.get(name, 0.0) + 1e-6)


def _spell(bundle: Mapping[str, float], amounts: Mapping[str, float] | None = None) -> str:
    amounts = bundle if amounts is None else amounts
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in sorted(bundle))


@checked
@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    """Resources and settings of one actor.

    Args:
        num_cpus: reserved CPUs; fractions are allowed.
        num_gpus: reserved GPUs; fractions are allowed.
        resources: further resources of the cluster by name.
        max_concurrency: calls that run at once, each in its own thread.
        name: name by which other processes find it; ``None`` for an unnamed actor.
        namespace: Ray namespace of the name; the namespace of this job if not given.
        env_vars: environment variables of its process, set before Python starts.
        start_timeout_s: most seconds of its creation.
        timeout_s: most seconds of a call, by default.

    Raises:
        ConfigError: an amount is negative, or a limit is not positive.
    """

    num_cpus: Annotated[float, Ge(0)] = 1.0
    num_gpus: Annotated[float, Ge(0)] = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    max_concurrency: Annotated[int, Ge(1)] = 1
    name: str | None = None
    namespace: str | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: Annotated[float, Gt(0)] = START_TIMEOUT_S
    timeout_s: Annotated[float, Gt(0)] = CALL_TIMEOUT_S

    def __post_init__(self) -> None:
        for name, amount in self.resources.items():
            check(f"the amount of {name}", amount, Annotated[float, Ge(0)])

    @property
    def bundle(self) -> dict[str, float]:
        """Its resources by Ray's names, without zeros."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: float(amount) for name, amount in wanted.items() if amount > 0}


class Host:
    """Code inside an actor: builds one object and calls its methods by name.

    A call, not the constructor, builds the object, so that the caller gets the object's own error
    instead of a report that the actor died.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._built: list[Any] = []

    def build(self, factory: Callable[[], Any]) -> bool:
        """Build the object if a named actor does not have it; returns whether it was built."""
        with self._lock:
            if self._built:
                return False
            self._built.append(factory())
            return True

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method; the name may contain dots, and an empty name calls the object itself."""
        return self._find(method)(*args, **kwargs)

    def read(self, attribute: str) -> Any:
        """Value of an attribute."""
        return self._find(attribute)

    def pid(self) -> int:
        """Process id; also serves as a heartbeat."""
        return os.getpid()

    def _find(self, path: str) -> Any:
        if not self._built:
            raise WorkerError("the actor's object is not built yet")
        return reduce(getattr, path.split(".") if path else [], self._built[0])


class RemoteObject:
    """An object in its own actor: methods are called by name, with a time limit.

    Picklable: the copies refer to the same actor, which lives until :meth:`shutdown`, until the
    process that created it ends, or until there are no more references.

    Args:
        factory: creates the object in the actor; everything that it refers to is sent there.
        options: resources and settings of the actor.
        what: description of the object; begins error messages.
        placement: Ray's options for the placement of the actor, such as ``{"scheduling_strategy":
            ...}``; its resources are then not compared with the free ones.

    Attributes:
        created: whether this call built the object; a named actor may have existed already.

    Raises:
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running, or has too few resources.
        WorkerError: the actor did not start in time.
        Exception: the error that the factory raised.
    """

    _ended = False

    def __init__(
        self,
        factory: Callable[[], Any],
        options: ActorOptions | None = None,
        *,
        what: str = "a remote object",
        placement: Mapping[str, Any] | None = None,
    ) -> None:
        ray = require_ray(what)
        options = ActorOptions() if options is None else options
        found = _named_actor(options.name, options.namespace)
        if found is None and placement is None:
            check_resources(what, [options.bundle])
        settings: dict[str, Any] = {
            "num_cpus": options.num_cpus,
            "num_gpus": options.num_gpus,
            "max_concurrency": options.max_concurrency,
            **(placement or {}),
        }
        if options.resources:
            settings["resources"] = dict(options.resources)
        if options.name is not None:
            settings.update(name=options.name, get_if_exists=True)
            if options.namespace is not None:
                settings["namespace"] = options.namespace
        if options.env_vars:
            settings["runtime_env"] = {"env_vars": dict(options.env_vars)}
        actor_class = ray.remote(concurrency_groups=_LANES)(Host)
        self.what, self.options = what, options
        self.handle = found or actor_class.options(**settings).remote()
        try:
            self.created: bool = get(
                self._method("build", lane="control").remote(factory),
                timeout_s=options.start_timeout_s,
                what=f"the start of {what}",
            )
        except BaseException:
            if found is None:
                self.shutdown()
            raise

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the object and wait for its result.

        Args:
            method: name of the method.
            args: its positional arguments.
            timeout_s: most seconds to wait; by default the limit of the options.
            kwargs: its keyword arguments.

        Raises:
            WorkerError: the actor died or did not answer in time.
            Exception: the error that the method raised.
        """
        self._check_running(method)
        return self.result(self.submit(method, *args, **kwargs), timeout_s=timeout_s, call=method)

    def submit(self, method: str, *args: Any, lane: Lane | None = None, **kwargs: Any) -> Any:
        """Start a call and return Ray's reference to its result.

        Args:
            method: name of the method.
            args: its positional arguments.
            lane: group of threads that is reserved for such calls, so that they do not queue behind
                ordinary calls: ``"control"`` for calls that return at once, ``"change"`` for calls
                that may have to wait for others (new weights, sleep).
            kwargs: its keyword arguments.
        """
        return self._method("call", lane=lane).remote(method, args, kwargs)

    def result(self, ref: Any, *, timeout_s: float | None = None, call: str = "a call") -> Any:
        """Wait for the result of a reference from :meth:`submit`; raises like :meth:`call`."""
        limit = self.options.timeout_s if timeout_s is None else timeout_s
        return get(ref, timeout_s=limit, what=f"{call} of {self.what}")

    def read(self, attribute: str, *, timeout_s: float | None = None) -> Any:
        """Value of an attribute of the object; raises like :meth:`call`."""
        self._check_running(attribute)
        ref = self._method("read", lane="control").remote(attribute)
        return self.result(ref, timeout_s=timeout_s, call=attribute)

    def pid(self, *, timeout_s: float = 10.0) -> int:
        """Process id of the actor, through a reserved thread.

        Raises:
            WorkerError: the actor died or did not answer in time.
        """
        ref = self._method("pid", lane="control").remote()
        return self.result(ref, timeout_s=timeout_s, call="a heartbeat")

    def shutdown(self) -> None:
        """End the actor at once; no effect if it has ended or Ray has stopped."""
        self._ended = True
        ray = require_ray(self.what, running=False)
        if ray.is_initialized():
            ray.kill(self.handle)

    def _check_running(self, call: str) -> None:
        # Ray kills the actor with a delay, and until then it still answers.
        if self._ended:
            raise WorkerError(f"{call} of {self.what}: it was shut down")

    def _method(self, name: str, *, lane: Lane | None) -> Any:
        method = getattr(self.handle, name)
        return method if lane is None else method.options(concurrency_group=lane)


def actor_exists(name: str | None) -> bool:
    """Whether an actor with this name is running; always false without a name."""
    return _named_actor(name) is not None


def _named_actor(name: str | None, namespace: str | None = None) -> Any:
    if name is None:
        return None
    ray = require_ray(f"the actor {name!r}")
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
