"""A machine as rates: how fast it computes, moves bytes and updates. Pure data, for virtual time."""

import dataclasses
import difflib
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.units import GIB

_NS = 1_000_000_000
_NARROW = ("float16", "bfloat16")
_ATTENTION_SHARE = 0.5
"""What attention reaches of the rate of matrix products, where nobody has measured it; see ``docs/plan.md``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """One device, its share of a host, and its links to others like it.

    Where several devices share a host, memory, bandwidth and cores of the host are the part of one of them.

    Rates are those that programs reach, not those of data sheets; see ``peak`` for how the known machines were made.

    Attributes:
        name: What it is called.
        flops: Floating-point operations per second of matrix products, by type: ``"float32"``, ``"bfloat16"``,
            ``"float16"``. A 16-bit type that is missing is as fast as the other one, any other as ``"float32"``. Kinds
            of products may have rates of their own, as in ``"bfloat16 NT"``; see ``kernel_ns``.
        device_nbytes: Memory of the device.
        device_bandwidth: Bytes per second that kernels read and write.
        to_device_bandwidth: Bytes per second from pinned host memory to the device.
        to_host_bandwidth: Bytes per second from the device to pinned host memory.
        pageable_bandwidth: Bytes per second between the device and host memory that is not pinned.
        duplex_share: Part of the bandwidth of each direction that copies in both at once reach.
        memory_bandwidth: Bytes per second of host memory that all cores and devices reach together; 0 if it is not more
            than ``host_bandwidth``.
        copy_latency_s: Seconds that every copy between host and device takes beside its bytes.
        host_nbytes: Memory of the host, for this device.
        host_bandwidth: Bytes per second that this device's share of the cores reads and writes in host memory while it
            runs Adam there.
        host_flops: Floating-point operations per second of this share of the cores.
        num_cores: Cores of the host, for this device.
        core_bandwidth: Bytes per second that one core reads and writes while it runs Adam on the host; see
            ``with_cores``. The default is what each of 16 virtual cores beside an H200 reached while all of them were
            busy (3.57 G parameters of 28 bytes per second). It is half of what a whole core reaches.
        operator_s: Seconds of the host for one operator: Python, dispatch and launch.
        kernel_s: Seconds that the shortest kernel takes.
        visit_s: Seconds of the host for the engine's own work where a module uses a chunk.
        disk_nbytes: What optimizer states may take on a drive; 0 for none.
        disk_bandwidth: Bytes per second of a drive that reads and writes at once, both counted, past the page cache.
        num_devices: Devices like this one that train together.
        link_bandwidth: Bytes per second that one device sends to others; 0 if there is only one.
        link_latency_s: Seconds that a collective takes beside its bytes.
        message_s: Seconds that the host waits until all processes have told each other a few numbers.
        has_accelerator: Whether the device is one of its own; else it is a part of the host's memory, and the engine
            decides as it does on the CPU tier.
    """

    name: str
    flops: Mapping[str, float]
    device_nbytes: int
    device_bandwidth: float
    to_device_bandwidth: float
    to_host_bandwidth: float
    pageable_bandwidth: float
    host_nbytes: int
    host_bandwidth: float
    host_flops: float
    num_cores: int
    core_bandwidth: float = 6.25e9
    duplex_share: float = 0.9
    memory_bandwidth: float = 0.0
    copy_latency_s: float = 10e-6
    operator_s: float = 6e-6
    kernel_s: float = 2e-6
    visit_s: float = 25e-6
    disk_nbytes: int = 0
    disk_bandwidth: float = 6e9
    num_devices: int = 1
    link_bandwidth: float = 0.0
    link_latency_s: float = 20e-6
    message_s: float = 200e-6
    has_accelerator: bool = True

    def __post_init__(self) -> None:
        """Checks every number.

        Raises:
            ConfigError: If a rate or size is not a positive, finite number, or a field is of another type.
        """
        if not isinstance(self.name, str):
            raise ConfigError(f"machine: name is {self.name!r}; it must be text")
        if not isinstance(self.flops, Mapping):
            raise ConfigError(f"machine '{self.name}': flops is {self.flops!r}; it must be rates by type")
        if not isinstance(self.has_accelerator, bool):
            found = self.has_accelerator
            raise ConfigError(f"machine '{self.name}': has_accelerator is {found!r}; it must be true or false")
        if "float32" not in self.flops:
            raise ConfigError(f"machine '{self.name}': flops has no 'float32', which other types fall back to; add it")
        numbers = {f"flops[{key!r}]": rate for key, rate in self.flops.items()}
        for field in dataclasses.fields(self):
            if field.name not in ("name", "flops", "has_accelerator"):
                numbers[field.name] = getattr(self, field.name)
        if self.num_devices == 1 and self.link_bandwidth == 0:
            del numbers["link_bandwidth"]
        for name in ("memory_bandwidth", "disk_nbytes"):
            if numbers[name] == 0:
                del numbers[name]
        for place, number in numbers.items():
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not (is_number and math.isfinite(number) and number > 0):
                raise ConfigError(f"machine '{self.name}': {place} is {number!r}; it must be a positive number")

    def kernel_ns(self, flops: int, nbytes: int, dtype: str, kind: str = "") -> int:
        """Nanoseconds of a kernel on the device: the slower of its arithmetic and its memory.

        Args:
            flops: Floating-point operations of matrix products.
            nbytes: Bytes read and written.
            dtype: The type that it computes in.
            kind: The kind of product: ``"attention"``, or with transposed operands ``"NT"``, ``"TN"`` or ``"TT"``. A
                kind without a rate of its own is as fast as other products, attention half as fast.
        """
        known = self.flops
        if dtype not in known:
            dtype = next((name for name in _NARROW if dtype in _NARROW and name in known), "float32")
        rate = known.get(f"{dtype} {kind}", known[dtype] * (_ATTENTION_SHARE if kind == "attention" else 1.0))
        return round(max(flops / rate, nbytes / self.device_bandwidth, self.kernel_s) * _NS)

    def host_ns(self, flops: int, nbytes: int) -> int:
        """Nanoseconds of an operator on host memory, without the launch.

        Args:
            flops: Floating-point operations of matrix products.
            nbytes: Bytes read and written.
        """
        return round(max(flops / self.host_flops, nbytes / self.host_bandwidth) * _NS)

    def copy_ns(self, nbytes: int, *, to_device: bool, is_pinned: bool = True) -> int:
        """Nanoseconds of a copy between host and device.

        Args:
            nbytes: Bytes that cross.
            to_device: The direction.
            is_pinned: Whether the host memory is page-locked.
        """
        rate = self.to_device_bandwidth if to_device else self.to_host_bandwidth
        return round((nbytes / (rate if is_pinned else self.pageable_bandwidth) + self.copy_latency_s) * _NS)

    def disk_ns(self, nbytes: int) -> int:
        """Nanoseconds of a drive that reads half of so many bytes and writes the other half, at once."""
        return round(nbytes / self.disk_bandwidth * _NS)

    def collective_ns(self, nbytes: int) -> int:
        """Nanoseconds of an all-gather or reduce-scatter.

        Args:
            nbytes: Bytes that one process sends: one slice for every other.
        """
        return round((nbytes / self.link_bandwidth + self.link_latency_s) * _NS)

    def check_processes(self, world_size: int) -> None:
        """Makes sure that there is a device for every process.

        Args:
            world_size: The number of processes.

        Raises:
            ConfigError: If there is not.
        """
        if world_size > self.num_devices:
            card, _ = _parts_of(self.name)
            instead = (
                "use fewer, set it in the machine's file, or measure in all processes at once ('torchrun "
                f"--nproc_per_node {world_size} -m hf_patrickstar env --measure --json FILE')"
            )
            if card in _CARDS:
                instead = f"give --machine {world_size}x{card}, or use fewer"
            raise ConfigError(
                f"machine '{self.name}': {world_size} processes need as many devices, num_devices is "
                f"{self.num_devices}; {instead}"
            )

    def shared_by(self, num_processes: int) -> "Machine":
        """The part of one of several processes, each with a device like this one, that share this machine's host.

        Args:
            num_processes: How many there are.
        """
        return dataclasses.replace(
            self,
            num_devices=num_processes,
            host_nbytes=self.host_nbytes // num_processes,
            host_bandwidth=self.host_bandwidth / num_processes,
            memory_bandwidth=self.memory_bandwidth / num_processes,
            host_flops=self.host_flops / num_processes,
            disk_nbytes=self.disk_nbytes // num_processes,
            disk_bandwidth=self.disk_bandwidth / num_processes,
            num_cores=max(self.num_cores // num_processes, 1),
            link_bandwidth=self.link_bandwidth or self.to_host_bandwidth,  # nothing better is known than the bus
        )

    def with_cores(self, most: int) -> "Machine":
        """This machine with no more than so many cores, which bound what its host computes and moves.

        Args:
            most: How many there are.
        """
        if most >= self.num_cores:
            return self
        return dataclasses.replace(
            self,
            host_bandwidth=min(self.host_bandwidth, most * self.core_bandwidth),
            host_flops=self.host_flops * most / self.num_cores,
            num_cores=most,
        )

    @property
    def message_ns(self) -> int:
        """Nanoseconds of the host for a message to all processes, and theirs."""
        return round(self.message_s * _NS)

    @property
    def visit_ns(self) -> int:
        """Nanoseconds of the host for a visit to a chunk."""
        return round(self.visit_s * _NS)

    @property
    def operator_ns(self) -> int:
        """Nanoseconds of the host for one operator."""
        return round(self.operator_s * _NS)

    def to_json(self) -> str:
        """The machine as JSON text that ``find_machine`` reads."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Machine":
        """Makes a machine of the fields of a JSON file.

        Raises:
            ConfigError: If a field is unknown or missing.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(known)}"
                raise ConfigError(f"machine: '{key}' is not a field{hint}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(
                f"machine: {error}; write the file with 'hf-patrickstar env --measure --json FILE'"
            ) from error


def name_of_products(key: str) -> str:
    """What a rate of ``Machine.flops`` is called: "NT products in float32", or "attention in float32"."""
    dtype, _, kind = key.partition(" ")
    return f"{kind} in {dtype}" if kind == "attention" else f"{kind} products in {dtype}".lstrip()


class Host(NamedTuple):
    """The host of one device, and what several devices of its kind share.

    Attributes:
        memory: Bandwidth of its memory, bytes per second.
        cores: Its cores.
        gib: Its memory, GiB.
    """

    memory: float
    cores: int
    gib: int


class Card(NamedTuple):
    """A device as its data sheet describes it; see ``docs/plan.md`` for the sources.

    Attributes:
        matmul: Dense matrix products in bfloat16, FLOP/s; of a V100 in float16.
        reached: The share of it that large products reach.
        float32: Products in fp32, FLOP/s.
        memory: Bandwidth of its memory, bytes per second.
        bus: Bandwidth to the host in each direction, bytes per second.
        link: Bandwidth to other devices in each direction, bytes per second.
        gib: Memory that the driver shows, GiB.
        hosts: The host of one device, and the one that several share.
        has_bfloat16: Whether it computes in bfloat16.
    """

    matmul: float
    reached: float
    float32: float
    memory: float
    bus: float
    link: float
    gib: float
    hosts: tuple[Host, Host]
    has_bfloat16: bool = True


_PCIE_3, _PCIE_4, _PCIE_5, _NVLINK_C2C = 15.75e9, 31.5e9, 63e9, 450e9
_DESKTOP = (Host(89.6e9, 16, 128),) * 2  # two channels of DDR5, however many cards there are
_SERVER = Host(204.8e9, 32, 256), Host(409.6e9, 128, 2 * 512)  # a socket, and two, with eight channels of DDR4 each
_SERVER_5 = Host(307.2e9, 48, 512), Host(614.4e9, 112, 2048)  # likewise of DDR5
_GRACE = Host(512e9, 72, 480), Host(2 * 512e9, 144, 960)
_PAPER = Host(128e9, 12, 223), Host(256e9, 96, 223)  # eight V100 share 240 GB; one of them may use all of it

_CARDS: Mapping[str, Card] = {
    "v100": Card(125e12, 0.75, 15.7e12, 900e9, _PCIE_3, 150e9, 32, _PAPER, False),
    "rtx3090": Card(71e12, 0.9, 35.6e12, 936e9, _PCIE_4, _PCIE_4, 24, _DESKTOP),
    "rtx4090": Card(165.2e12, 0.9, 82.6e12, 1008e9, _PCIE_4, _PCIE_4, 24, _DESKTOP),
    "rtx5090": Card(209.5e12, 0.9, 104.8e12, 1792e9, _PCIE_5, _PCIE_5, 31.8, _DESKTOP),
    "a6000": Card(154.8e12, 0.75, 38.7e12, 768e9, _PCIE_4, _PCIE_4, 48, _SERVER),
    "l40s": Card(362e12, 0.7, 91.6e12, 864e9, _PCIE_4, _PCIE_4, 45, _SERVER),
    "rtx-pro-6000": Card(503.8e12, 0.75, 126e12, 1792e9, _PCIE_5, _PCIE_5, 95.6, _SERVER_5),
    "a100-40": Card(312e12, 0.8, 19.5e12, 1555e9, _PCIE_4, 300e9, 40, _SERVER),
    "a100-80": Card(312e12, 0.8, 19.5e12, 2039e9, _PCIE_4, 300e9, 80, _SERVER),
    "h100": Card(989e12, 0.75, 66.9e12, 3350e9, _PCIE_5, 450e9, 80, _SERVER_5),
    "gh200": Card(989e12, 0.75, 66.9e12, 4000e9, _NVLINK_C2C, 450e9, 95.6, _GRACE),
    "h200": Card(989e12, 0.75, 66.9e12, 4800e9, _PCIE_5, 450e9, 140, _SERVER_5),
    "b200": Card(2250e12, 0.75, 75e12, 8000e9, _PCIE_5, 900e9, 179, _SERVER_5),
}
"""Devices from the cheapest to the dearest: a rough order of what an hour of one costs."""
_MOST_DEVICES = 8
"""Devices of one host, at most."""


def peak(name: str, card: Card, num: int = 1) -> Machine:
    """A machine with so many devices of a kind, from the figures of data sheets.

    Programs reach less. Kernels reach 0.85 of the device's memory bandwidth (copies reached 0.83 on an H200), pinned
    copies 0.8 of the bus (0.87 there) and pageable ones an eighth of that, the cores 0.75 of the host's memory
    bandwidth, or 12 GB/s each where that is less. A core does 30 GFLOP/s.

    Args:
        name: What it is called.
        card: The device, and its host.
        num: How many share the host.
    """
    host, narrow = card.hosts[num > 1], _NARROW if card.has_bfloat16 else ("float16",)
    cores = max(host.cores // num, 1)
    return Machine(
        name=name,
        flops={"float32": card.reached * card.float32, **dict.fromkeys(narrow, card.reached * card.matmul)},
        device_nbytes=int(card.gib * GIB),
        device_bandwidth=0.85 * card.memory,
        to_device_bandwidth=0.8 * card.bus,
        to_host_bandwidth=0.8 * card.bus,
        pageable_bandwidth=0.8 * card.bus / 8,
        host_nbytes=int(host.gib / num * GIB),
        host_bandwidth=min(0.75 * host.memory / num, cores * 12e9),
        memory_bandwidth=0.75 * host.memory / num,
        host_flops=cores * 30e9,
        num_cores=cores,
        disk_bandwidth=6e9 / num,
        num_devices=num,
        link_bandwidth=0.8 * card.link if num > 1 else 0.0,
    )


MACHINES: Mapping[str, Machine] = {name: peak(name, card) for name, card in _CARDS.items()}
"""Machines with one device that are known by name, from the data sheets of their parts; see ``peak``."""
BY_PRICE = (*_CARDS, "8xh100")
"""Machines from the cheapest to the dearest: a rough order of what an hour of one costs, without prices."""


CPU_TIER = Machine(
    name="cpu",
    flops={"float32": 100e9},
    device_nbytes=64 * GIB,
    device_bandwidth=20 * GIB,
    to_device_bandwidth=10 * GIB,
    to_host_bandwidth=10 * GIB,
    pageable_bandwidth=10 * GIB,
    host_nbytes=64 * GIB,
    host_bandwidth=20 * GIB,
    host_flops=100e9,
    num_cores=1,
    has_accelerator=False,
)
"""A machine without an accelerator. Both tiers are the same memory: the optimizer costs the same on either."""

ACCELERATOR = peak("accelerator", Card(200e12, 0.75, 40e12, 1200e9, _PCIE_4, _PCIE_4, 40, (Host(150e9, 16, 256),) * 2))
"""An accelerator that is not known, on PCIe 4."""

_DEVICES = {
    **{"GH200": "gh200", "H200": "h200", "H100": "h100", "B200": "b200", "V100": "v100", "L40S": "l40s"},
    **{"A100-SXM4-80": "a100-80", "A100 80": "a100-80", "A100-PCIE-80": "a100-80", "A100": "a100-40"},
    **{"RTX A6000": "a6000", "RTX PRO 6000": "rtx-pro-6000"},
    **{f"RTX {number}": f"rtx{number}" for number in ("3090", "4090", "5090")},
}
"""Parts of the names of devices, as drivers call them, and the machines that have them; the first one counts."""


def machine_of(device_name: str) -> Machine:
    """The machine by whose rates decisions are made where nobody says which one it is.

    Args:
        device_name: What the driver calls the accelerator.
    """
    found = [machine for part, machine in _DEVICES.items() if part.lower() in device_name.lower()]
    return MACHINES[found[0]] if found else ACCELERATOR


def _parts_of(name: str) -> tuple[str, int]:
    """The card of a machine's name, and how many of them it says, as in ``8xh100``."""
    several = re.fullmatch(r"([1-9]\d*)x(.+)", name)
    return (several[2], int(several[1])) if several else (name, 1)


