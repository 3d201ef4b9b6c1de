"""Where a plan's weights come from: a protocol, and arrays that are in GPU memory already.

In: a plan and a device. Out: ``PlacedWeights``, the address of each array. ``lynnc.runtime.loading.packedfolder`` reads
what ``lynnc pack`` wrote, ``lynnc.runtime.loading.generated`` makes weights on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from lynnc.errors import WeightError
from lynnc.plan import Plan, WeightArray, WeightEntry
from lynnc.runtime.device import Device

Progress = Callable[[int, int], None]
"""Called with the bytes that are loaded and all that will be."""

_TYPES: Mapping[str, tuple[str, ...]] = {
    "i64": ("<i8", "<u8"),
    "u8": ("|u1", "<u1"),
    "f16": ("<f2",),
    "bf16": ("<V2", "<u2", "<i2", "<f2"),
    "f32": ("<f4",),
}
"""What an array interface calls the dtypes of the plan; it has no name for BF16, so two bytes of any kind will do."""


@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """Addresses by (weight, array), and the bytes of GPU memory that were taken for them."""

    addresses: Mapping[tuple[str, str], int]
    resident_bytes: int


class WeightSource(Protocol):
    """Something that weights can be taken from."""

    def resident_bytes(self, plan: Plan) -> int:
        """GPU memory that ``place`` will take."""
        ...

    def place(self, plan: Plan, device: Device, progress: Progress | None) -> PlacedWeights:
        """Puts every array of the plan into GPU memory; WeightError if they are not the plan's."""
        ...


def arrays_of(plan: Plan) -> Iterator[tuple[WeightEntry, WeightArray]]:
    """Every array of the plan's weights."""
    for weight in plan.weights.values():
        for array in weight.arrays:
            yield weight, array


def packed_bytes(plan: Plan) -> int:
    """Bytes of all arrays, without any gap."""
    return sum(array.bytes for _, array in arrays_of(plan))


@dataclass(frozen=True, slots=True)
class BorrowedWeights:
    """Arrays by (weight, array) that live in GPU memory of their owner, such as torch's CUDA tensors: not copied.

    Anything with ``__cuda_array_interface__`` will do; BF16, for which that has no name, as two-byte integers.
    """

    arrays: Mapping[tuple[str, str], Any]

    def resident_bytes(self, plan: Plan) -> int:
        """Nothing is taken."""
        return 0

    def place(self, plan: Plan, device: Device, progress: Progress | None) -> PlacedWeights:
        """The arrays' own addresses; WeightError if one is missing or not of the plan's type, shape and layout."""
        found = {}
        for weight, array in arrays_of(plan):
            key = weight.name, array.array
            if key not in self.arrays:
                raise WeightError(f"The weights lack {weight.name}.{array.array}, which the plan needs: add it.")
            found[key] = _address(self.arrays[key], weight, array)
        return PlacedWeights(found, 0)


def _address(given: Any, weight: WeightEntry, array: WeightArray) -> int:
    name = f"{weight.name}.{array.array}"
    try:
        interface = given.__cuda_array_interface__
    except AttributeError:
        raise WeightError(f"{name} is no array in GPU memory: move it there.") from None
    is_dense = interface.get("strides") is None
    wanted = f"dense, {array.dtype} and {list(array.shape)}"
    shape = tuple(interface["shape"])
    if not is_dense or prod(shape) != prod(array.shape) or interface["typestr"] not in _TYPES[array.dtype]:
        raise WeightError(f"{name} is {interface['typestr']} {list(shape)}: the plan needs it {wanted}.")
    address = int(interface["data"][0])
    if address % 16:
        raise WeightError(f"{name} lies at an address that is no multiple of 16 bytes: copy it to a tensor of its own.")
    return address
