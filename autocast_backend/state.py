"""The autocast state: what `torch.autocast` has set, as an immutable value."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._torch.autocast import autocast_device_types, disable_autocast

AMBIENT_DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes autocast accepts; any other makes `torch.autocast` warn and switch itself off."""

AUTOCAST_ARGUMENTS = ("device_type", "dtype", "enabled", "cache_enabled")


@dataclass(frozen=True)
class DeviceAutocast:
    """Autocast for one device type: whether it is on, and its lower-precision dtype."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class AutocastState:
    """(device_type, enabled, dtype) for every device type, and whether weight casts are cached.

    Attributes:
        devices: one entry per device type autocast knows, in PyTorch's order.
        cache_enabled: what `torch.is_autocast_cache_enabled()` says: eager autocast reuses the cast
            of a float32 leaf that requires grad, until the outermost context exits.
    """

    devices: tuple[DeviceAutocast, ...]
    cache_enabled: bool = True

    @classmethod
    def current(cls) -> AutocastState:
        """The state in force on the calling thread."""
        devices = tuple(
            DeviceAutocast(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
            for d in autocast_device_types()
        )
        return cls(devices, torch.is_autocast_cache_enabled())

    @classmethod
    def off(cls) -> AutocastState:
        """The calling thread's state with every device type switched off."""
        now = cls.current()
        return replace(now, devices=tuple(replace(d, enabled=False) for d in now.devices))

    @classmethod
    def of(
        cls, ambient: AutocastState | Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> AutocastState:
        """The state inside `torch.autocast(**arguments)`, entered in order from a state of "off".

        Args:
            ambient: a state (returned as it is), the arguments of one `torch.autocast`, or a
                sequence of them; an empty sequence is "off".

        Raises:
            TypeError, ValueError: as `check_autocast_arguments`.
        """
        if isinstance(ambient, AutocastState):
            return ambient
        if isinstance(ambient, str) or not isinstance(ambient, (Mapping, Sequence)):
            raise TypeError(
                "ambient: expected an AutocastState, a dict of torch.autocast arguments, such as "
                '{"device_type": "cuda", "dtype": torch.bfloat16}, or a list of such dicts; '
                f"got {ambient!r}"
            )
        entries = [ambient] if isinstance(ambient, Mapping) else list(ambient)
        for arguments in entries:
            check_autocast_arguments("ambient", arguments)
        return cls.off().inside(entries)

    def enter(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> AutocastState:
        """The state inside `with torch.autocast(...)` of these arguments, entered from this one.

        `dtype=None` is the device type's dtype in force, which inside another region is that
        region's. As in PyTorch, a dtype autocast does not support leaves the region switched off.

        Raises:
            TypeError: `dtype` is neither None nor a `torch.dtype`.
            ValueError: a device type that autocast does not know.
        """
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"dtype: expected a torch.dtype such as torch.bfloat16, or None; got {dtype!r}"
            )
        dtype = dtype or self.device(device_type).dtype
        enabled = enabled and (device_type == "cuda" or dtype in AMBIENT_DTYPES)
        entered = self.set(device_type, enabled=enabled, dtype=dtype)
        return entered if cache_enabled is None else replace(entered, cache_enabled=cache_enabled)

    def exit(self, device_type: str, before: AutocastState) -> AutocastState:
        """The state after a region of `device_type` that was entered in the state `before`. Other
        device types stay as they are: something inside may have set them."""
        entry = before.device(device_type)
        now = self.set(device_type, enabled=entry.enabled, dtype=entry.dtype)
        return replace(now, cache_enabled=before.cache_enabled)

    def set(self, device_type: str, **changes: Any) -> AutocastState:
        """This state with `enabled` or `dtype` of one device type replaced."""
        new = replace(self.device(device_type), **changes)
        devices = tuple(new if d.device_type == device_type else d for d in self.devices)
        return replace(self, devices=devices)

    def inside(self, regions: Sequence[Mapping[str, Any]]) -> AutocastState:
        """The state inside several `torch.autocast(**arguments)`, entered in order."""
        state = self
        for arguments in regions:
            state = state.enter(**arguments)
        return state

    def device(self, device_type: str) -> DeviceAutocast:
        """The entry of one device type; `ValueError` for one that autocast does not know."""
        for d in self.devices:
            if d.device_type == device_type:
                return d
        known = ", ".join(d.device_type for d in self.devices)
        raise ValueError(f"device_type: expected one of {known}; got {device_type!r}")

    @property
    def enabled_devices(self) -> tuple[DeviceAutocast, ...]:
        """The device types that are switched on, in PyTorch's order."""
        return tuple(d for d in self.devices if d.enabled)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the calling thread into this state, then back.

        Sets the flags themselves: `torch.autocast("cuda")` switches itself off where there is no
        GPU, but fake CUDA tensors need it on. The weight cache stays off meanwhile, because it is
        process-wide and would keep tensors (fake ones among them) that nobody evicts.
        """
        with put_right_after_errors():
            before = AutocastState.current()
            try:
                self.restore()
                torch.set_autocast_cache_enabled(False)
                yield
            finally:
                before.restore()

    def restore(self) -> None:
        """Set the calling thread's flags to this state."""
        for d in self.devices:
            torch.set_autocast_enabled(d.device_type, d.enabled)
            torch.set_autocast_dtype(d.device_type, d.dtype)
        torch.set_autocast_cache_enabled(self.cache_enabled)

    def __str__(self) -> str:
        on = ", ".join(f"{d.device_type}: {str(d.dtype)[6:]}" for d in self.enabled_devices)
        return on or "off"


def check_autocast_arguments(where: str, arguments: Any) -> None:
    """Refuse what `torch.autocast(**arguments)` would not take, or would silently switch off.

    Raises:
        TypeError: `arguments` is not a mapping, or a value has the wrong type.
        ValueError: an unknown or missing key, an unknown device type, an unsupported dtype.
    """
    if not isinstance(arguments, Mapping):
        raise TypeError(
            f"{where}: expected a dict of torch.autocast arguments, such as "
            f'{{"device_type": "cuda", "dtype": torch.bfloat16}}; got {arguments!r}'
        )
    if unknown := [name for name in arguments if name not in AUTOCAST_ARGUMENTS]:
        raise ValueError(
            f"{where}: unknown torch.autocast argument {unknown[0]!r}; "
            f"expected some of {', '.join(AUTOCAST_ARGUMENTS)}"
        )
    if "device_type" not in arguments:
        raise ValueError(f'{where}: "device_type" is missing; add one, such as "cuda" or "cpu"')
    device_type, dtype = arguments["device_type"], arguments.get("dtype")
    if device_type not in autocast_device_types():
        raise ValueError(
            f"{where}: device_type: expected one of {', '.join(autocast_device_types())}; "
            f"got {device_type!r}"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{where}: dtype: expected a torch.dtype or None; got {dtype!r}")
    if dtype is not None and dtype not in AMBIENT_DTYPES:
        raise ValueError(
            f"{where}: dtype: expected torch.bfloat16 or torch.float16, which is what autocast "
            f"supports; got {dtype}"
        )
    for flag in ("enabled", "cache_enabled"):
        value = arguments.get(flag, True)
        if not isinstance(value, bool) and not (flag == "cache_enabled" and value is None):
            raise TypeError(f"{where}: {flag}: expected a bool; got {value!r}")


def contexts_entered() -> int:
    """How many autocast contexts the calling thread is in, one inside the other."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting


def put_right(state: AutocastState, entered: int) -> None:
    """Leave autocast as it was in `state` with `entered` contexts, as the `with` blocks of eager
    would. A graph that raises between `_enter_autocast` and `_exit_autocast` leaves its region
    entered: the region's state would hold for all that follows, and autocast would never again
    clear its weight cache, which it does when the outermost context exits."""
    state.restore()
    while contexts_entered() > entered:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


@contextlib.contextmanager
def outside_of_contexts() -> Iterator[None]:
    """Autocast as outside of all contexts: off, and with the dtypes of a thread that never entered
    one. Of a context around, `disable_autocast` leaves the dtype in force, and that is what PyTorch
    computes the gradients of `cond`, `map` and `scan` in."""
    before = AutocastState.current().devices
    try:
        for device_type, dtype in _dtypes_of_a_new_thread():
            torch.set_autocast_dtype(device_type, dtype)
        with disable_autocast():
            yield
    finally:
        for d in before:
            torch.set_autocast_dtype(d.device_type, d.dtype)


@functools.cache
def _dtypes_of_a_new_thread() -> tuple[tuple[str, torch.dtype], ...]:
    found: list[tuple[str, torch.dtype]] = []

    def read() -> None:
        found.extend((d, torch.get_autocast_dtype(d)) for d in autocast_device_types())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return tuple(found)


@contextlib.contextmanager
def put_right_after_errors() -> Iterator[None]:
    """Put autocast right when the body raises."""
    before, entered = AutocastState.current(), contexts_entered()
    try:
        yield
    except BaseException:
        put_right(before, entered)
        raise


@contextlib.contextmanager
def weight_cache_on() -> Iterator[None]:
    """Let calls find the casts of weights that calls before them made, as inside one context. (What
    they leave in the cache is freed when the outermost context exits.)"""
    before = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