def whole_host_nbytes(name: str) -> int | None:
    """Memory of the host of a known machine, for all of its devices; ``None`` if nobody knows the name."""
    card, num = _parts_of(name)
    return _CARDS[card].hosts[num > 1].gib * GIB if card in _CARDS else None


def find_machine(name: str) -> Machine:
    """A known machine, or one from a JSON file that ``Machine.to_json`` wrote.

    Args:
        name: A key of ``MACHINES``, such a key after a number of devices (``8xh100``), or the path of a file.

    Raises:
        ConfigError: If there is none.
    """
    card, num = _parts_of(name)
    if card in _CARDS:
        if num > _MOST_DEVICES:
            raise ConfigError(f"machine '{name}': one host has at most {_MOST_DEVICES} devices; plan for fewer")
        return peak(card if num == 1 else name, _CARDS[card], num)
    path = pathlib.Path(name)
    if path.suffix != ".json" and not path.is_file():
        near = difflib.get_close_matches(name, MACHINES, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(
            f"machine '{name}' is not known; known are {', '.join(MACHINES)}, several of them as in 8xh100, or a JSON "
            f"file.{hint}"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"machine '{name}': the file cannot be read as JSON: {error}; write it with 'hf-patrickstar env "
            "--measure --json FILE'"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"machine '{name}': the file holds no JSON object; write it with 'hf-patrickstar env --measure --json FILE'"
        )
    return Machine.from_dict(values)
